"""The same work for several methods on one machine: learn all tasks of a benchmark, then answer its test images.

    python benchmarks/peers.py c100-10t --encoder vit_tiny_patch16_224 --weights FILE --data DIR --json peers.json
    python benchmarks/peers.py digits-5t --methods slda ranpac tpl --epochs 1        # a minute on one core

All methods get the same decoded images, encoder, epochs and batch, one after the other in one process; what the first
one compiles is compiled before by a task that does not count. Answers are for batches of 256 images, a class for each.
Compare the columns "times tpl": they hold on any machine of a kind, the seconds on this one only. A method with its own
number of epochs or passes has it here as well; `epochs` of each row says so.

The authors' public code for TPL trains 740 images/s with ViT-tiny at 224 pixels on an H200, measured with its own data
loader in its own environment; it is not part of this repository, so this program cannot measure it again.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tpl.bench.spec import RunSpec
from tpl.engine import Event
from tpl.methods import find_method
from tpl.methods.base import Method
from tpl.stream import Stream

METHODS = ["slda", "ranpac", "anacp", "finetune", "replay", "hat", "row", "tpl", "tpl-plus"]
MEASURE = "tpl"  # what the others are compared with
BATCH = 256


def main() -> None:
    """Measure and print one JSON object."""
    options = parsed()
    rows: list[dict[str, Any]] = []
    for name in options.methods:
        spec = spec_of(name, options)
        stream = spec.stream()
        if not rows:
            decode(spec, stream)
            learned(replace(spec, tasks=1), replace(spec, tasks=1).stream())  # compiles
        rows.append(measured(spec, stream))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)  # an interrupted measurement keeps what there is
    add_ratios(rows)
    result = {
        "benchmark": options.benchmark,
        "encoder": spec.encoder,
        "device": torch.cuda.get_device_name() if on_gpu() else platform.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rows": rows,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


def parsed() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--encoder", default="")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--tasks", type=int, help="of the benchmark; by default all")
    parser.add_argument("--json", type=Path, help="write the result here, too")
    return parser.parse_args()


def spec_of(name: str, options: argparse.Namespace) -> RunSpec:
    """The run of one method; of the options, those that it has."""
    has_epochs = hasattr(find_method(name).config_class(), "epochs")
    return RunSpec(
        options.benchmark,
        name,
        options.encoder,
        options.weights,
        options.data,
        tasks=options.tasks,
        device=options.device,
        options={"epochs": options.epochs} if has_epochs else {},
    )


def decode(spec: RunSpec, stream: Stream) -> None:
    """Read all images once: they stay in memory, and no method waits for them."""
    preprocess = spec.learner().method.preprocess
    for task in stream:
        for images in (task.train, task.test):
            if images is not None:
                preprocess.batch(images)


def learned(spec: RunSpec, stream: Stream) -> tuple[Method, dict[str, float]]:
    """A method that has learned all tasks, and how long that took; `trained` is the time in training steps alone."""
    learner = spec.learner()
    seconds = {"learn_s": 0.0, "trained_s": 0.0, "trained_images": 0.0}

    def note(event: Event) -> None:
        if event.kind == "trained":
            seconds["trained_s"] += event.data["seconds"]
            seconds["trained_images"] += event.data["images"]

    for stage, task in enumerate(stream.once()):
        if learner.method.cumulative and stage < len(stream) - 1:
            continue  # it would begin anew at every stage: the last one is its whole work
        wait()
        started = time.perf_counter()
        learner.learn(stream.union(stage) if learner.method.cumulative else task, held_out=0, callback=note)
        wait()
        seconds["learn_s"] += time.perf_counter() - started
    return learner.method, seconds


def measured(spec: RunSpec, stream: Stream) -> dict[str, Any]:
    """One method: seconds to learn and to answer, and images a second through its training steps."""
    method, seconds = learned(spec, stream)
    tests = [method.preprocess.batch(task.test) for task in stream if task.test is not None]
    pixels = torch.cat(tests)
    batches = [part.to(method.compute.device) for part in pixels.split(BATCH)]
    method.log_probabilities(batches[0])  # captures what it captures
    wait()
    started = time.perf_counter()
    for batch in batches:
        method.log_probabilities(batch).argmax(dim=1).cpu()
    answering = time.perf_counter() - started
    rate = seconds["trained_images"] / seconds["trained_s"] if seconds["trained_s"] else None
    return {
        "method": spec.method,
        "epochs": spec.all_options().get("epochs"),
        "learn_s": round(seconds["learn_s"], 3),
        "training_images_per_second": None if rate is None else round(rate, 1),
        "answer_s": round(answering, 3),
        "answers": len(pixels),
        "answers_per_second": round(len(pixels) / answering, 1),
    }


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """How many times the seconds of TPL each method takes."""
    measure = next((row for row in rows if row["method"] == MEASURE), None)
    for row in rows if measure else ():
        assert measure is not None
        row["learn, times tpl"] = round(row["learn_s"] / measure["learn_s"], 3)
        row["answer, times tpl"] = round(row["answer_s"] / measure["answer_s"], 3)


def on_gpu() -> bool:
    """Whether there is a GPU to wait for."""
    return torch.cuda.is_available()


def wait() -> None:
    """Until the GPU has done all it was given."""
    if on_gpu():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
