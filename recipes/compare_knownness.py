"""Which part of TPL's score tells unknown images best? Behind `LikelihoodRatio.in_distribution_score`.

python recipes/compare_knownness.py > results/choices/knownness.json     # about a minute on two cores

The first three tasks of the digits are learned; half of their held-out images set the conformal thresholds, the other
half are the known ones. Unknown are digits of the other classes, noise, and single colours.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tpl import Learner
from tpl.bench.metrics import auroc
from tpl.bench.results import describe_environment
from tpl.methods.tpl import TPL
from tpl.scores.calibration import unknown_scores
from tpl.stream import load_source, split

SHARE = 0.1
WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "MD": lambda md, mls: md,
    "MLS": lambda md, mls: mls,
    "log MD + MLS": lambda md, mls: md.log() + mls,
    "smaller of both": torch.minimum,
    "soft minimum": lambda md, mls: -torch.logaddexp(-md, -mls),
    "soft maximum": torch.logaddexp,
}


def main() -> None:
    """Measure and print one JSON object."""
    source = load_source("digits", None, False)
    stream = split(source.train, source.test, source.class_names, 2).with_validation(0.2, seed=0)
    learner = Learner("tpl", device="cpu", latent=32, lr=0.05, epochs=3, memory=200, batch_size=16)
    method = learner.method
    assert isinstance(method, TPL)
    for task in stream[:3]:
        method.learn(task)
    held = [method.preprocess.batch(task.test) for task in stream if task.test is not None]
    rng = np.random.default_rng(0)
    noise = [Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(150)]
    plain = [Image.fromarray(np.full((32, 32, 3), rng.integers(0, 256, 3), dtype=np.uint8)) for _ in range(150)]
    unknown = {
        "other digits": torch.cat(held[3:]),
        "noise": learner.prepare(noise),
        "one colour": learner.prepare(plain),
    }
    rows = []
    for name, way in WAYS.items():

        def ask(pixels: Tensor, way: Callable[[Tensor, Tensor], Tensor] = way) -> list[Tensor]:
            pairs = zip(method.scores_, method.outputs(pixels), strict=True)
            return [way(score.in_task_part(*o), score.logit_part(*o)) for score, o in pairs]

        thresholds = [ask(pixels[::2])[t].sort().values for t, pixels in enumerate(held[:3])]
        known = unknown_scores(ask(torch.cat([pixels[1::2] for pixels in held[:3]])), thresholds).numpy()
        row: dict[str, object] = {"knownness": name, "known rejected": float((known >= 1 - SHARE).mean())}
        for kind, pixels in unknown.items():
            strange = unknown_scores(ask(pixels), thresholds).numpy()
            row[kind] = {"auroc": auroc(strange, known), "rejected": float((strange >= 1 - SHARE).mean())}
        rows.append(row)
    result = {"share": SHARE, "rows": rows, "environment": describe_environment(torch.device("cpu"))}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
