"""The metrics of a run: each one's name, format and meaning (the columns of every table), and runs as rows of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpl.bench.bounds import BOUNDS, better_bound, bound_name, is_bound
from tpl.bench.results import RunResult


def percent(value: float) -> str:
    """Format a fraction as a percentage."""
    return f"{100 * value:.2f}".replace("-", "\N{MINUS SIGN}")


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


@dataclass(frozen=True)
class Column:
    """One metric: its name, how a value is formatted, whether more is better, and what it means."""

    key: str
    group: str
    title: str
    short: str  # for the terminal, two lines
    meaning: str
    show: Callable[[float], str]
    better: int = 0  # 1: more is better, -1: less is better, 0: not judged


ACCURACY, SCORES, FORGETTING, COST = "Accuracy, %", "Task scores, %", "Forgetting, points", "Cost"

COLUMNS = (
    Column(
        "last", ACCURACY, "Last", "Last\n%",
        "Share of all test images classified correctly after the final task, among all classes.",
        percent, 1,
    ),
    Column(
        "aia", ACCURACY, "AIA", "AIA\n%",
        "Average incremental accuracy: the accuracy on all classes so far is measured after every task; "
        "this is the mean of those measurements.",
        percent, 1,
    ),
    Column(
        "til", ACCURACY, "TIL", "TIL\n%",
        "Task-incremental accuracy after the final task: like Last, but the method is given the task of each "
        "image and chooses among the classes of that task only.",
        percent, 1,
    ),
    Column(
        "tp", ACCURACY, "Task pred.", "Task\n%",
        "Task prediction after the final task: share of test images whose task is predicted correctly. The "
        "probability of a task is the sum of those of its classes.",
        percent, 1,
    ),
    Column(
        "auroc", SCORES, "AUROC", "AU-\nROC",
        "Area under the ROC curve of each task's score, its own test images against those of all other tasks, averaged "
        "over the tasks: how well the scores separate the tasks. Only methods with task scores have it.",
        percent, 1,
    ),
    Column(
        "fpr95", SCORES, "FPR95", "FPR\n95",
        "Share of other tasks' images that a task's score accepts if it accepts 95 % of its own, mean over the tasks.",
        percent, -1,
    ),
    Column(
        "forgetting_last", FORGETTING, "Rect. Last", "Forg.\nLast",
        "Rectified forgetting: accuracy of the better upper bound (joint training, or a ridge on its features) minus "
        "accuracy of the method, averaged over the tasks, after the final task. Below zero, the method beats the "
        "bound, which was then not trained to the end.",
        percent, -1,
    ),
    Column(
        "forgetting_aia", FORGETTING, "Rect. AIA", "Forg.\nAIA",
        "Rectified forgetting measured after every task and averaged over these measurements.",
        percent, -1,
    ),
    Column(
        "forgetting_classic", FORGETTING, "Classic", "Forg.\nclass.",
        "Accuracy on a task right after it was learned minus that at the end, averaged over all tasks but "
        "the last. It includes that more classes are harder to distinguish, which is not forgetting.",
        percent, -1,
    ),
    Column(
        "parameters", COST, "Network, M", "Net\nM",
        "Size of the network in millions of numbers, with everything stored for each task, without the memory.",
        lambda value: f"{value / 1e6:,.2f}",
    ),
    Column(
        "memory_images", COST, "Memory, images", "Mem.\nimgs",
        "Training images of earlier tasks stored for replay at the end of the run.",
        lambda value: f"{value:,.0f}",
    ),
    Column(
        "memory_bytes", COST, "Memory, kB", "Mem.\nkB",
        "Size of what is stored of old images, in thousands of bytes: the images, and anchors, logits or statistics.",
        lambda value: f"{value / 1e3:,.1f}" if value else "0",
    ),
    Column(
        "network_and_memory_bytes", COST, "Both, MB", "Both\nMB",
        "Network, in the precision it is stored in, and memory together, in millions of bytes.",
        lambda value: f"{value / 1e6:,.1f}",
    ),
    Column(
        "peak_device_bytes", COST, "GPU peak, GB", "GPU\nGB",
        "The most memory in use on the GPU, in billions of bytes, by all runs trained at the same time.",
        lambda value: f"{value / 1e9:,.1f}",
    ),
    Column("seconds", COST, "Time, s", "Time\ns", "Learning and testing, all tasks together.", _seconds),
    Column("seconds_per_task", COST, "Per task, s", "Task\ns", "Learning alone, on average.", _seconds),
)  # fmt: skip


Row = dict[str, Any]

LOWER, CONTINUAL, UPPER = "lower bound", "continual", "upper bound"
_ROLES = {"finetune": LOWER} | dict.fromkeys(BOUNDS, UPPER)  # every other method is compared as a continual method
_ORDER = (LOWER, CONTINUAL, UPPER)
OR = " or "  # between the names of bounds
MISSING = "\N{EN DASH}"  # shown where there is no number


def role(run: RunResult) -> str:
    """Whether a run is a lower bound, a continual method or an upper bound."""
    return _ROLES.get(str(run.description.get("method")), CONTINUAL)


def summary_rows(runs: Mapping[str, RunResult]) -> list[Row]:
    """One row of raw numbers (or None) for each run: lower bounds, then continual methods, then upper bounds.

    The parts of a method's predictions follow it. Forgetting is measured against the better bound among the runs.
    """
    return mean_rows({name: [run] for name, run in runs.items()})


def run_row(name: str, run: RunResult, bounds: Sequence[RunResult] = ()) -> Row:
    """One run as a row of raw numbers (or None); forgetting is measured against the better one of its `bounds`."""
    return _mean_row(name, [run], bounds)


def metrics_of(run: RunResult, bound: RunResult | None = None) -> dict[str, float | None]:
    """A run's metrics by column key; None where a metric is missing or not finite."""
    values = dict(run.summary)
    detection = values.get("detection") or {}
    values |= {"auroc": detection.get("auroc_pooled"), "fpr95": detection.get("fpr95")}
    values |= run.against(bound) if bound is not None else {}
    return {column.key: _number(values.get(column.key)) for column in COLUMNS}


