"""Images per second of an encoder's own features on a CPU, against the number of images of one pass.

The best of some rounds; `own` is the number that the engine chooses for images of this size. With the closed-form
methods, learning is encoding, and little else.

python benchmarks/encoding.py --encoder photos compact      # one or two minutes on two cores
python benchmarks/encoding.py --encoder vit_tiny_patch16_224 --weights FILE --precision fp32 bf16
"""

from __future__ import annotations

import argparse
import json
import time
from unittest.mock import patch

import torch

from tpl import Learner, program
from tpl.bench.results import describe_environment
from tpl.engine import compute
from tpl.engine.compute import images_on_a_cpu

PASSES = (8, 16, 32, 64, 96, 128, 256)


def main() -> None:
    """Measure and print one JSON object."""
    options = parsed()
    program.claim()
    rows = []
    for name in options.encoder:
        for precision in options.precision:
            learner = Learner("slda", name, weights=options.weights, device="cpu", precision=precision)
            side = learner.method.preprocess.height
            pixels = torch.randint(0, 256, (options.images, 3, side, side), dtype=torch.uint8)
            own = images_on_a_cpu(pixels)
            rates = dict.fromkeys(sorted({*PASSES, own}), 0.0)
            for _ in range(options.rounds):
                rates = {count: max(best, rate(learner, pixels, count)) for count, best in rates.items()}
            rows.append(
                {"encoder": name, "precision": precision, "pixels": side, "own": own, "images_per_second": rates}
            )
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"environment": describe_environment(torch.device("cpu")), "rows": rows}, indent=2))


def rate(learner: Learner, pixels: torch.Tensor, count: int) -> float:
    """Images per second in passes of `count` images."""
    with patch.object(compute, "images_on_a_cpu", lambda _: count):
        learner.method.encoder_features(pixels[:count])
        begin = time.perf_counter()
        learner.method.encoder_features(pixels)
    return round(len(pixels) / (time.perf_counter() - begin), 1)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", nargs="+", default=["photos", "compact"])
    parser.add_argument("--weights")
    parser.add_argument("--precision", nargs="+", default=["fp32"], choices=["fp32", "bf16"])
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
