"""Which settings suit a method? Measured on held-out training images; the test images are never looked at.

python recipes/choose_settings.py --data cifar100/ "" lr=0.1 lr=0.1,sparsity=1.5 method=hat     # a GPU's work
python recipes/choose_settings.py --data cifar100/ --encoder resnet18:8 --per-class 100 --epochs 10 "" lr=0.02
python recipes/choose_settings.py --data cifar100/ --encoder vit_tiny_patch16_224 --weights FILE --epochs 3 \
    method=der,lr=0.01 method=der,lr=0.003                                                      # a GPU's work
python recipes/choose_settings.py --data cifar100/ --encoder vit_tiny_patch16_224 --weights FILE --tasks 10 \
    --longer 0.2 method=joint,stages=last method=joint-ridge,stages=last    # until more epochs do not help

Every alternative is a list of options that differ from the benchmark's own for this encoder ("" for none), with
`method` and `encoder` among them. Each prints one JSON line as soon as it is done: the options, Last, AIA, TIL and task
prediction in per cent, TIL of every task, the capacity after each, the last epoch's losses, and how long it took. With
`--longer`, twice as many epochs follow, and again, until Last gains less than so many points; a last line says how
many are enough.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tpl.bench.evaluate import Evaluator, StageResult
from tpl.bench.metrics import matrix_of
from tpl.bench.results import KINDS, accuracies
from tpl.bench.spec import RunSpec
from tpl.engine import Event
from tpl.errors import TplError
from tpl.stream import Stream, Task


def main() -> None:
    """Run the alternatives one after the other; one that fails says so in its line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("alternatives", nargs="+", metavar="NAME=VALUE,...", help='options to change; "" for none')
    parser.add_argument("--benchmark", default="c100-10t")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--encoder", default="resnet18")
    parser.add_argument("--weights", type=Path, help="of a pre-trained encoder")
    parser.add_argument("--tasks", type=int, default=3, help="learn the first few tasks")
    parser.add_argument("--per-class", type=int, help="train on this many images of a class")
    parser.add_argument("--validation", type=float, default=0.1, help="the share that is held out and measured on")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--longer", type=float, metavar="POINTS", help="double the epochs while Last gains so much")
    parser.add_argument("--accept-contaminated-encoder", action="store_true", help="as in `tpl run`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", default="auto")
    options = parser.parse_args()
    common = {"epochs": options.epochs} if options.epochs else {}
    for alternative in options.alternatives:
        try:
            given = common | changes(alternative)
            method, encoder = str(given.pop("method", "tpl")), str(given.pop("encoder", options.encoder))
            spec = RunSpec(
                options.benchmark, method, encoder, options.weights, options.data, seed=options.seed,
                tasks=options.tasks, validation=options.validation, device=options.device,
                compile=options.compile, accept_contaminated_encoder=options.accept_contaminated_encoder, options=given,
            )  # fmt: skip
            for found in longer(spec, options.longer, options.per_class):
                print(json.dumps({"alternative": alternative, **found}), flush=True)
        except TplError as error:
            print(json.dumps({"alternative": alternative, "failed": str(error)}), flush=True)


def changes(alternative: str) -> dict[str, Any]:
    """`lr=0.1,nesterov=true` as options."""
    pairs = [part.partition("=") for part in alternative.split(",") if part]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise TplError(f"An alternative is NAME=VALUE,NAME=VALUE; got '{wrong[0]}'.")
    return {name: value for name, _, value in pairs}


def longer(spec: RunSpec, gain: float | None, per_class: int | None) -> Iterator[dict[str, Any]]:
    """Measure `spec`; with a `gain`, also with twice the epochs and so on, until Last gains fewer points than that."""
    found = measure(spec, per_class)
    yield found
    while gain is not None:
        shorter, spec = found, replace(spec, options=spec.options | {"epochs": 2 * found["epochs"]})
        found = measure(spec, per_class)
        yield found
        if found["last"] < shorter["last"] + gain:
            yield {"enough_epochs": shorter["epochs"]}
            return


def measure(spec: RunSpec, per_class: int | None) -> dict[str, Any]:
    """Learn the tasks of `spec` and measure after each of them."""
    started = time.perf_counter()
    stream = Stream([fewer(task, per_class) for task in spec.stream()])
    method = spec.learner().method
    evaluator, watch = Evaluator(stream, method), Watch()
    stages: list[StageResult | None] = [None] * method.first_stage(len(stream))  # stages that are left out
    for number, task in enumerate(stream):
        if number >= len(stages):
            method.learn(stream.union(number) if method.cumulative else task, watch)
            stages.append(evaluator.stage(number))
    what = {"method": spec.method, "encoder": spec.encoder, "epochs": spec.all_options().get("epochs")}
    return what | summary(stages, stream) | watch.found() | {"seconds": round(time.perf_counter() - started, 1)}


def fewer(task: Task, per_class: int | None) -> Task:
    """The task with so many training images of each class at most: its first ones."""
    if per_class is None:
        return task
    labels = np.asarray(task.train.labels)
    kept = np.concatenate([np.flatnonzero(labels == label)[:per_class] for label in range(len(task.classes))])
    return Task(task.name, task.classes, task.train.select(np.sort(kept)), task.test)


def summary(stages: Sequence[StageResult | None], stream: Stream) -> dict[str, Any]:
    """What the stages come to, in per cent."""
    sizes = [len(task.test) for task in stream if task.test is not None]
    matrices = {kind: matrix_of([getattr(stage, kind, []) for stage in stages]) for kind in KINDS}
    numbers = {name: accuracies(matrices, sizes)[name] for name in ("last", "aia", "til", "tp")}
    by_task = [round(100 * value, 1) for value in matrices["til"][-1]]  # late tasks fall behind in a full network
    rounded = {name: None if value is None else round(100 * value, 2) for name, value in numbers.items()}
    return rounded | {"til_by_task": by_task}


class Watch:
    """Notes what a method tells while it learns."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.capacity: list[dict[str, float]] = []
        self.images, self.busy = 0, 0.0

    def __call__(self, event: Event) -> None:
        """One more event."""
        data = event.data
        if event.kind == "epoch" and data["epoch"] == data["epochs"]:
            self.losses.append(round(data["loss"], 3))
        elif event.kind == "capacity":
            self.capacity.append({name: round(share, 3) for name, share in data.items()})
        elif event.kind == "trained":
            self.images, self.busy = self.images + data["images"], self.busy + data["seconds"]

    def found(self) -> dict[str, Any]:
        """All of it."""
        rate = round(self.images / self.busy, 1) if self.busy else None
        return {"losses": self.losses, "capacity": self.capacity, "images_per_second": rate}


if __name__ == "__main__":
    main()
