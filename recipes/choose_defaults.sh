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
  run default
  run per_class --set others=per_class
  run soft --set masks=soft
  run plain-sgd --set weight_decay=0 --set nesterov=false
  "$tpl" ablate "$out/default-$seed" --json > "$out/ablate-$seed.json"
done
