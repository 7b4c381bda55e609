"""Finished runs as evidence for rows of the paper: reading and checking them, which ones fit a row, and what they say.

Accuracies are computed from the stored matrices; a summary that says something else is an error. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tpl.bench import metrics
from tpl.bench.paper import Row, task_sizes
from tpl.bench.results import RunResult, accuracies
from tpl.errors import TplError
from tpl.pretraining import UNVERIFIED, weights_status

SETTINGS = ("benchmark", "method", "options", "encoder", "precision")  # of run.json: what runs of a group share
NEEDED = ("benchmark", "method", "options", "order", "seed", "classes", "test_images", "encoder", "data")
ROUNDING = 1e-6  # by which a stored summary may differ from its matrices


@dataclass(frozen=True)
class Run:
    """A finished run and its directory."""

    place: Path
    result: RunResult

    @property
    def description(self) -> dict[str, Any]:
        """The content of run.json."""
        return self.result.description

    @property
    def classes(self) -> tuple[tuple[str, ...], ...]:
        """The class order itself: its name may differ between machines (a file's path)."""
        return tuple(tuple(names) for names in self.description["classes"])

    def settings(self) -> str:
        """Everything that may change a number except class order and seed, as text to group by."""
        return json.dumps({key: self.description.get(key) for key in SETTINGS}, sort_keys=True)

    def number(self, quantity: str, joint: Sequence[Run] = ()) -> float | None:
        """One of the paper's quantities, in the unit of runs; None if this run does not have it."""
        if quantity in ("last", "aia", "til"):
            return accuracies(self.result.matrices, self.result.sizes).get(quantity)
        if quantity.startswith("forgetting_"):
            return self._forgetting(quantity, joint)
        if quantity == "auroc":
            value = (self.result.summary.get("detection") or {}).get("auroc_pooled")
        else:
            value = self.result.summary.get({"minutes": "seconds_per_task"}.get(quantity, quantity))
        return None if value is None else float(value)

    def _forgetting(self, quantity: str, joint: Sequence[Run]) -> float | None:
        """Rectified forgetting relative to the joint runs over the same tasks and images, their mean if several."""
        measure = {
            "forgetting_last": metrics.rectified_forgetting_last,
            "forgetting_aia": metrics.rectified_forgetting_aia,
        }[quantity]
        fitting = [j for j in joint if j.classes == self.classes and j.description["data"] == self.description["data"]]
        found = [measure(self.result.matrices["cil"], other.result.matrices["cil"]) for other in fitting]
        return float(np.mean(found)) if found and np.isfinite(found).all() else None  # a bound may lack stages


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in class order and seed only."""

    runs: tuple[Run, ...]

    @property
    def description(self) -> dict[str, Any]:
        """run.json of the first run; the others differ in class order and seed only."""
        return self.runs[0].description

    @property
    def weights(self) -> str:
        """Whether the encoder's weights are known by their hash."""
        return weights_status(self.description["encoder"]["name"], self.description["encoder"].get("sha256"))

    @property
    def verified(self) -> bool:
        """Whether the encoder's weights are known by their hash, or there are none."""
        return self.weights != UNVERIFIED

    def settings(self) -> dict[str, Any]:
        """Options, precision and encoder weights."""
        shared = {key: self.description.get(key) for key in ("precision",)}
        return dict(self.description["options"]) | shared | {"weights": self.description["encoder"].get("sha256")}

    def by_order(self) -> list[list[Run]]:
        """The runs by class order."""
        found: dict[Any, list[Run]] = {}
        for run in self.runs:
            found.setdefault(run.classes, []).append(run)
        return list(found.values())

    def orders(self) -> list[str]:
        """The names of the class orders."""
        return [runs[0].description["order"] for runs in self.by_order()]

    def measure(self, quantity: str, joint: Sequence[Run] = ()) -> tuple[float, float | None] | None:
        """Mean and standard deviation over class orders; seeds of one order are averaged first."""
        values = []
        for runs in self.by_order():
            numbers = [run.number(quantity, joint) for run in runs]
            if any(number is None for number in numbers):
                return None
            values.append(np.mean([number for number in numbers if number is not None]))
        return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None

    def to_dict(self) -> dict[str, Any]:
        """Settings, class orders, seeds, hashes, commit and device behind the numbers, for JSON."""
        shared = self.description
        numbers = {key: self.measure(key) for key in ("last", "aia", "til")}
        return {key: shared.get(key) for key in SETTINGS} | {
            "weights": self.weights,
            "contamination": self.runs[0].result.contamination,
            "percent": {key: 100 * value[0] for key, value in numbers.items() if value is not None},
            "runs": [
                {
                    "directory": str(run.place),
                    "order": run.description["order"],
                    "seed": run.description["seed"],
                    "data": run.description["data"],
                    "percent": _percent(run.result),
                    **{key: run.description.get("environment", {}).get(key) for key in ("commit", "sources", "device")},
                }
                for run in self.runs
            ],
        }


def read_runs(folder: Path) -> list[Run]:
    """All finished runs in `folder` or below; a broken or contradictory one is an error."""
    if not folder.is_dir():
        raise TplError(f"There is no folder {folder} to look for runs in.")
    return [_read(file.parent) for file in sorted(folder.rglob("run.json")) if (file.parent / "results.json").is_file()]


def fits(run: Run, row: Row, wanted: Mapping[str, Any], orders: Sequence[str] | None = None) -> bool:
    """Whether a run can be compared with a row of one benchmark: the paper's protocol, on test images, complete.

    `wanted` are options required in addition to the row's own, `orders` the class orders that count.
    """
    this = run.description
    same = (this["benchmark"], this["method"], this["encoder"]["name"]) == (row.benchmark, row.method, row.encoder)
    if not same or this.get("validation") is not None or this.get("held_out"):
        return False
    sizes = task_sizes(row.benchmark)
    if [len(names) for names in this["classes"]] != sizes or len(run.result.matrices["cil"]) != len(sizes):
        return False
    if orders is not None and this["order"] not in orders:
        return False
    explicit = dict(row.options) | dict(wanted)
    return all(
        _plain(this["options"].get(name)) == _plain(value)
        for name, value in (row.required() | explicit).items()
        if name in this["options"] or name in explicit  # fine-tuning has no memory to compare
    )


def groups(runs: Iterable[Run]) -> list[RunGroup]:
    """Runs grouped by their settings; the most class orders, then runs, come first, whatever their numbers are."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.settings(), []).append(run)
    return sorted((RunGroup(tuple(entries)) for entries in found.values()), key=amount)


def amount(group: RunGroup) -> tuple[int, int]:
    """To sort by: the more class orders, and then runs, the earlier."""
    return -len(group.by_order()), -len(group.runs)


def check_summary(result: RunResult) -> None:
    """Refuse a run whose summary or number of tasks does not follow from its accuracy matrices."""
    for kind, matrix in result.matrices.items():
        known = matrix[np.tril_indices(len(matrix))]  # NaN for a task without test images
        if len(matrix) > len(result.sizes) or ((known < 0) | (known > 1)).any():
            raise TplError(f"the matrix {kind} has other tasks than run.json, or entries that are no accuracies")
    for key, value in _percent(result).items():
        stated = result.summary.get(key)
        if stated is not None and abs(100 * float(stated) - value) > 100 * ROUNDING:
            raise TplError(f"its summary says {key} = {100 * stated:.4f} %, its accuracy matrix {value:.4f} %")


def _percent(result: RunResult) -> dict[str, float]:
    """Last, AIA, TIL, task prediction and classic forgetting, computed from the accuracy matrices."""
    found = accuracies(result.matrices, result.sizes)
    return {key: 100 * value for key, value in found.items() if value is not None}


def _read(place: Path) -> Run:
    try:
        result = RunResult.read(place)
        missing = [key for key in NEEDED if key not in result.description]
        if missing:
            raise ValueError(f"run.json lacks {', '.join(missing)}")
        _ = result.description["encoder"]["name"], result.description["options"].items(), result.matrices["cil"]
        check_summary(result)
        return Run(place, result)
    except (TplError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TplError(f"The run in {place} cannot be read ({error}); repair it or move it away.") from error


def _plain(value: Any) -> Any:
    """A value typed on the command line as JSON has it: '5' is 5, 'none' is None."""
    if not isinstance(value, str):
        return value
    text = {"none": "null"}.get(value.lower(), value.lower())
    try:
        return json.loads(text)
    except ValueError:
        return value
