"""The report: one HTML page that compares runs, complete in itself and readable offline."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tpl._version import __version__
from tpl.errors import TplError
from tpl.files import replace_atomically
from tpl.report import sentences
from tpl.report.columns import (
    CONTINUAL,
    COST,
    MISSING,
    UPPER,
    Column,
    Row,
    best,
    cell,
    columns_of,
    metrics_of,
    percent,
    shown_name,
)
from tpl.report.compare import Comparison, comparison_table
from tpl.report.figures import (
    confusion_svg,
    curves_svg,
    heatmap_svg,
    lines_of,
    scale_colours,
    scatter_of_runs,
    scatter_of_study,
    scatter_svg,
)
from tpl.report.find import Experiment, Findings, Group, group_runs
from tpl.report.paper import paper_of, ranking_of
from tpl.report.svg import SERIES
from tpl.report.tables import Paper, forgetting_sentence, overview, ranking_table

Context = dict[str, Any]  # what a template shows


def write_page(findings: Findings, file: Path, title: str, comparison: Comparison | None = None) -> list[Experiment]:
    """Write the page about these runs; returns the experiments it shows."""
    experiments = group_runs(findings.runs)
    page = render(findings, experiments, title, comparison)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(file, page)
    except OSError as error:
        raise TplError(f"The report {file} cannot be written: {error}.") from error
    return experiments


def render(
    findings: Findings, experiments: Sequence[Experiment], title: str, comparison: Comparison | None = None
) -> str:
    """The page as HTML."""
    if not experiments:
        raise TplError("A report needs at least one finished run.")
    descriptions = [run.description for run in findings.runs]
    return environment().get_template("page.html.j2").render(
        title=title,
        lead=_lead(experiments),
        unfinished=[str(folder) for folder in findings.unfinished],
        machines=sentences.machines(descriptions),
        overview=overview(experiments),
        comparison=comparison,
        changes=comparison_table(comparison) if comparison else None,
        experiments=[_experiment(experiment, f"s{number}") for number, experiment in enumerate(experiments, 1)],
        studies=[_study(study, f"study{number}") for number, study in enumerate(findings.studies, 1)],
        meanings=_meanings(experiments),
        scale=", ".join(scale_colours()),
        version=__version__,
    )  # fmt: skip


def environment() -> Environment:
    """Where templates come from; every value is escaped."""
    loader = PackageLoader("tpl.report", ".")
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=loader)


def _lead(experiments: Sequence[Experiment]) -> str:
    if len(experiments) == 1:
        return sentences.lead(experiments[0].runs[0].description["classes"])
    return sentences.summary([run.description for experiment in experiments for run in experiment.runs])


def _meanings(experiments: Sequence[Experiment]) -> dict[str, list[Column]]:
    """The columns that the page explains, by group."""
    return _grouped(columns_of([row for e in experiments for row in (*e.rows, *e.run_rows())]))


def _experiment(experiment: Experiment, ident: str) -> Context:
    """The content of an experiment's section; its ids start with `ident`."""
    rows, columns, paper = experiment.rows, columns_of(experiment.rows), paper_of(experiment)
    whole = [row for row in rows if row["part"] is None]  # a part has no costs of its own
    styles = _styles(experiment)
    descriptions = [run.description for run in experiment.runs]
    classes = descriptions[0]["classes"]
    return {
        "ident": ident,
        "title": experiment.title,
        "lead": sentences.lead(classes),
        "finding": sentences.finding(rows),
        "facts": [*sentences.facts(descriptions), ("Made on", sentences.machines(descriptions))],
        "cautions": sentences.cautions(descriptions),
        "has_rivals": experiment.has_rivals,
        "bounds": _bounds(experiment),
        "max_runs": max(len(group.runs) for group in experiment.groups),
        "tables": {
            "results": _table(rows, [c for c in columns if c.group != COST], paper, styles),
            "costs": _table(whole, [c for c in columns if c.group == COST], paper, styles),
        },
        "ranking": _ranking(experiment),
        "styles": styles,
        "curves": [
            Markup(curves_svg(*lines_of(experiment), f"{ident}-curves{name}", bool(name))) for name in ("", "-narrow")
        ],
        "heatmaps": [_heatmaps(group, n, ident, styles[group.name]) for n, group in enumerate(experiment.groups)],
        "confusions": _confusions(experiment, ident, styles),
        "classes": _classes(experiment),
        "scatter": _scatter(experiment, ident),
        "densities": [_densities(group, styles[group.name]) for group in experiment.groups if group.role == CONTINUAL],
        "runs": _runs(experiment),
        "orders": [(name, _tasks(run.description)) for name, run in experiment.orders.items()],
        "configurations": [(group.name, _configuration(group)) for group in experiment.groups],
    }


