"""Finished runs as evidence: found on disk, matched with rows of the paper, grouped by their settings.

Reads JSON alone, so that committed results are judged in a second and without torch.
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
from tpl.errors import TplError

JOINT = "joint"  # the method behind the paper's Non-CL, by which forgetting is measured


@dataclass(frozen=True)
class Run:
    """What run.json and results.json of one finished run say."""

    place: Path
    description: dict[str, Any]
    summary: dict[str, Any]
    cil: list[list[float]]  # the accuracy matrix, one row a stage

    @property
    def classes(self) -> tuple[tuple[str, ...], ...]:
        """The class order itself: its name may differ between machines (a file's path)."""
        return tuple(tuple(names) for names in self.description["classes"])

    def settings(self) -> str:
        """Everything that may change a number except class order and seed, as text to group by."""
        keys = ("benchmark", "method", "options", "encoder", "precision")
        return json.dumps({key: self.description.get(key) for key in keys}, sort_keys=True)

    def number(self, quantity: str, joint: Sequence[Run] = ()) -> float | None:
        """One of the paper's quantities, in the unit of runs; None where this run does not have it."""
        if quantity.startswith("forgetting_"):
            return self._forgetting(quantity, joint)
        if quantity == "auroc":
            value = (self.summary.get("detection") or {}).get("auroc_pooled")
        else:
            value = self.summary.get({"minutes": "seconds_per_task"}.get(quantity, quantity))
        return None if value is None else float(value)

    def _forgetting(self, quantity: str, joint: Sequence[Run]) -> float | None:
        """Against the joint runs over the same tasks and images, their mean where there are several."""
        measure = {
            "forgetting_last": metrics.rectified_forgetting_last,
            "forgetting_aia": metrics.rectified_forgetting_aia,
        }[quantity]
        fitting = [j for j in joint if j.classes == self.classes and j.description["data"] == self.description["data"]]
        found = [measure(_square(self.cil), _square(other.cil)) for other in fitting]
        return float(np.mean(found)) if found else None


@dataclass(frozen=True)
class Group:
    """Runs that differ in class order and seed only."""

    runs: tuple[Run, ...]

    @property
    def description(self) -> dict[str, Any]:
        """What all runs of the group share (and, of order and seed, the first one's)."""
        return self.runs[0].description

    def by_order(self) -> list[list[Run]]:
        """The runs of each class order."""
        found: dict[Any, list[Run]] = {}
        for run in self.runs:
            found.setdefault(run.classes, []).append(run)
        return list(found.values())

    def orders(self) -> list[str]:
        """The class orders by name."""
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


def read_runs(folder: Path) -> list[Run]:
    """Every finished run in `folder` or below."""
    if not folder.is_dir():
        raise TplError(f"There is no folder {folder} to look for runs in.")
    return [_read(file.parent) for file in sorted(folder.rglob("run.json")) if (file.parent / "results.json").is_file()]


def fits(run: Run, row: Row, wanted: Mapping[str, Any], orders: Sequence[str] | None = None) -> bool:
    """Whether a run is evidence for a row of one benchmark: measured as the paper does, on test images, complete.

    `wanted` are options asked for on top of those the row needs, `orders` the class orders to look at.
    """
    this = run.description
    same = (this["benchmark"], this["method"], this["encoder"]["name"]) == (row.benchmark, row.method, row.encoder)
    if not same or this.get("validation") is not None or this.get("held_out"):
        return False
    sizes = task_sizes(row.benchmark)
    if [len(names) for names in this["classes"]] != sizes or len(run.cil) != len(sizes):
        return False
    if orders is not None and this["order"] not in orders:
        return False
    explicit = dict(row.options) | dict(wanted)
    return all(
        _plain(this["options"].get(name)) == _plain(value)
        for name, value in (row.required() | explicit).items()
        if name in this["options"] or name in explicit  # fine-tuning has no memory to compare
    )


def groups(runs: Iterable[Run]) -> list[Group]:
    """Runs by their settings; the group with the most class orders first, never the one with the best numbers.

    Of equals, the one in the folder with the shortest name: a variant's name says what is different about it.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.settings(), []).append(run)
    made = [Group(tuple(entries)) for entries in found.values()]
    return sorted(made, key=lambda g: (-len(g.by_order()), -len(g.runs), len(g.runs[0].place.name), g.runs[0].place))


def _read(place: Path) -> Run:
    try:
        description = json.loads((place / "run.json").read_text(encoding="utf-8"))
        content = json.loads((place / "results.json").read_text(encoding="utf-8"))
        missing = {"benchmark", "method", "options", "order", "seed", "classes", "encoder", "data"} - set(description)
        if missing:
            raise ValueError(f"run.json lacks {', '.join(sorted(missing))}")
        _ = description["encoder"]["name"], description["options"].items()  # objects, not anything else
        return Run(place, description, content["summary"], content["matrices"]["cil"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TplError(f"The run in {place} cannot be read ({error}); repair it or move it away.") from error


def _plain(value: Any) -> Any:
    """A value as typed or as in JSON, made comparable: '5' is 5, 'none' is None."""
    if not isinstance(value, str):
        return value
    text = {"none": "null"}.get(value.lower(), value.lower())
    try:
        return json.loads(text)
    except ValueError:
        return value


def _square(rows: list[list[float]]) -> metrics.Matrix:
    matrix = np.full((len(rows), len(rows)), np.nan)
    for stage, row in enumerate(rows):
        matrix[stage, : len(row)] = row
    return matrix
