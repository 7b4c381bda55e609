"""What the page says about one scene: tables, figures and settings, ready for the template."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from markupsafe import Markup

from tpl.report import words
from tpl.report.columns import COLUMNS, COST, Column, percent
from tpl.report.figures import Line, confusion_map, curves, heatmap
from tpl.report.ranking import Ranking, ranking_of
from tpl.report.scatter import cloud_of_runs, cloud_of_study, scatter
from tpl.report.scenes import JOINT, Group, Scene
from tpl.report.sheets import Paper, paper_of
from tpl.report.svg import SERIES
from tpl.report.tables import ABSENT, CONTINUAL, Row, best, cell, columns_of, numbers

_SHOWN_ELSEWHERE = ("classes", "test_images")  # of run.json
_OF_A_RUN = ("last", "aia", "til", "tp", "auroc", "forgetting_last", "forgetting_classic", "seconds")
_OPEN_CLASSES = 30  # classes in a table that is open from the start

Section = dict[str, Any]


def scene_sections(scene: Scene, ident: str) -> Section:
    """All that the template shows of a scene; its ids start with `ident`."""
    rows, columns, paper = scene.rows, columns_of(scene.rows), paper_of(scene)
    styles = _styles(scene)
    descriptions = [run.what for run in scene.runs]
    classes = descriptions[0]["classes"]
    return {
        "ident": ident,
        "title": scene.title,
        "lead": words.lead(classes),
        "finding": words.finding(rows),
        "facts": [*words.facts(descriptions), ("Made on", words.machines(descriptions))],
        "cautions": words.cautions(descriptions),
        "contest": scene.contest,
        "joint": _joint(scene),
        "most": max(len(group.runs) for group in scene.groups),
        "tables": {
            "results": _table(rows, [c for c in columns if c.group != COST], paper, styles),
            "costs": _table(rows, [c for c in columns if c.group == COST], paper, styles),
        },
        "ranking": _ranking(ranking_of(scene)),
        "styles": styles,
        "curves": _curves(scene, ident),
        "maps": [_maps(group, n, ident, styles[group.name]) for n, group in enumerate(scene.groups)],
        "confusions": _confusions(scene, ident, styles),
        "classes": _classes(scene),
        "cloud": _cloud(scene, ident),
        "densities": [_densities(group, styles[group.name]) for group in scene.groups if group.role == CONTINUAL],
        "runs": _runs(scene),
        "orders": [(name, _tasks(run.what)) for name, run in scene.orders.items()],
        "configurations": [(group.name, _configuration(group)) for group in scene.groups],
    }


def study_sections(study: dict[str, Any], ident: str) -> Section:
    """What the template shows of a study of detectors."""
    cloud = cloud_of_study(study)
    title = f"{study['benchmark']}, {study['encoder']}"
    theirs = study["paper_fit"]
    paper = f" In the paper (DeiT-S): r = {theirs['r']:.3f}, slope {theirs['slope']:.2f}." if theirs else ""
    svg = Markup(scatter(cloud, f"{ident}-cloud", title))
    return {"ident": ident, "title": title, "rows": study["rows"], "svg": svg, "words": cloud.words + paper}


def _ranking(found: Ranking | None) -> Section | None:
    return None if found is None else {"words": found.words, "sheet": found.sheet("")}


def _styles(scene: Scene) -> dict[str, str]:
    """The line style of every group: competing ones have colours, in the order of the figures."""
    styles, number = {}, 0
    for group in scene.groups:
        competes = group.role == CONTINUAL
        number += competes
        styles[group.name] = f"series-{(number - 1) % len(SERIES) + 1}" if competes else group.role.replace(" ", "-")
    return styles


def _grouped(columns: Sequence[Column]) -> dict[str, list[Column]]:
    groups: dict[str, list[Column]] = {}
    for column in columns:
        groups.setdefault(column.group, []).append(column)
    return groups


def _table(rows: Sequence[Row], columns: Sequence[Column], paper: Paper, styles: Mapping[str, str]) -> Section:
    winners = {column.key: best(rows, column) for column in columns}
    groups = _grouped(columns)
    starts = {group[0].key for group in groups.values()}
    shown = [
        {
            "name": row["name"],
            "role": None if row["role"] == CONTINUAL else row["role"],
            "style": styles[row["name"]],
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


def _joint(scene: Scene) -> str:
    """What is to be said about rectified forgetting."""
    if not scene.joint:
        return "Rectified forgetting is left out: it needs a joint run to compare with."
    lacking = [r["name"] for r in scene.rows if r["forgetting_last"] is None and r["method"] != JOINT]
    if not lacking:
        return ""
    return (
        f"Rectified forgetting needs a joint run over the same tasks for every run; {', '.join(lacking)} lack some. "
        "The table of every run has what there is."
    )


def _curves(scene: Scene, ident: str) -> dict[str, Markup]:
    lines = [Line(group.name, mean, group.role, spread) for group in scene.groups for mean, spread in [group.curve()]]
    seen = list(accumulate(scene.runs[0].sizes))
    return {
        "wide": Markup(curves(lines, seen, f"{ident}-curves")),
        "narrow": Markup(curves(lines, seen, f"{ident}-curves-narrow", narrow=True)),
    }


def _maps(group: Group, number: int, ident: str, style: str) -> Section:
    mean = group.mean_matrix("cil")
    assert mean is not None  # read_run sees to it
    last = numbers(group.runs[0].result)["last"]
    under = f"mean of {len(group.runs)} runs"
    if len(group.runs) == 1:
        under = f"Last {ABSENT if last is None else percent(last)} %"
    if group.role != CONTINUAL:
        under = f"{group.role}, {under}"
    each = [
        (f"order {run.what['order']}, seed {run.what['seed']}", run.result.matrices["cil"]) for run in group.runs
    ] if len(group.runs) > 1 else []  # fmt: skip
    return {
        "name": group.name,
        "style": style,
        "under": under,
        "svg": Markup(heatmap(mean, f"{ident}-heat-{number}", group.name)),
        "each": [
            (name, Markup(heatmap(matrix, f"{ident}-heat-{number}-{n}", f"{group.name}, {name}")))
            for n, (name, matrix) in enumerate(each)
        ],
    }


def _confusions(scene: Scene, ident: str, styles: Mapping[str, str]) -> Section:
    found, without = [], []
    for number, group in enumerate(scene.groups):
        shares = group.confusion()
        if shares is None:
            without.append(group.name)
            continue
        svg = Markup(confusion_map(shares, f"{ident}-confusion-{number}", group.name))
        found.append({"name": group.name, "style": styles[group.name], "svg": svg})
    return {"maps": found, "without": without}


def _classes(scene: Scene) -> Section:
    """For every class and group the accuracy when just learned, at the end, and the drop; largest drops first."""
    known = {group.name: classes for group in scene.groups if (classes := group.classes()) is not None}
    without = [group.name for group in scene.groups if group.name not in known]
    names = list(dict.fromkeys(name for classes in known.values() for name in classes))
    drops = {name: [v[name][0] - v[name][1] for v in known.values() if name in v] for name in names}
    names.sort(key=lambda name: -max(drops[name]))
    rows = []
    for name in names:
        pairs = [classes.get(name) for classes in known.values()]
        cells = [
            (percent(p[0]), percent(p[1]), percent(p[0] - p[1])) if p is not None else (ABSENT,) * 3 for p in pairs
        ]
        rows.append((name, [text for each in cells for text in each]))
    return {"groups": list(known), "rows": rows, "without": without, "open": len(rows) <= _OPEN_CLASSES}


def _cloud(scene: Scene, ident: str) -> Section | None:
    cloud = cloud_of_runs(scene)
    if not cloud.points:
        return None
    shown = {point.group for point in cloud.points}
    svg = Markup(scatter(cloud, f"{ident}-cloud", scene.title))
    return {"svg": svg, "words": cloud.words, "groups": [g.name for g in scene.groups if g.name in shown]}


def _densities(group: Group, style: str) -> Section:
    """The picture of the first run that keeps outputs, or a word on why there is none."""
    keeping = next((run for run in group.runs if (run.place / "outputs").is_dir()), None)
    if keeping is None:
        return {"name": group.name, "style": style, "image": None, "word": "not kept"}
    from tpl.report.densities import density_png

    png, word = density_png(keeping.place)
    image = None if png is None else f"data:image/png;base64,{base64.b64encode(png).decode()}"
    where = f"order {keeping.what['order']}, seed {keeping.what['seed']}: {word}"
    return {"name": group.name, "style": style, "image": image, "word": where}


def _runs(scene: Scene) -> Section:
    rows = scene.run_rows()
    columns = [c for c in COLUMNS if c.key in _OF_A_RUN and any(row[c.key] is not None for row in rows)]
    made = []
    for row, run in zip(rows, scene.runs, strict=True):
        environment = run.what.get("environment") or {}
        commit = str(environment.get("commit") or "")[:8] or ABSENT
        texts = [
            row["order"],
            row["seed"],
            *(cell(row, c) for c in columns),
            environment.get("device") or ABSENT,
            commit,
        ]
        made.append({"name": row["name"], "place": str(run.place), "cells": [str(text) for text in texts]})
    head = ["Order", "Seed", *(column.title for column in columns), "Machine", "Commit"]
    return {"head": head, "rows": made}


def _tasks(description: Mapping[str, Any]) -> list[tuple[list[str], int]]:
    return list(zip(description["classes"], description["test_images"], strict=True))


def _configuration(group: Group) -> list[tuple[str, list[tuple[str, str]]]]:
    """run.json as groups of settings; what differs between runs is given for each."""
    plain: list[tuple[str, str]] = []
    nested: dict[str, list[tuple[str, str]]] = {}
    for key, value in group.runs[0].what.items():
        if isinstance(value, dict):
            tables = [run.what[key] if isinstance(run.what.get(key), dict) else {} for run in group.runs]
            nested[key] = [(name, _values([table.get(name) for table in tables])) for name in value]
        elif key not in _SHOWN_ELSEWHERE:
            plain.append((key, _values([run.what.get(key) for run in group.runs])))
    return [("run", plain), *nested.items()]


def _values(values: Sequence[Any]) -> str:
    return ", ".join(dict.fromkeys(map(_value, values)))


def _value(value: Any) -> str:
    if value is None:
        return ABSENT
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
