"""The comparison of runs as rows, for the page, Markdown, LaTeX and the terminal alike."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tpl.bench.results import RunResult
from tpl.errors import TplError
from tpl.report.columns import COLUMNS, COST, Column

Row = dict[str, Any]

LOWER, CONTINUAL, UPPER = "lower bound", "continual", "upper bound"
_ROLES = {"finetune": LOWER, "joint": UPPER}  # every other method takes part in the contest
_ORDER = (LOWER, CONTINUAL, UPPER)
ABSENT = "\N{EN DASH}"
# Left out first where a terminal is too narrow.
_DISPENSABLE = (
    "network_and_memory_bytes",
    "peak_device_bytes",
    "fpr95",
    "memory_bytes",
    "seconds_per_task",
    "forgetting_classic",
    "parameters",
    "memory_images",
    "auroc",
    "til",
)


def role(name: str, run: RunResult, joint: str | None = None) -> str:
    """Whether a run bounds the others or competes with them."""
    return UPPER if name == joint else _ROLES.get(str(run.description.get("method")), CONTINUAL)


def summary_rows(runs: Mapping[str, RunResult], joint: str | None = None) -> list[Row]:
    """One row a run, raw numbers or None: first lower bounds, then continual methods, then upper bounds."""
    if joint is not None and joint not in runs:
        raise TplError(f"There is no run '{joint}' to compare with; there are {', '.join(runs) or 'none'}.")
    rows = [
        run_row(name, run, runs[joint] if joint is not None and name != joint else None)
        | {"role": role(name, run, joint)}
        for name, run in runs.items()
    ]
    return sorted(rows, key=lambda row: _ORDER.index(row["role"]))


def run_row(name: str, run: RunResult, bound: RunResult | None = None) -> Row:
    """The raw numbers of one run or None; forgetting is measured by a joint run, `bound`."""
    values = numbers(run, bound)
    row: Row = {"name": name, "method": run.description.get("method"), "role": role(name, run)}
    return row | {column.key: values.get(column.key) for column in COLUMNS}


def numbers(run: RunResult, bound: RunResult | None = None) -> dict[str, float | None]:
    """What a run measured, by the keys of the columns; only finite numbers."""
    values = dict(run.summary)
    detection = values.get("detection") or {}
    values |= {"auroc": detection.get("auroc_pooled"), "fpr95": detection.get("fpr95")}
    values |= run.against(bound) if bound is not None else {}
    return {column.key: _number(values.get(column.key)) for column in COLUMNS}


def joint_for(run: RunResult, joint: Sequence[RunResult]) -> RunResult | None:
    """The joint run over the same tasks and images, with the same seed if there is one; None without any."""
    keys = ("benchmark", "encoder", "classes", "data", "validation")
    fitting = [j for j in joint if all(j.description.get(key) == run.description.get(key) for key in keys)]
    same = [j for j in fitting if j.description.get("seed") == run.description.get("seed")]
    return next(iter(same or fitting), None)


def mean_rows(groups: Mapping[str, Sequence[RunResult]], joint: str | None = None) -> list[Row]:
    """One row a group of runs, e.g. of several class orders and seeds: means, and deviations under `KEY_std`.

    Forgetting is measured against a run of the group `joint` over the same tasks and images, where each run has one.
    """
    bounds = list(groups.get(joint or "", ()))
    rows = []
    for name, runs in groups.items():
        if not runs:
            continue
        found = [numbers(run, None if name == joint else joint_for(run, bounds)) for run in runs]
        row: Row = {"name": name, "method": runs[0].description.get("method"), "role": role(name, runs[0], joint)}
        row["runs"] = len(runs)
        for column in COLUMNS:
            values = [some for some in (each[column.key] for each in found) if some is not None]
            complete = len(values) == len(runs)  # a mean over some of the runs would not say which
            row[column.key] = float(np.mean(values)) if complete else None
            spread = complete and len(runs) > 1 and column.group != COST
            row[f"{column.key}_std"] = float(np.std(values, ddof=1)) if spread else None
        rows.append(row)
    return sorted(rows, key=lambda row: _ORDER.index(row["role"]))


def columns_of(rows: Sequence[Row]) -> list[Column]:
    """The columns for which at least one run has a number."""
    return [column for column in COLUMNS if any(row[column.key] is not None for row in rows)]


def cell(row: Row, column: Column) -> str:
    """A number as every table shows it, with its deviation where a row stands for several runs."""
    value, deviation = row[column.key], row.get(f"{column.key}_std")
    if value is None:
        return ABSENT
    return column.show(value) if deviation is None else f"{column.show(value)} ± {column.show(deviation)}"


def best(rows: Sequence[Row], column: Column) -> set[str]:
    """The winners of a column, if two continual methods compete. What is shown as equal is equal."""
    values = {row["name"]: row for row in rows if row["role"] == CONTINUAL and row[column.key] is not None}
    if not column.better or len(values) < 2:
        return set()
    winner = max(values.values(), key=lambda row: column.better * row[column.key])
    return {name for name, row in values.items() if column.show(row[column.key]) == column.show(winner[column.key])}


def rich_table(rows: Sequence[Row], title: str | None = None, width: int | None = None) -> Table:
    """The rows as a table for the terminal, the best continual values bold, the bounds dim.

    Where `width` (in characters) is too small for all, the least telling columns are left out.
    """
    columns = columns_of(rows)
    table = _rich_table(rows, columns, title)
    ample = Console(width=10_000, file=io.StringIO())
    for key in _DISPENSABLE:
        if width is None or ample.measure(table).maximum <= width:
            break
        columns = [column for column in columns if column.key != key]
        table = _rich_table(rows, columns, title)
    return table


def _rich_table(rows: Sequence[Row], columns: Sequence[Column], title: str | None) -> Table:
    winners = {column.key: best(rows, column) for column in columns}
    table = Table(title=title, box=SIMPLE_HEAD, show_edge=False, padding=0, header_style="bold")
    table.add_column("\nMethod", overflow="fold", min_width=8)
    for column in columns:
        table.add_column(column.short, justify="right", no_wrap=True)
    for row in rows:
        bound = row["role"] != CONTINUAL
        name = Text(str(row["name"]))
        if bound:
            name.append(f"\n({row['role'].split()[0]})", style="italic")
        cells = [Text(cell(row, c), style="bold" if row["name"] in winners[c.key] else "") for c in columns]
        table.add_row(name, *cells, style="dim" if bound else "")
    return table


def _number(value: Any) -> float | None:
    """A finite number or None, so that no table ever shows a NaN."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None
