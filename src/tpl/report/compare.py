"""What moved between two sets of runs, and whether it is noise: differences paired over class orders and seeds.

Pairing takes out what both sides share, such as a hard class order. The interval is Student's t for the mean of the
paired differences, 95 %.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpl.report.columns import COLUMNS, Column
from tpl.report.find import FoundRun
from tpl.report.scenes import JOINT, scenes_of
from tpl.report.sheets import Cell, Sheet
from tpl.report.tables import ABSENT, joint_for, numbers

BETTER, WORSE, NOISE, TOO_FEW = "better", "worse", "within noise", "too few pairs"
LEVEL = 0.95
FEWEST = 3  # pairs for a verdict: with two, the interval rests on a single degree of freedom
JUDGED = tuple(column for column in COLUMNS if column.better)


@dataclass(frozen=True)
class Difference:
    """One number of one method on one benchmark: ours minus theirs."""

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
        """Where the mean difference lies, with 95 % confidence; None for a single pair."""
        from scipy import stats

        n = len(self.differences)
        if n < 2:
            return None
        reach = float(stats.t.ppf((1 + LEVEL) / 2, n - 1) * np.std(self.differences, ddof=1) / np.sqrt(n))
        return self.mean - reach, self.mean + reach

    @property
    def verdict(self) -> str:
        """Better or worse only if the whole interval is on one side of zero."""
        interval = self.interval
        if interval is None or len(self.differences) < FEWEST:
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
    """All differences, and the runs that have no counterpart."""

    differences: tuple[Difference, ...]
    alone: tuple[FoundRun, ...]  # ours without theirs
    missing: tuple[FoundRun, ...]  # theirs without ours

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "level": LEVEL,
            "differences": [difference.to_dict() for difference in self.differences],
            "only_here": [str(run.place) for run in self.alone],
            "only_there": [str(run.place) for run in self.missing],
        }


def compare(ours: Sequence[FoundRun], theirs: Sequence[FoundRun]) -> Comparison:
    """Pair runs of the same benchmark, method, tasks, images and seed, and judge every number they both have.

    The encoder must be the same, too, unless both sides have a single one. Where a side has several runs that fit, the
    ones with the same options are paired; if that leaves a doubt, none.
    """
    with_encoder = not all(len({run.encoder for run in side}) == 1 for side in (ours, theirs))
    pairs = _pairs(ours, theirs, with_encoder)
    paired = {id(run) for pair in pairs for run in pair}
    bounds = [[run.result for run in side if run.what["method"] == JOINT] for side in (ours, theirs)]
    found = []
    for scene in scenes_of(ours):
        for group in scene.groups:
            members = [pair for pair in pairs if any(pair[0] is run for run in group.runs)]
            measured = [
                tuple(numbers(run.result, _bound(run, joint)) for run, joint in zip(pair, bounds, strict=True))
                for pair in members
            ]
            for column in JUDGED:
                values = [
                    (a[column.key], b[column.key])
                    for a, b in measured
                    if a[column.key] is not None and b[column.key] is not None
                ]
                if values:
                    left, right = np.array(values, dtype=np.float64).T
                    where = scene.benchmark, group.name, _encoders(*members[0]), column
                    means = float(left.mean()), float(right.mean())
                    found.append(Difference(*where, *means, tuple((left - right).tolist())))
    alone = tuple(run for run in ours if id(run) not in paired)
    return Comparison(tuple(found), alone, tuple(run for run in theirs if id(run) not in paired))


def comparison_sheet(comparison: Comparison) -> Sheet:
    """The differences as a table, in percent points."""
    encoders = len({difference.encoder for difference in comparison.differences}) > 1
    rows = []
    for d in comparison.differences:
        name = f"{d.method}, {d.encoder}" if encoders else d.method
        show, interval = d.column.show, d.interval
        span = ABSENT if interval is None else f"{_signed(d, interval[0])} to {_signed(d, interval[1])}"
        texts = (name, d.benchmark, d.column.title, show(d.theirs), show(d.ours), _signed(d, d.mean), span)
        verdict = Cell(d.verdict, d.verdict in (BETTER, WORSE))
        rows.append((*map(Cell, texts), Cell(str(len(d.differences))), verdict))
    head = ("Method", "Benchmark", "Quantity", "Before", "Now", "Difference", "95 % interval", "Pairs", "Verdict")
    return Sheet("What moved, paired over class orders and seeds", head, tuple(rows))


def _signed(difference: Difference, value: float) -> str:
    text = difference.column.show(value)
    if not text.strip("\N{MINUS SIGN}0."):
        return text.lstrip("\N{MINUS SIGN}")  # nothing has no sign
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
            same = [other for other in others if other.what["options"] == run.what["options"]]
            twins = [other for other in mine if other.what["options"] == run.what["options"]]
            if len(same) == len(twins) == 1:
                found.append((run, same[0]))
    return found


def _by_key(runs: Sequence[FoundRun], with_encoder: bool) -> dict[str, list[FoundRun]]:
    found: dict[str, list[FoundRun]] = {}
    for run in runs:
        key = [run.what[name] for name in ("benchmark", "method", "classes", "seed")]
        key += [run.what.get("validation"), run.what["data"].get("test"), run.encoder if with_encoder else None]
        found.setdefault(json.dumps(key), []).append(run)
    return found


def _bound(run: FoundRun, joint: Sequence[Any]) -> Any:
    return None if run.what["method"] == JOINT else joint_for(run.result, joint)


def _encoders(mine: FoundRun, other: FoundRun) -> str:
    return mine.encoder if mine.encoder == other.encoder else f"{mine.encoder} for {other.encoder}"
