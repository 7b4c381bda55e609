"""Images per second through a bank of task models, against the number of tasks, on this machine.

Three ways to query it: `naive`, a plain forward pass per task over the whole batch, in a simple loop (no CUDA graph, no
compiling, the same precision); `batched`, every task at once, as `outputs` of a method does; `some`, `--passes` random
tasks per image, as `passes=N` of tpl-plus does after its expert has chosen. Heads are included, the expert is not. The
tasks are random and untrained, with 70 % of their units open: only speed is measured.

python benchmarks/inference.py --quick                     # compact on the CPU, T = 10: a minute on two cores
python benchmarks/inference.py --device cuda --encoder vit_tiny_patch16_224 --weights FILE --batch 1 32 256 --quick
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpl.bench.results import describe_environment
from tpl.engine import choose_compute
from tpl.methods.bank import Query
from tpl.methods.bank import bank as bank_module
from tpl.methods.tpl import TPL, TPLConfig
from tpl.nets import create_encoder

OPEN = 0.7  # share of units that a task has open
CLASSES = 10  # of a task


def main() -> None:
    """Measure and print one JSON object."""
    options = parsed()
    bank_module.ROWS = options.rows or bank_module.ROWS
    compute = choose_compute(options.device, options.precision, options.compile)
    method = TPL(create_encoder(options.encoder, options.weights), TPLConfig(latent=options.latent), compute)
    naive = Naive(method, create_encoder(options.encoder, options.weights))  # the method's own may be compiled
    generator = torch.Generator().manual_seed(0)
    rows = []
    for tasks in sorted(options.tasks):
        while len(method.bank.tasks) < tasks:
            add_task(method, generator)
        for batch in options.batch:
            shape = (batch, 3, method.preprocess.height, method.preprocess.width)
            pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(compute.device)
            asked = some_tasks(batch, tasks, min(options.passes, tasks), generator)
            ways: dict[str, Callable[[], Any]] = {
                "naive": partial(naive, pixels),
                "batched": partial(method.outputs, pixels),
                "some": partial(method.query, pixels, asked),
            }
            rows.append({"tasks": tasks, "batch": batch} | measured(ways, batch, options.seconds, options.repeats))
            print(json.dumps(rows[-1]), flush=True)
    result = {
        "encoder": method.encoder.name,
        "precision": "bf16" if compute.bf16 else "fp32",
        "compiled": method.encoder.fused,
        "latent": options.latent,
        "rows_of_a_pass": bank_module.ROWS if compute.device.type == "cuda" else None,
        "passes_of_some": options.passes,
        "threads": torch.get_num_threads(),
        "tasks": "random, untrained, 70 % of the units open",
        "rows": rows,
        "environment": describe_environment(compute.device),
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def parsed() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="compact")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--latent", type=int, default=64)
    parser.add_argument("--tasks", type=int, nargs="+", default=[1, 2, 5, 10, 20, 50])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--passes", type=int, default=3, help="tasks queried per image by `some`")
    parser.add_argument("--rows", type=int, default=0, help="pairs of image and task in a pass on a GPU; 0: as usual")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long to measure each at least")
    parser.add_argument("--repeats", type=int, default=2, help="measurements of each, by turns; the best counts")
    parser.add_argument("--quick", action="store_true", help="ten tasks alone, one short measurement")
    parser.add_argument("--json", type=Path, help="write the result here, too")
    options = parser.parse_args()
    if options.quick:
        options.tasks, options.seconds, options.repeats = [10], 0.5, 1
    return options


class Naive:
    """A loop over tasks, each a plain forward pass of the whole batch."""

    def __init__(self, method: TPL, encoder: Any) -> None:
        self.bank, self.dtype = method.bank, method.compute.dtype
        self.encoder = encoder.to(method.compute.device)
        self.normalise = method.preprocess.normaliser(method.compute.device, self.dtype)

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Features and logits of every task."""
        answers = []
        for t, model in enumerate(self.bank.tasks):
            features = self.encoder(self.normalise(pixels), model.norms, self.bank.weights(t), dtype=self.dtype)
            answers.append((features, self.bank.logits(features, t)))
        return answers


def add_task(method: TPL, generator: torch.Generator) -> None:
    """A task with random norms, head and mask."""
    bank = method.bank
    model = bank.new_task(CLASSES, CLASSES + 1, generator)
    with torch.no_grad():
        model.norms.mul_(1 + 0.1 * torch.randn(model.norms.shape, generator=generator).to(model.norms.device))
        drawn = torch.rand(model.embedding.shape, generator=generator) - (1 - OPEN)
        model.embedding.copy_(drawn)
    bank.add(model)


def some_tasks(images: int, tasks: int, passes: int, generator: torch.Generator) -> list[Query]:
    """`passes` tasks for every image, as queries."""
    chosen = torch.rand(images, tasks, generator=generator).argsort(dim=1)[:, :passes]
    asked = torch.zeros(images, tasks, dtype=torch.bool).scatter(1, chosen, True)
    rows = [torch.nonzero(column).squeeze(1) for column in asked.T]
    return [Query(t, own) for t, own in enumerate(rows) if len(own)]


def measured(ways: dict[str, Callable[[], Any]], images: int, seconds: float, repeats: int) -> dict[str, Any]:
    """Images per second of wall-clock time, and processor seconds an image, of each way; all by turns."""
    for work in ways.values():
        timed(work, 0)  # warm-up: CUDA graphs, compiling, transposed weights
    best: dict[str, tuple[float, float]] = {}
    for _ in range(repeats):
        for name, work in ways.items():
            now = timed(work, seconds)
            best[name] = tuple(min(pair) for pair in zip(now, best.get(name, now), strict=True))  # type: ignore[assignment]
    return {
        "images_per_second": {name: round(images / wall, 2) for name, (wall, _) in best.items()},
        "processor_ms_per_image": {name: round(1e3 * used / images, 2) for name, (_, used) in best.items()},
        "batched_over_naive": round(best["naive"][0] / best["batched"][0], 2),
        "batched_over_naive_by_processor_time": round(best["naive"][1] / best["batched"][1], 2),
    }


def timed(work: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """Wall-clock and processor seconds of one call, over as many as fit."""
    started, used, calls = time.perf_counter(), time.process_time(), 0
    while not calls or time.perf_counter() - started < seconds:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        calls += 1
    return (time.perf_counter() - started) / calls, (time.process_time() - used) / calls


if __name__ == "__main__":
    main()
