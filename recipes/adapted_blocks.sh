#!/usr/bin/env bash
# Accuracy, TIL, task prediction and drift against the number of adapted blocks: C100-10T, a tenth of the training
# images held out and measured on, three class orders side by side. The test images are never looked at. Wants a GPU.
#
#     recipes/adapted_blocks.sh OUT CIFAR100 [--weights FILE]
#
# ENCODER, METHODS and BLOCKS in the environment choose others; `tpl report OUT` makes the table.
set -euo pipefail
out=${1:?where to put the runs}
data=${2:?where CIFAR-100 is}
tpl=${TPL:-tpl}
for blocks in ${BLOCKS:-3 6 all}; do
  for method in ${METHODS:-tpl tpl-plus}; do
    "$tpl" run c100-10t --method "$method" --encoder "${ENCODER:-vit_tiny_patch16_224}" --data "$data" "${@:3}" \
      --order natural,random:1,random:2 --validation 0.1 --resume --out "$out/$method-$blocks" \
      --epochs 8 --lr 0.01 --set schedule=cosine --set augment=flip --set adapted_blocks="$blocks"
  done
done
