"""The report: one HTML page that compares runs, complete in itself and readable offline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from tpl._version import __version__
from tpl.bench.metrics import Matrix, accuracy_so_far
from tpl.bench.results import RunResult
from tpl.errors import TplError
from tpl.report import words
from tpl.report.columns import Column, percent
from tpl.report.figures import Line, curves, heatmap, scale_colours
from tpl.report.svg import SERIES
from tpl.report.tables import ABSENT, CONTINUAL, Row, best, cell, columns_of, summary_rows
from tpl.store import replace_text

_SHOWN_ELSEWHERE = ("classes", "test_images")  # of run.json
_TELLING = ("encoder", "order", "seed")  # shown beside a run's name where runs differ in them


def write_page(runs: dict[str, RunResult], file: Path, title: str, joint: str | None = None) -> None:
    """Write the comparison of `runs`, all over the same tasks; `joint` names the run to measure others by."""
    page = render(runs, title, joint)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, page)
    except OSError as error:
        raise TplError(f"The report {file} cannot be written: {error}.") from error


def render(runs: Mapping[str, RunResult], title: str, joint: str | None = None) -> str:
    """The page as text."""
    if not runs:
        raise TplError("A report needs at least one finished run.")
    descriptions = [run.description for run in runs.values()]
    classes: list[list[str]] = descriptions[0]["classes"]
    if any(description["classes"] != classes for description in descriptions):
        raise TplError("One report compares runs over the same tasks; these differ in their classes or order.")
    rows = summary_rows(runs, joint)
    columns = columns_of(rows)
    ordered = {row["name"]: runs[row["name"]] for row in rows}
    seen = list(accumulate(len(names) for names in classes))
    lines = [Line(row["name"], _so_far(runs[row["name"]]), row["role"]) for row in rows]
    return _template().render(
        title=title,
        lead=words.lead(classes),
        finding=words.finding(rows),
        facts=words.facts(descriptions),
        cautions=words.cautions(descriptions),
        groups=_groups(columns),
        rows=_table(rows, columns, ordered),
        contest=sum(row["role"] == CONTINUAL for row in rows) > 1,
        joint=joint,
        curves_wide=Markup(curves(lines, seen, "curves")),
        curves_narrow=Markup(curves(lines, seen, "curves-narrow", narrow=True)),
        heatmaps=[
            Markup(heatmap(run.matrices["cil"], f"heat-{n}", name)) for n, (name, run) in enumerate(ordered.items())
        ],
        scale=", ".join(scale_colours()),
        tasks=list(zip(classes, descriptions[0]["test_images"], strict=True)),
        configurations=[(name, _configuration(run.description)) for name, run in ordered.items()],
        version=__version__,
    )


def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(files("tpl.report").joinpath("page.html.j2").read_text(encoding="utf-8"))


def _so_far(run: RunResult) -> Matrix:
    with np.errstate(invalid="ignore"):  # tasks without test images have no accuracy
        return accuracy_so_far(run.matrices["cil"], run.sizes)


def _groups(columns: Sequence[Column]) -> dict[str, list[Column]]:
    groups: dict[str, list[Column]] = {}
    for column in columns:
        groups.setdefault(column.group, []).append(column)
    return groups


def _table(rows: Sequence[Row], columns: Sequence[Column], runs: Mapping[str, RunResult]) -> list[Row]:
    """The rows as the page shows them: with a line style, and with whatever tells similar runs apart."""
    winners = {column.key: best(rows, column) for column in columns}
    starts = {group[0].key for group in _groups(columns).values()}
    facts = {key: {n: words.fact(r.description, key) for n, r in runs.items()} for key in _TELLING}
    shown, number = [], 0
    for row in rows:
        name, competes = row["name"], row["role"] == CONTINUAL
        number += competes
        details = [str(row["method"])] if row["method"] and row["method"] != name else []
        details += [f"{key} {values[name]}" for key, values in facts.items() if len(set(values.values())) > 1]
        shown.append(
            {
                "name": name,
                "role": None if competes else row["role"],
                "style": f"series-{(number - 1) % len(SERIES) + 1}" if competes else row["role"].replace(" ", "-"),
                "details": ", ".join(details),
                "last": f"{percent(row['last'])} %" if row["last"] is not None else ABSENT,
                "cells": [(cell(row, c), name in winners[c.key], c.key in starts) for c in columns],
            }
        )
    return shown


def _configuration(description: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """run.json as groups of settings."""
    plain, nested = [], []
    for key, value in description.items():
        if isinstance(value, dict):
            nested.append((key, [(name, _value(part)) for name, part in value.items()]))
        elif key not in _SHOWN_ELSEWHERE:
            plain.append((key, _value(value)))
    return [("run", plain), *nested]


def _value(value: Any) -> str:
    if value is None:
        return ABSENT
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
