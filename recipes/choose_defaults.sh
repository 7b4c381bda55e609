#!/usr/bin/env bash
# How TPL's defaults were chosen where the paper and its public code differ: on a fifth of the digits' training
# images, held out, over three seeds. The test images are never looked at. About 12 minutes on two cores.
#
#     recipes/choose_defaults.sh OUT
set -euo pipefail
out=${1:?where to put the runs}
tpl=${TPL:-tpl}
for seed in 0 1 2; do
  run() { "$tpl" run digits-5t --validation 0.2 --seed "$seed" --resume --out "$out/$1-$seed" --json "${@:2}" > "$out/$1-$seed.json"; }
  mkdir -p "$out"
  public=(--set weight_decay=0.0005 --set nesterov=true)
  run defaults
  run public-sgd "${public[@]}"
  run public-sgd-per_class "${public[@]}" --set others=per_class
  run public-sgd-soft "${public[@]}" --set masks=soft
  "$tpl" ablate "$out/defaults-$seed" --json > "$out/ablate-$seed.json"
done
