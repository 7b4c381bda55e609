"""Judging rows of the paper by runs: paper, ours, difference, verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tpl.bench.paper import QUANTITIES, Printed, Row
from tpl.bench.paper.evidence import JOINT, Group, Run, fits, groups

REACHED, MISSED, NO_EVIDENCE, SHOWN = "reached", "missed", "no evidence", "shown"


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
        """For JSON."""
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
    """A row, what was found for it, and the runs behind that."""

    row: Row
    findings: tuple[Finding, ...]
    used: tuple[Group, ...]  # one a benchmark, and the joint runs that forgetting is measured by
    unused: tuple[Group, ...]  # fitting runs with other settings, which are not mixed in
    orders: int  # class orders behind the numbers; the fewest of the five for an average
    reason: str | None = None  # why there is no evidence

    @property
    def verdict(self) -> str:
        """Reached when every quantity is."""
        verdicts = {finding.verdict for finding in self.findings}
        return next(v for v in (NO_EVIDENCE, MISSED, REACHED, SHOWN) if v in verdicts)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
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
    """Compare a row with the runs that fit it; `tolerance` in points, for noise between class orders."""
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


def describe(group: Group) -> dict[str, Any]:
    """Settings, class orders, seeds, hashes, commit and device behind a group's numbers."""
    shared = group.description
    keys = ("benchmark", "method", "options", "encoder", "precision")
    numbers = {key: group.measure(key) for key in ("last", "aia", "til")}
    return {key: shared.get(key) for key in keys} | {
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


def _find(row: Row, key: str, found: Sequence[Group], joint: Sequence[Run], tolerance: float) -> Finding:
    """An average is the mean over the benchmarks of their means."""
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
        # 1e-9: a difference that equals the tolerance in decimals is within it
        verdict = REACHED if quantity.better * (ours - target) >= -tolerance - 1e-9 else MISSED
    return Finding(key, row.values[key], target, ours, spread, verdict)


def _reason(row: Row, found: Sequence[Group], complete: bool) -> str:
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
