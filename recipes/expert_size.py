"""How good a small expert is: accuracy by the number of random features, with the Gram matrix in float64 or float32.

Ten tasks, features of a frozen encoder, a ridge classifier as in tpl-plus. With float32 the Gram matrix is rounded
after every task, as if it was stored so. Means over random projections. A Gram matrix of 50 MB (float64, one triangle)
has 3535 random features.

python recipes/expert_size.py --json results/choices/digits/expert-size.json    # digits, compact: minutes on one core
python recipes/expert_size.py --source cifar100 --data DIR --encoder vit_tiny_patch16_224 --weights FILE --device cuda
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl import Learner
from tpl.methods.parts.ridge import RandomRidge, RidgeConfig
from tpl.stream import load_source

WIDTHS = (128, 256, 512, 1024, 2048, 3535)
TASKS = 10


def main() -> None:
    """Measure every width and both precisions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--source", default="digits")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--encoder", default="compact")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    source = load_source(options.source, options.data)
    method = Learner("tpl", options.encoder, options.weights, options.device).method
    assert source.test is not None
    parts = source.train, source.test
    z, test = (F.normalize(method.encoder_features(method.preprocess.batch(part)), dim=1) for part in parts)
    y, truth = (torch.tensor(part.labels).to(z.device) for part in parts)
    rows = []
    for width in options.widths:
        row: dict[str, float] = {"random_features": width, "gram_mb_float64": round(4e-6 * width * (width + 1), 2)}
        for precision in (torch.float64, torch.float32):
            found = [accuracy(z, y, test, truth, width, precision, seed) for seed in range(options.seeds)]
            row[str(precision).removeprefix("torch.")] = round(100 * sum(found) / len(found), 2)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.json:
            result = {"source": options.source, "encoder": options.encoder, "seeds": options.seeds, "rows": rows}
            options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def accuracy(z: Tensor, y: Tensor, test: Tensor, truth: Tensor, width: int, precision: torch.dtype, seed: int) -> float:
    """The accuracy after ten tasks."""
    generator = torch.Generator().manual_seed(seed)
    ridge = RandomRidge.drawn_for(z, RidgeConfig(random_features=width), generator)
    task = y * TASKS // (int(y.max()) + 1)
    for t in range(TASKS):
        ridge.learn(z[task == t], y[task == t], generator)
        ridge.gram = ridge.gram.to(precision).double()
    ridge._solve()
    return float((ridge.log_probabilities(test).argmax(dim=1) == truth).double().mean())


if __name__ == "__main__":
    main()