def mean_rows(groups: Mapping[str, Sequence[RunResult]], others: Sequence[RunResult] = ()) -> list[Row]:
    """One row for each group of runs (several class orders and seeds): means, and standard deviations as `KEY_std`.

    The parts of a method's predictions follow it, as rows whose `part` is not None. Forgetting is measured against the
    better bound over the same images, of the groups or of `others`, if each run of a group has one; `bound` names it.
    """
    bounds = [run for runs in groups.values() for run in runs if is_bound(run.description)] + list(others)
    rows = []
    for name, runs in groups.items():
        if runs:
            rows += [_mean_row(name, runs, bounds), *part_rows(name, runs, bounds)]
    return sorted(rows, key=lambda row: _ORDER.index(row["role"]))


def part_rows(name: str, runs: Sequence[RunResult], bounds: Sequence[RunResult]) -> list[Row]:
    """A row for each part of the predictions of a group of runs, where all of them have measured it."""
    parts = [run.parts() for run in runs]
    shared = [part for part in parts[0] if all(part in each for each in parts)]
    return [_mean_row(name, [each[part] for each in parts], bounds, part) for part in shared]


def _mean_row(name: str, runs: Sequence[RunResult], bounds: Sequence[RunResult], part: str | None = None) -> Row:
    against = [better_bound(run, bounds) for run in runs]
    found = [metrics_of(run, bound) for run, bound in zip(runs, against, strict=True)]
    names = {bound_name(bound.description, run.description) for run, bound in zip(runs, against, strict=True) if bound}
    row: Row = {
        "name": name if part is None else f"{name}, {part} alone",
        "group": name,
        "part": part,
        "method": runs[0].description.get("method"),
        "role": role(runs[0]),
        "runs": len(runs),
        "contamination": sorted({name for run in runs for name in run.contamination}),
        "bound": OR.join(sorted(names)) or None,
    }
    for column in COLUMNS:
        values = [some for some in (each[column.key] for each in found) if some is not None]
        complete = len(values) == len(runs)  # a mean over some of the runs would not say which
        row[column.key] = float(np.mean(values)) if complete else None
        spread = complete and len(runs) > 1 and column.group != COST
        row[f"{column.key}_std"] = float(np.std(values, ddof=1)) if spread else None
    return row


def bound_names(rows: Sequence[Row]) -> list[str]:
    """The names of all bounds that rows are measured against, each once."""
    return list(dict.fromkeys(name for row in rows if row["bound"] for name in row["bound"].split(OR)))


CONTAMINATED = "\N{DAGGER}"


def shown_name(row: Row) -> str:
    """The row's name; with a dagger if its encoder was pre-trained on the benchmark's classes."""
    return f"{row['name']} {CONTAMINATED}" if row.get("contamination") else str(row["name"])


def contaminated_by(data_sets: Sequence[str]) -> str:
    """What the dagger means."""
    seen = " and ".join(data_sets)
    return f"{CONTAMINATED} The encoder was pre-trained on {seen}, which contains or closely resembles this data set"


def contamination_note(rows: Sequence[Row]) -> str | None:
    """The sentence that explains the dagger; None if no row has one."""
    seen = sorted({name for row in rows for name in row.get("contamination") or []})
    if not seen:
        return None
    return contaminated_by(seen) + "."


def columns_of(rows: Sequence[Row]) -> list[Column]:
    """The columns in which at least one row has a number."""
    return [column for column in COLUMNS if any(row[column.key] is not None for row in rows)]


def cell(row: Row, column: Column) -> str:
    """Format a number, with its standard deviation if the row is the mean of several runs."""
    value, deviation = row[column.key], row.get(f"{column.key}_std")
    if value is None:
        return MISSING
    return column.show(value) if deviation is None else f"{column.show(value)} ± {column.show(deviation)}"


def best(rows: Sequence[Row], column: Column) -> set[str]:
    """Names of the best continual methods in a column, if there are at least two; values that look equal are equal."""
    values = {row["name"]: row for row in rows if row["role"] == CONTINUAL and row[column.key] is not None}
    if not column.better or len(values) < 2:
        return set()
    winner = max(values.values(), key=lambda row: column.better * row[column.key])
    return {name for name, row in values.items() if column.show(row[column.key]) == column.show(winner[column.key])}


def _number(value: Any) -> float | None:
    """The value if it is a finite number, else None: no table shows a NaN."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None
