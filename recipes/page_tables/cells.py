"""What stands in a table: a run's name and recipe, means and deviations, and the table itself as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from page_tables.runs import KINDS, ROWS
from tpl.bench.bounds import BOUNDS, bound_name, trained_to_the_end
from tpl.bench.results import RunResult

NOT_RUN = "not run"


def label(name: str, runs: Sequence[RunResult]) -> str:
    """A row's method, and what must be known about it."""
    if name in BOUNDS and runs and not trained_to_the_end(runs[0].description):
        return bound_name(runs[0].description)
    said = f", {ROWS[name]}" if ROWS.get(name) else ""
    method = next((name.removesuffix(kind) for kind in KINDS if name.endswith(kind)), name)
    return f"`{method}`{said}"


def recipe(run: RunResult) -> str:
    """How a run was trained."""
    options = run.description["options"]
    if "epochs" not in options or options.get("adapt") == "none":
        return "no training"
    schedule, augment = options.get("schedule", "constant"), options.get("augment", "none")  # not in early versions
    return (
        f"{options['epochs']} epochs, rate {options['lr']:g} {schedule}, {augment.replace('none', 'no')} augmentation"
    )


def percent(runs: list[RunResult], key: str) -> list[float]:
    """A number of every run."""
    return [100 * run.summary[key] for run in runs]


def auroc(runs: list[RunResult]) -> list[float]:
    """The pooled AUROC of every run's task scores."""
    return [100 * run.summary["detection"]["auroc_pooled"] for run in runs]


def mean(values: list[float], places: int = 2) -> str:
    """To so many decimals."""
    return f"{statistics.mean(values):.{places}f}"


def spread(values: list[float]) -> str:
    """Mean and deviation over class orders."""
    return f"{mean(values)} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean(values)


def shown(values: Sequence[float | None], places: int = 2) -> str:
    """Mean and deviation in percent; a dash where a run lacks the number."""
    numbers = [100 * value for value in values if value is not None]
    return spread(numbers) if numbers and len(numbers) == len(values) else "–"


def last_of(row: tuple[Path, RunResult] | None) -> str:
    """Last of a run, or that there is none."""
    return shown([row[1].summary["last"]]) if row else NOT_RUN


def behind(bound: float | None, lasts: Sequence[float | None], name: str) -> str:
    """How many points a row of this NAME is below the upper bound; a dash for a bound, or without one."""
    known = [last for last in lasts if last is not None]
    if bound is None or name in BOUNDS or len(known) < len(lasts) or not known:
        return "–"
    return f"{100 * (bound - statistics.mean(known)):.2f}"


def table(head: str, rows: Iterator[list[str]], text_columns: int) -> list[str]:
    """Markdown; the first columns are text, the others numbers."""
    columns = head.count("|") + 1
    rule = ["---"] * text_columns + ["---:"] * (columns - text_columns)
    return [f"| {line} |" for line in (head, " | ".join(rule), *(" | ".join(row) for row in rows))]