def _study(study: dict[str, Any], ident: str) -> Context:
    """The content of a detector study's section."""
    scatter = scatter_of_study(study)
    title = f"{study['benchmark']}, {study['encoder']}"
    theirs = study["paper_fit"]
    paper = f" In the paper (DeiT-S): r = {theirs['r']:.3f}, slope {theirs['slope']:.2f}." if theirs else ""
    svg = Markup(scatter_svg(scatter, f"{ident}-scatter", title))
    return {"ident": ident, "title": title, "rows": study["rows"], "svg": svg, "sentence": scatter.sentence + paper}


def _ranking(experiment: Experiment) -> Context | None:
    ranking = ranking_of(experiment)
    return None if ranking is None else {"sentence": ranking.sentence, "table": ranking_table(ranking, "")}


def _styles(experiment: Experiment) -> dict[str, str]:
    """The CSS class of every group: continual methods have colours, in the order of the figures."""
    styles, number = {}, 0
    for group in experiment.groups:
        continual = group.role == CONTINUAL
        number += continual
        styles[group.name] = f"series-{(number - 1) % len(SERIES) + 1}" if continual else group.role.replace(" ", "-")
    return styles


def _grouped(columns: Sequence[Column]) -> dict[str, list[Column]]:
    groups: dict[str, list[Column]] = {}
    for column in columns:
        groups.setdefault(column.group, []).append(column)
    return groups


def _table(rows: Sequence[Row], columns: Sequence[Column], paper: Paper, styles: Mapping[str, str]) -> Context:
    winners = {column.key: best(rows, column) for column in columns}
    groups = _grouped(columns)
    starts = {group[0].key for group in groups.values()}
    shown = [
        {
            "name": shown_name(row),
            "role": None if row["role"] == CONTINUAL else row["role"],
            "part": row["part"],
            "style": styles[row["group"]],
            "runs": row["runs"],
            "cells": [
                {
                    "text": cell(row, column),
                    "best": row["name"] in winners[column.key],
                    "first": column.key in starts,
                    "paper": paper.get(row["name"], {}).get(column.key),
                }
                for column in columns
            ],
        }
        for row in rows
    ]
    return {"groups": groups, "rows": shown}


def _bounds(experiment: Experiment) -> str:
    """What rectified forgetting is measured against, and why it is not shown for some or all methods."""
    found = forgetting_sentence(experiment)
    lacking = [r["name"] for r in experiment.rows if r["forgetting_last"] is None and r["role"] != UPPER]
    if not lacking or not experiment.bounds:
        return found
    return (
        f"{found} It needs a bound over the same images for every run; {', '.join(lacking)} lack some. "
        "The table of all runs shows it for the others."
    )


def _heatmaps(group: Group, number: int, ident: str, style: str) -> Context:
    mean = group.mean_matrix("cil")
    assert mean is not None  # read_run checks it
    last = metrics_of(group.runs[0].result)["last"]
    under = f"mean of {len(group.runs)} runs"
    if len(group.runs) == 1:
        under = f"Last {MISSING if last is None else percent(last)} %"
    if group.role != CONTINUAL:
        under = f"{group.role}, {under}"
    runs = group.runs if len(group.runs) > 1 else ()
    names = [f"order {run.description['order']}, seed {run.description['seed']}" for run in runs]
    return {
        "name": group.name,
        "style": style,
        "under": under,
        "svg": Markup(heatmap_svg(mean, f"{ident}-heat-{number}", group.name)),
        "each": [
            (
                name,
                Markup(heatmap_svg(run.result.matrices["cil"], f"{ident}-heat-{number}-{n}", f"{group.name}, {name}")),
            )
            for n, (name, run) in enumerate(zip(names, runs, strict=True))
        ],
    }


def _confusions(experiment: Experiment, ident: str, styles: Mapping[str, str]) -> Context:
    found, without = [], []
    for number, group in enumerate(experiment.groups):
        shares = group.confusion()
        if shares is None:
            without.append(group.name)
            continue
        svg = Markup(confusion_svg(shares, f"{ident}-confusion-{number}", group.name))
        found.append({"name": group.name, "style": styles[group.name], "svg": svg})
    return {"heatmaps": found, "without": without}


