"""Comparing rows of the paper with finished runs: which runs count, what they measured, and the verdict.

Imports no torch: committed results are judged in a second.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tpl.bench import metrics
from tpl.bench.paper import QUANTITIES, Printed, Row, task_sizes
from tpl.bench.results import RunResult
from tpl.errors import TplError

JOINT = "joint"  # the method behind the paper's Non-CL, the reference for forgetting
SETTINGS = ("benchmark", "method", "options", "encoder", "precision")  # of run.json: what runs of a group share
NEEDED = ("benchmark", "method", "options", "order", "seed", "classes", "encoder", "data")
REACHED, MISSED, NO_EVIDENCE, SHOWN = "reached", "missed", "no evidence", "shown"


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


def read_runs(folder: Path) -> list[Run]:
    """All finished runs in `folder` or below."""
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
    """Runs grouped by their settings; the group with the most class orders first, whatever its numbers are.

    Among equals, the group whose directory has the shortest name: a variant's name says what is different about it.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.settings(), []).append(run)
    made = [RunGroup(tuple(entries)) for entries in found.values()]
    return sorted(made, key=lambda g: (-len(g.by_order()), -len(g.runs), len(g.runs[0].place.name), g.runs[0].place))


def _read(place: Path) -> Run:
    try:
        result = RunResult.read(place)
        missing = [key for key in NEEDED if key not in result.description]
        if missing:
            raise ValueError(f"run.json lacks {', '.join(missing)}")
        _ = result.description["encoder"]["name"], result.description["options"].items(), result.matrices["cil"]
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


@dataclass(frozen=True)
class Finding:
    """One quantity of a row, in the paper's unit."""

    quantity: str
    paper: Printed
    target: float
    ours: float | None
    std: float | None
    verdict: str

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        return None if self.ours is None else self.ours - self.target

    def to_dict(self) -> dict[str, Any]:
        """The content for JSON."""
        return {
            "quantity": self.quantity,
            "paper": self.paper.mean,
            "paper_std": self.paper.std,
            "target": self.target,
            "ours": self.ours,
            "std": self.std,
            "difference": self.difference,
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Judgement:
    """A row of the paper, the findings for it, and the runs behind them."""

    row: Row
    findings: tuple[Finding, ...]
    used: tuple[RunGroup, ...]  # one a benchmark, and the joint runs that forgetting is relative to
    unused: tuple[RunGroup, ...]  # fitting runs with other settings, which are not mixed in
    orders: int  # number of class orders behind the numbers; for an average, the smallest of the five
    reason: str | None = None  # why there is no evidence

    @property
    def verdict(self) -> str:
        """The worst verdict of all quantities."""
        verdicts = {finding.verdict for finding in self.findings}
        return next(v for v in (NO_EVIDENCE, MISSED, REACHED, SHOWN) if v in verdicts)

    def to_dict(self) -> dict[str, Any]:
        """The content for JSON."""
        row = self.row
        return {
            "row": row.name,
            "verdict": self.verdict,
            "reason": self.reason,
            "printed_as": row.label,
            "benchmark": row.benchmark,
            "method": row.method,
            "encoder": row.encoder,
            "misprint": row.misprint,
            "note": row.note,
            "class_orders": self.orders,
            "quantities": [finding.to_dict() for finding in self.findings],
            "evidence": [describe(group) for group in self.used],
            "not_judged": [describe(group) for group in self.unused],
        }


def judge(
    row: Row,
    runs: Sequence[Run],
    tolerance: float,
    wanted: Mapping[str, Any] | None = None,
    orders: Sequence[str] | None = None,
) -> Judgement:
    """Compare a row with the runs that fit it; `tolerance`, in points, allows for noise between class orders."""
    found, joint, unused = [], [], []
    for part in row.parts():
        candidates = groups(run for run in runs if fits(run, part, wanted or {}, orders))
        found += candidates[:1]
        unused += candidates[1:]
        if any(key.startswith("forgetting_") for key in row.values):
            bound = replace(part, method=JOINT, options={})
            joint += groups(run for run in runs if fits(run, bound, {}, orders))[:1]
    complete = len(found) == len(row.parts())
    against = [run for group in joint for run in group.runs]
    findings = tuple(_find(row, key, found if complete else [], against, tolerance) for key in row.values)
    reason = None
    if any(finding.verdict == NO_EVIDENCE for finding in findings):
        reason = _reason(row, found, complete)
    fewest = min((len(group.by_order()) for group in found), default=0) if complete else 0
    return Judgement(row, findings, (*found, *joint), tuple(unused), fewest, reason)


def describe(group: RunGroup) -> dict[str, Any]:
    """Settings, class orders, seeds, hashes, commit and device behind a group's numbers."""
    shared = group.description
    numbers = {key: group.measure(key) for key in ("last", "aia", "til")}
    return {key: shared.get(key) for key in SETTINGS} | {
        "percent": {key: 100 * value[0] for key, value in numbers.items() if value is not None},
        "runs": [
            {
                "directory": str(run.place),
                "order": run.description["order"],
                "seed": run.description["seed"],
                "data": run.description["data"],
                "commit": run.description.get("environment", {}).get("commit"),
                "device": run.description.get("environment", {}).get("device"),
            }
            for run in group.runs
        ],
    }


def _find(row: Row, key: str, found: Sequence[RunGroup], joint: Sequence[Run], tolerance: float) -> Finding:
    """The verdict on one quantity; an average row takes the mean over the benchmarks' means."""
    quantity, target = QUANTITIES[key], row.target(key)
    measured = [group.measure(key, joint) for group in found]
    numbers = [value for value in measured if value is not None]
    if not numbers or len(numbers) < len(measured):
        return Finding(key, row.values[key], target, None, None, NO_EVIDENCE)
    ours = quantity.scale * float(np.mean([mean for mean, _ in numbers]))
    std = numbers[0][1] if len(numbers) == 1 else None
    spread = None if std is None else quantity.scale * std
    verdict = SHOWN
    if quantity.better:
        # 1e-9: a difference equal to the tolerance in decimals counts as reached
        verdict = REACHED if quantity.better * (ours - target) >= -tolerance - 1e-9 else MISSED
    return Finding(key, row.values[key], target, ours, spread, verdict)


def _reason(row: Row, found: Sequence[RunGroup], complete: bool) -> str:
    if complete:
        return "the runs found lack a quantity" + (
            f" (forgetting needs {JOINT} runs over the same tasks)" if row.table == "forgetting" else ""
        )
    what = f"{row.method} on {row.benchmark} with {row.encoder}"
    if len(row.parts()) == 1:
        return f"no complete run of {what} on test images with the row's options"
    have = {group.description["benchmark"] for group in found}
    missing = [part.benchmark for part in row.parts() if part.benchmark not in have]
    return f"no complete runs of {what}: missing {', '.join(missing)}"
