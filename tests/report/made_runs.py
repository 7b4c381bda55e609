"""Runs made by hand: their numbers follow from a level and a drop, so that a test knows them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from tpl.bench import metrics
from tpl.bench.results import RunResult
from tpl.report import FoundRun

LEVELS = (0.90, 0.93, 0.87)  # of three class orders


def make_run(method: str, level: float, drop: float, tasks: int = 3, **changes: Any) -> RunResult:
    cil = np.full((tasks, tasks), np.nan)
    for t in range(tasks):
        for i in range(t + 1):
            cil[t, i] = level - drop * (t - i) - 0.01 * i
    til, tp = np.minimum(cil + 0.04, 1), np.minimum(cil + 0.02, 1)
    sizes = [10 + t for t in range(tasks)]
    summary = {
        "last": metrics.last(cil, sizes),
        "aia": metrics.average_incremental(cil, sizes),
        "til": metrics.last(til, sizes),
        "tp": metrics.last(tp, sizes),
        "forgetting_classic": metrics.classic_forgetting(cil),
        "detection": None,
        "seconds": 12.34,
        "seconds_per_task": 3.21,
        "seconds_evaluation": 2.0,
        "parameters": 1_234_567,
        "memory_images": 100,
        "memory_bytes": 23_456,
    }
    description = {
        "benchmark": "made-up",
        "method": method,
        "options": {"lr": 0.05, "memory": 100},
        "seed": 0,
        "order": "natural",
        "classes": [[f"class {2 * t}", f"class {2 * t + 1}"] for t in range(tasks)],
        "test_images": sizes,
        "validation": None,
        "encoder": {"name": "compact", "sha256": "e" * 64},
        "data": {"train": "a" * 64, "test": "b" * 64},
        "environment": {"tpl": "0", "commit": None, "device": "cpu"},
    }
    return RunResult(description | changes, summary, {"cil": cil, "til": til, "tp": tp})


def write_run(place: Path, run: RunResult) -> Path:
    """A run directory as `tpl run` leaves it, without events and model."""
    place.mkdir(parents=True)
    (place / "run.json").write_text(json.dumps(run.description), encoding="utf-8")
    run.write(place)
    return place


def in_order(method: str, number: int, level: float, drop: float = 0.05, **changes: Any) -> RunResult:
    """A run of the class order `number`, which has classes, images and numbers of its own."""
    classes = [[f"{number}-{2 * t}", f"{number}-{2 * t + 1}"] for t in range(3)]
    data = {"train": f"a{number}", "test": f"b{number}"}
    run = make_run(method, level, drop, **{"classes": classes, "data": data, "order": f"random:{number}"} | changes)
    detection = {"auroc_pooled": level + 0.02, "auroc_pairwise": level + 0.02, "fpr95": 0.2}
    return dataclasses.replace(run, summary=run.summary | {"detection": detection})


def found(*runs: RunResult, folder: str = "suite") -> list[FoundRun]:
    return [FoundRun(Path(folder) / f"{n}-{run.description['method']}", run) for n, run in enumerate(runs)]