_OPEN_CLASSES = 30  # a longer table of classes is closed at first


def _classes(experiment: Experiment) -> Context:
    """For every class and group the accuracy right after learning, at the end, and the drop; largest drops first."""
    known = {group.name: classes for group in experiment.groups if (classes := group.classes()) is not None}
    without = [group.name for group in experiment.groups if group.name not in known]
    names = list(dict.fromkeys(name for classes in known.values() for name in classes))
    drops = {name: [v[name][0] - v[name][1] for v in known.values() if name in v] for name in names}
    names.sort(key=lambda name: -max(drops[name]))
    rows = []
    for name in names:
        pairs = [classes.get(name) for classes in known.values()]
        cells = [
            (percent(p[0]), percent(p[1]), percent(p[0] - p[1])) if p is not None else (MISSING,) * 3 for p in pairs
        ]
        rows.append((name, [text for each in cells for text in each]))
    return {"groups": list(known), "rows": rows, "without": without, "open": len(rows) <= _OPEN_CLASSES}


def _scatter(experiment: Experiment, ident: str) -> Context | None:
    scatter = scatter_of_runs(experiment)
    if not scatter.points:
        return None
    shown = {point.group for point in scatter.points}
    svg = Markup(scatter_svg(scatter, f"{ident}-scatter", experiment.title))
    return {"svg": svg, "sentence": scatter.sentence, "groups": [g.name for g in experiment.groups if g.name in shown]}


def _densities(group: Group, style: str) -> Context:
    """The densities of the first run with stored outputs, or the reason why there are none."""
    keeping = next((run for run in group.runs if (run.place / "outputs").is_dir()), None)
    if keeping is None:
        return {"name": group.name, "style": style, "image": None, "note": "no outputs stored"}
    from tpl.report.densities import density_png

    png, note = density_png(keeping.place)
    image = None if png is None else f"data:image/png;base64,{base64.b64encode(png).decode()}"
    where = f"order {keeping.description['order']}, seed {keeping.description['seed']}: {note}"
    return {"name": group.name, "style": style, "image": image, "note": where}


_RUN_COLUMNS = ("last", "aia", "til", "tp", "auroc", "forgetting_last", "forgetting_classic", "seconds")


def _runs(experiment: Experiment) -> Context:
    rows = experiment.run_rows()
    columns = [column for column in columns_of(rows) if column.key in _RUN_COLUMNS]
    made = []
    for row, run in zip(rows, experiment.runs, strict=True):
        environment = run.description.get("environment") or {}
        commit, plus, mark = str(environment.get("commit") or MISSING).partition("+")
        texts = [
            row["order"],
            row["seed"],
            *(cell(row, c) for c in columns),
            environment.get("device") or MISSING,
            commit[:8] + plus + mark,
        ]
        made.append({"name": row["name"], "folder": str(run.place), "cells": [str(text) for text in texts]})
    head = ["Order", "Seed", *(column.title for column in columns), "Machine", "Commit"]
    return {"head": head, "rows": made}


def _tasks(description: Mapping[str, Any]) -> list[tuple[list[str], int]]:
    return list(zip(description["classes"], description["test_images"], strict=True))


_SHOWN_ELSEWHERE = ("classes", "test_images")  # of run.json


def _configuration(group: Group) -> list[tuple[str, list[tuple[str, str]]]]:
    """run.json as groups of settings, with all values of a setting that differs between runs."""
    plain: list[tuple[str, str]] = []
    nested: dict[str, list[tuple[str, str]]] = {}
    for key, value in group.runs[0].description.items():
        if isinstance(value, dict):
            tables = [run.description[key] if isinstance(run.description.get(key), dict) else {} for run in group.runs]
            nested[key] = [(name, _values([table.get(name) for table in tables])) for name in value]
        elif key not in _SHOWN_ELSEWHERE:
            plain.append((key, _values([run.description.get(key) for run in group.runs])))
    return [("run", plain), *nested.items()]


def _values(values: Sequence[Any]) -> str:
    return ", ".join(dict.fromkeys(map(_value, values)))


def _value(value: Any) -> str:
    if value is None:
        return MISSING
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
