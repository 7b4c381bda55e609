"""What a run measured: matrices, metrics, times and sizes, read from and written to its directory."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tpl.bench import metrics
from tpl.bench.metrics import Matrix
from tpl.errors import TplError
from tpl.files import replace_text

KINDS = ("cil", "til", "tp")
DETAILS = ("task_confusion", "class_accuracy")


@dataclass(frozen=True)
class RunResult:
    """The numbers of one finished run."""

    description: dict[str, Any]  # run.json
    summary: dict[str, Any]
    matrices: dict[str, Matrix]
    # Runs made before these were recorded have neither.
    task_confusion: list[list[int]] | None = None  # test images of each task taken for each task, at the end
    class_accuracy: list[list[float | None]] | None = None  # of every class so far, a row a stage

    @property
    def sizes(self) -> list[int]:
        """Test images per task."""
        return list(self.description["test_images"])

    def against(self, joint: RunResult) -> dict[str, float]:
        """The paper's rectified forgetting, against a joint run over the same tasks."""
        for key, what in (("classes", "tasks"), ("data", "images"), ("validation", "held-out images")):
            if joint.description[key] != self.description[key]:
                raise TplError(f"Rectified forgetting compares runs over the same {what}; these differ in theirs.")
        mine, other = self.matrices["cil"], joint.matrices["cil"]
        return {
            "forgetting_last": metrics.rectified_forgetting_last(mine, other),
            "forgetting_aia": metrics.rectified_forgetting_aia(mine, other),
        }

    def write(self, out: Path) -> None:
        """results.json and one CSV per matrix."""
        for kind, matrix in self.matrices.items():
            with (out / f"{kind}.csv").open("w", newline="", encoding="utf-8") as stream:
                writer = csv.writer(stream)
                writer.writerow(["stage", *(f"task {i}" for i in range(len(matrix)))])
                for t, row in enumerate(matrix):
                    writer.writerow([t, *("" if np.isnan(v) else f"{v:.6f}" for v in row)])
        matrices = {k: [row[: t + 1].tolist() for t, row in enumerate(m)] for k, m in self.matrices.items()}
        content: dict[str, Any] = {"summary": self.summary, "matrices": matrices}
        content |= {key: value for key in DETAILS if (value := getattr(self, key)) is not None}
        replace_text(out / "results.json", json.dumps(content, indent=2) + "\n")

    @classmethod
    def read(cls, out: Path) -> RunResult:
        """The result of a finished run."""
        try:
            description = json.loads((out / "run.json").read_text(encoding="utf-8"))
            content = json.loads((out / "results.json").read_text(encoding="utf-8"))
            matrices = {kind: _square(rows) for kind, rows in content["matrices"].items()}
            return cls(description, content["summary"], matrices, **{key: content.get(key) for key in DETAILS})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TplError(f"{out} holds no finished run ({error}).") from error


def numbers_so_far(out: Path, stage: int) -> dict[str, float]:
    """The numbers of a run's summary as they stand after a stage, those that there are."""
    summary = summarise(out, stage + 1).summary
    keys = ("last", "aia", "til", "tp", "forgetting_classic", "memory_images", "parameters", "seconds_per_task")
    found = {key: summary[key] for key in keys} | (summary["detection"] or {})
    return {key: float(value) for key, value in found.items() if value is not None and np.isfinite(value)}


def summarise(out: Path, upto: int | None = None) -> RunResult:
    """Put the stages of a run together, or the first few."""
    description = json.loads((out / "run.json").read_text(encoding="utf-8"))
    files = sorted((out / "stages").glob("*.json"))[:upto]
    stages = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    matrices = {kind: _square([stage[kind] for stage in stages]) for kind in KINDS}
    sizes = description["test_images"]
    learning = [stage["seconds_learning"] for stage in stages]
    evaluation = [stage["seconds_evaluation"] for stage in stages]
    final = stages[-1]
    summary = {
        "last": metrics.last(matrices["cil"], sizes),
        "aia": metrics.average_incremental(matrices["cil"], sizes),
        "til": metrics.last(matrices["til"], sizes),
        "tp": metrics.last(matrices["tp"], sizes),
        "forgetting_classic": metrics.classic_forgetting(matrices["cil"]),
        "detection": final["detection"],
        "passes": final.get("passes"),
        "drift": _largest([stage.get("drift") for stage in stages]),
        "seconds": sum(learning) + sum(evaluation),
        "seconds_per_task": sum(learning) / len(learning),
        "seconds_evaluation": sum(evaluation),
        "parameters": final["parameters"],
        "memory_images": final["memory_images"],
        "memory_bytes": final["memory_bytes"],
        "network_bytes": 4 * final["parameters"],  # float32
        "network_and_memory_bytes": 4 * final["parameters"] + final["memory_bytes"],
        "capacity": final["capacity"],
        "together": final.get("together", 1),  # runs that were trained side by side
        "training_images_per_second": _rate([stage.get("trained") or {} for stage in stages]),
        "peak_device_bytes": final.get("peak_device_bytes"),
    }
    classes = [stage.get("class_accuracy") for stage in stages]
    known = None if None in classes else classes  # the first stages may be older than this record
    return RunResult(description, summary, matrices, final.get("task_confusion"), known)


def _largest(values: list[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _rate(trained: list[dict[str, Any]]) -> float | None:
    """Images through forward and backward pass a second, all runs that were trained side by side taken together."""
    seconds = sum(stage.get("seconds", 0.0) for stage in trained)
    return sum(stage["images"] for stage in trained if stage) / seconds if seconds else None


def _square(rows: list[list[float]]) -> Matrix:
    matrix = np.full((len(rows), len(rows)), np.nan)
    for t, row in enumerate(rows):
        matrix[t, : len(row)] = row
    return matrix
