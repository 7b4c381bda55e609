"""Differences between two sets of runs, paired over class orders and seeds, and whether they are noise.

Pairing removes the variation that both sides share, such as a hard class order. The interval is Student's t for the
mean of the paired differences, 95 %.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpl.bench.bounds import better_bound, bounds_of, is_bound
from tpl.bench.results import RunResult
from tpl.report.columns import COLUMNS, MISSING, Column, metrics_of
from tpl.report.find import FoundRun, group_runs
from tpl.report.tables import Cell, Table

BETTER, WORSE, NOISE, TOO_FEW = "better", "worse", "within noise", "too few pairs"
LEVEL = 0.95
MIN_PAIRS = 3  # for a verdict: with two, the interval has a single degree of freedom
JUDGED = tuple(column for column in COLUMNS if column.better)


@dataclass(frozen=True)
class Difference:
    """One metric of one method on one benchmark: ours minus theirs."""

    benchmark: str
    method: str
    encoder: str
    column: Column
    ours: float  # means over the pairs, in the unit of runs
    theirs: float
    differences: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean difference."""
        return float(np.mean(self.differences))

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the mean difference; None for a single pair."""
        n = len(self.differences)
        if n < 2:
            return None
        from scipy import stats  # takes a second

        half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1) * np.std(self.differences, ddof=1) / np.sqrt(n))
        return self.mean - half, self.mean + half

    @property
    def verdict(self) -> str:
        """Better or worse if the whole interval is on one side of zero, else noise; nothing for too few pairs."""
        interval = self.interval
        if interval is None or len(self.differences) < MIN_PAIRS:
            return TOO_FEW
        low, high = interval
        if low <= 0 <= high:
            return NOISE
        return BETTER if (low > 0) == (self.column.better > 0) else WORSE

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "benchmark": self.benchmark,
            "method": self.method,
            "encoder": self.encoder,
            "quantity": self.column.key,
            "pairs": len(self.differences),
            "ours": self.ours,
            "theirs": self.theirs,
            "difference": self.mean,
            "interval": None if self.interval is None else list(self.interval),
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Comparison:
    """All differences, and the runs without a counterpart."""

    differences: tuple[Difference, ...]
    only_ours: tuple[FoundRun, ...]
    only_theirs: tuple[FoundRun, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "level": LEVEL,
            "differences": [difference.to_dict() for difference in self.differences],
            "only_here": [str(run.place) for run in self.only_ours],
            "only_there": [str(run.place) for run in self.only_theirs],
        }


def compare(ours: Sequence[FoundRun], theirs: Sequence[FoundRun]) -> Comparison:
    """Pair runs of the same benchmark, method, tasks, images and seed, and compare every metric that both have.

    The encoder must be the same, too, unless each side has a single one. If several runs of a side fit, those with the
    same options are paired; if that is ambiguous, none.
    """
    with_encoder = not all(len({run.encoder for run in side}) == 1 for side in (ours, theirs))
    pairs = _pairs(ours, theirs, with_encoder)
    paired = {id(run) for pair in pairs for run in pair}
    bounds = [[run.result for run in side if is_bound(run.description)] for side in (ours, theirs)]
    found = []
    for experiment in group_runs(ours):
        for group in experiment.groups:
            members = [pair for pair in pairs if any(pair[0] is run for run in group.runs)]
            measured = [_measured(*pair, *bounds) for pair in members]
            for column in JUDGED:
                values = [
                    (a[column.key], b[column.key])
                    for a, b in measured
                    if a[column.key] is not None and b[column.key] is not None
                ]
                if values:
                    left, right = np.array(values, dtype=np.float64).T
                    where = experiment.benchmark, group.name, _encoders(*members[0]), column
                    means = float(left.mean()), float(right.mean())
                    found.append(Difference(*where, *means, tuple((left - right).tolist())))
    unpaired = [tuple(run for run in side if id(run) not in paired) for side in (ours, theirs)]
    return Comparison(tuple(found), *unpaired)


def comparison_table(comparison: Comparison) -> Table:
    """The differences as a table, in percent points."""
    encoders = len({difference.encoder for difference in comparison.differences}) > 1
    rows = []
    for d in comparison.differences:
        name = f"{d.method}, {d.encoder}" if encoders else d.method
        show, interval = d.column.show, d.interval
        span = MISSING if interval is None else f"{_signed(d, interval[0])} to {_signed(d, interval[1])}"
        texts = (name, d.benchmark, d.column.title, show(d.theirs), show(d.ours), _signed(d, d.mean), span)
        verdict = Cell(d.verdict, d.verdict in (BETTER, WORSE))
        rows.append((*map(Cell, texts), Cell(str(len(d.differences))), verdict))
    head = ("Method", "Benchmark", "Quantity", "Before", "Now", "Difference", "95 % interval", "Pairs", "Verdict")
    return Table("Differences, paired over class orders and seeds", head, tuple(rows))


def _signed(difference: Difference, value: float) -> str:
    text = difference.column.show(value)
    if not text.strip("\N{MINUS SIGN}0."):
        return text.lstrip("\N{MINUS SIGN}")  # zero has no sign
    return text if text.startswith("\N{MINUS SIGN}") else f"+{text}"


def _pairs(ours: Sequence[FoundRun], theirs: Sequence[FoundRun], with_encoder: bool) -> list[tuple[FoundRun, FoundRun]]:
    here, there = (_by_key(side, with_encoder) for side in (ours, theirs))
    found = []
    for key, mine in here.items():
        others = there.get(key, [])
        if len(mine) == len(others) == 1:
            found.append((mine[0], others[0]))
            continue
        for run in mine:
            same = [other for other in others if other.description["options"] == run.description["options"]]
            twins = [other for other in mine if other.description["options"] == run.description["options"]]
            if len(same) == len(twins) == 1:
                found.append((run, same[0]))
    return found


def _by_key(runs: Sequence[FoundRun], with_encoder: bool) -> dict[str, list[FoundRun]]:
    found: dict[str, list[FoundRun]] = {}
    for run in runs:
        key = [run.description[name] for name in ("benchmark", "method", "classes", "seed")]
        key += [
            run.description.get("validation"),
            run.description["data"].get("test"),
            run.encoder if with_encoder else None,
        ]
        found.setdefault(json.dumps(key), []).append(run)
    return found


def _measured(
    mine: FoundRun, other: FoundRun, my_bounds: Sequence[RunResult], other_bounds: Sequence[RunResult]
) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """The metrics of a pair; forgetting is measured against the same bound, the better one that both have."""
    known = [b.description["method"] for b in bounds_of(other.result, other_bounds)]
    best = better_bound(mine.result, [b for b in my_bounds if b.description["method"] in known])
    method = None if best is None else best.description["method"]
    theirs = better_bound(other.result, [b for b in other_bounds if b.description["method"] == method])
    return metrics_of(mine.result, best), metrics_of(other.result, theirs)


def _encoders(mine: FoundRun, other: FoundRun) -> str:
    return mine.encoder if mine.encoder == other.encoder else f"{mine.encoder} for {other.encoder}"
