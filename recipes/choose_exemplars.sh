#!/usr/bin/env bash
# Which images a memory should keep: random (the paper), herding, k-centres, nearest to the border, largest leverage; at
# 200, 500 and 2000 images, three class orders. Measured on a tenth of the training images, held out; the test images are
# never looked at. On CIFAR-100 it wants a GPU; `digits-5t` with MEMORIES="20 50 200" runs anywhere.
#
#     recipes/choose_exemplars.sh OUT c100-10t --encoder vit_tiny_patch16_224 --weights FILE --data DIR --epochs 8 \
#         --lr 0.01 --set schedule=cosine --set augment=flip
set -euo pipefail
out=${1:?where to put the runs}
benchmark=${2:?a benchmark}
tpl=${TPL:-tpl}
mkdir -p "$out"
for memory in ${MEMORIES:-200 500 2000}; do
  for policy in ${POLICIES:-random herding k-centres border leverage}; do
    for method in ${METHODS:-tpl}; do
      name="$method-$memory-$policy"
      "$tpl" run "$benchmark" --method "$method" --order natural,random:1,random:2 --validation 0.1 --memory "$memory" \
        --set "memory_policy=$policy" --resume --out "$out/$name" --json "${@:3}" > "$out/$name.json"
    done
  done
done
