"""Past one machine: T tasks of ten classes, up to 1 000 tasks and 10 000 classes, as generated feature vectors.

A class is a random mean and Gaussian noise around it. Two parts of tpl-plus are measured, each as large as T asks for:

- `bank`: the vector form of TPL (`VectorTPL`), whose tasks are made without training: random masks, a head of class
  means, the usual statistics. Then one more task is learned in earnest, and samples are answered by all task models;
- `expert`: the ridge classifier on random features, which has seen every sample. It also chooses the task models that a
  sample is worth (`passes=auto`): how many, and how often the right one is among them.

Each size runs in a process of its own, so that peak memory is its own; where it exceeds `--gigabytes`, or a step takes
longer than `--seconds`, the curve ends, and the line says why.

python benchmarks/simulation.py --json benchmarks/simulation-cpu.json    # minutes on two cores
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.methods.bank import Outputs
from tpl.methods.bank.method import HeldOut
from tpl.methods.parts.ridge import RandomRidge, RidgeConfig
from tpl.methods.plus import MOST_QUERIED, PlusConfig
from tpl.methods.vectors import VectorConfig, VectorTPL
from tpl.scores import LikelihoodRatio
from tpl.stream import Task
from tpl.stream.vectors import VectorSet

DIM, CLASSES, IMAGES = 64, 10, 20  # of a feature vector, of a task, and samples of a class
SPREAD = 0.5  # deviation of class means; that of the noise is 1
ANSWERED = 64  # samples answered together


def main() -> None:
    """Run every size of both parts in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, nargs="+", default=[10, 30, 100, 300, 1000])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--memory", type=int, default=2000, help="stored vectors of the bank")
    parser.add_argument("--random-features", type=int, default=2048, help="of the expert")
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--seconds", type=float, default=120.0, help="for one size")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        resource.setrlimit(resource.RLIMIT_DATA, (int(options.gigabytes * 1e9),) * 2)
        found = PARTS[options.one](options.tasks[0], options)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(json.dumps(found | {"peak_gb": round(peak, 2)}))
        return
    rows = []
    for part in options.parts:
        for tasks in options.tasks:
            rows.append({"part": part, "tasks": tasks, "classes": tasks * CLASSES} | separately(part, tasks, options))
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        settings = {"dim": DIM, "samples_of_a_class": IMAGES, "memory": options.memory}
        settings |= {"random_features": options.random_features, "threads": torch.get_num_threads()}
        options.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=2) + "\n", encoding="utf-8")


def separately(part: str, tasks: int, options: argparse.Namespace) -> dict[str, Any]:
    """One size in a process of its own, or why it failed."""
    given = ["--memory", options.memory, "--random-features", options.random_features, "--gigabytes", options.gigabytes]
    command = [sys.executable, __file__, "--one", part, "--tasks", str(tasks), *map(str, given)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=options.seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"broke": f"longer than {options.seconds:g} s"}
    if ran.returncode:
        last = ran.stderr.strip().splitlines()[-1] if ran.stderr.strip() else f"exit code {ran.returncode}"
        memory = "memory" in last.lower() or "alloc" in last.lower()
        return {"broke": f"more than {options.gigabytes:g} GB of memory" if memory else last[:200]}
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def samples_of(task: int, images: int, part: int = 0) -> tuple[Tensor, Tensor]:
    """Vectors of a task's ten classes, and their labels in it."""
    generator = torch.Generator().manual_seed(1000 * task + 1)
    means = SPREAD * torch.randn(CLASSES, DIM, generator=generator)
    generator.manual_seed(1000 * task + 2 + part)
    labels = torch.arange(CLASSES).repeat_interleave(images)
    return means[labels] + torch.randn(len(labels), DIM, generator=generator), labels


def tested(tasks: int) -> tuple[Tensor, Tensor]:
    """Unseen samples of some tasks, spread evenly over all, and their class numbers."""
    chosen = torch.linspace(0, tasks - 1, ANSWERED).long().tolist()
    drawn = [samples_of(task, 1, part=1) for task in chosen]
    own = [n % CLASSES for n in range(ANSWERED)]
    x = torch.stack([vectors[c] for (vectors, _), c in zip(drawn, own, strict=True)])
    return x, torch.tensor([t * CLASSES + c for t, c in zip(chosen, own, strict=True)])


def bank(tasks: int, options: argparse.Namespace) -> dict[str, Any]:
    """The vector form of TPL with so many tasks."""
    config = VectorConfig(memory=options.memory, width=0, epochs=5, standardise="none", latent=64, held_out=0.0)
    model = VectorTPL.new(samples_of(0, IMAGES)[0].numpy(), config, "cpu", 0)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.cat([add_untrained(model, number, generator) for number in range(tasks)])
    labels = torch.arange(tasks * CLASSES).repeat_interleave(IMAGES)
    model.memory.add(VectorSet(vectors.numpy(), labels.numpy()), tasks * CLASSES, model.preprocess)
    started = time.perf_counter()
    model._update_memory_outputs(torch.zeros(0, dtype=torch.long))
    outputs_s = time.perf_counter() - started
    model._use_memory(model.task_classes_, calibrate=False)
    x, truth = tested(tasks)
    pixels = model.prepared(x.numpy())
    model.answer(pixels)
    started = time.perf_counter()
    right = (model.answer(pixels).log_p.argmax(dim=1) == truth).double().mean()
    answer_s = time.perf_counter() - started
    vectors, labels = samples_of(tasks, IMAGES)
    names = tuple(f"{tasks}-{c}" for c in range(CLASSES))
    calibrating: list[float] = []
    calibrate = model._calibrate

    def timed(*given: Any) -> Tensor:
        begun = time.perf_counter()
        found = calibrate(*given)
        calibrating.append(time.perf_counter() - begun)
        return found

    model._calibrate = timed  # type: ignore[method-assign, assignment]
    started = time.perf_counter()
    model.learn(Task("one more", names, VectorSet(vectors.numpy(), labels.numpy())))
    learn_s = time.perf_counter() - started
    state = model.state()
    sizes = {"memory_outputs": 0, "rest": 0}
    for part in (state.shared, *state.tasks):
        for name, tensor in part.items():
            sizes["memory_outputs" if name.startswith("memory.") else "rest"] += tensor.nbytes
    return {
        "learn_s": round(learn_s, 3),
        "of_it_calibrate_s": round(sum(calibrating), 3),
        "memory_outputs_anew_s": round(outputs_s, 3),
        "answer_ms": round(1e3 * answer_s / ANSWERED, 3),
        "passes": tasks,
        "accuracy_untrained": round(float(right), 3),
        **{f"{name}_mb": round(size / 1e6, 1) for name, size in sizes.items()},
        "classes_without_an_exemplar": sum(not images for images in model.memory.exemplars),
    }


def add_untrained(model: VectorTPL, number: int, generator: torch.Generator) -> Tensor:
    """One more finished task: a random mask, the statistics of its samples, a head of class means. Returns samples."""
    vectors, labels = samples_of(number, IMAGES)
    made = model.bank.new_task(CLASSES, CLASSES + 1, generator)
    with torch.no_grad():
        made.embedding.copy_(torch.rand(made.embedding.shape, generator=generator) - 0.5)
    model.bank.add(made)
    names = tuple(f"{number}-{c}" for c in range(CLASSES))
    z = model.bank.outputs(model.prepared(vectors.numpy()), number).features
    means = torch.stack([z[labels == c].mean(dim=0) for c in range(CLASSES)])
    with torch.no_grad():
        made.head_weight[:CLASSES] = means
        made.head_bias[:CLASSES] = -0.5 * means.square().sum(dim=1)
    outputs = Outputs(z, model.bank.logits(z, number))
    model.scores_.append(LikelihoodRatio(model.config).fit_features(*outputs, labels))
    model.held_.append(HeldOut(z[:0], labels[:0]))
    model.task_classes_ = [*model.task_classes_, names]
    return vectors


def expert(tasks: int, options: argparse.Namespace) -> dict[str, Any]:
    """The ridge classifier that has learned so many tasks."""
    generator = torch.Generator().manual_seed(0)
    first, _ = samples_of(0, IMAGES)
    ridge = RandomRidge.drawn_for(first, RidgeConfig(random_features=options.random_features), generator)
    for start in range(0, tasks, 50):
        parts = [(number, *samples_of(number, IMAGES)) for number in range(start, min(start + 50, tasks))]
        labels = torch.cat([y + CLASSES * number for number, _, y in parts])
        ridge._add(torch.cat([x for _, x, _ in parts]), labels)
    known = torch.cat([samples_of(number, 1)[0] for number in torch.linspace(0, tasks - 1, 200).long().tolist()])
    numbers = torch.cat([
        CLASSES * number + torch.arange(CLASSES) for number in torch.linspace(0, tasks - 1, 200).long().tolist()
    ])  # fmt: skip
    vectors, labels = samples_of(tasks, IMAGES)
    started = time.perf_counter()
    ridge.learn_whole(vectors, labels + CLASSES * tasks, known, numbers)
    learn_s = time.perf_counter() - started
    x, truth = tested(tasks)
    ridge.log_probabilities(x)
    started = time.perf_counter()
    found = ridge.log_probabilities(x)
    answer_s = time.perf_counter() - started
    probable = found.exp().unflatten(1, (-1, CLASSES))
    order = probable.amax(dim=2).argsort(dim=1, descending=True)
    ranked = probable.sum(dim=2).gather(1, order)
    chosen = F.pad(ranked.cumsum(dim=1)[:, :-1], (1, 0)) < PlusConfig().passes_mass
    chosen[:, MOST_QUERIED:] = False
    own = (order == (truth // CLASSES).unsqueeze(1)) & chosen
    state = ridge.state()
    return {
        "learn_s": round(learn_s, 3),
        "answer_ms": round(1e3 * answer_s / ANSWERED, 3),
        "accuracy": round(float((found.argmax(dim=1) == truth).double().mean()), 3),
        "tasks_chosen": round(float(chosen.sum(dim=1).double().mean()), 2),
        "right_task_among_them": round(float(own.any(dim=1).double().mean()), 3),
        "gram_mb": round(state["gram"].nbytes / 1e6, 1),
        "per_class_mb": round((state["sums"].nbytes + state["weights"].nbytes) / 1e6, 1),
    }


PARTS = {"expert": expert, "bank": bank}

if __name__ == "__main__":
    main()
