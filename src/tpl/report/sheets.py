"""Tables as plain cells, which Markdown and LaTeX write each in its way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpl.report.columns import ACCURACY, COST, FORGETTING, SCORES, Column
from tpl.report.printed import PaperValue, paper_values
from tpl.report.scenes import Scene
from tpl.report.tables import ABSENT, CONTINUAL, Row, best, cell, columns_of

_UNITS = {ACCURACY: " (%)", SCORES: " (%)", FORGETTING: " forgetting (points)"}
Paper = Mapping[str, Mapping[str, PaperValue]]  # by group, then by column


@dataclass(frozen=True)
class Cell:
    """A piece of text; bold if it wins."""

    text: str
    bold: bool = False


@dataclass(frozen=True)
class Sheet:
    """One table: the first column is text, the others are numbers."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def paper_of(scene: Scene) -> dict[str, dict[str, PaperValue]]:
    """What the paper prints for each group of a scene."""
    return {group.name: paper_values(group) for group in scene.groups}


def sheet_of(rows: Sequence[Row], title: str = "", paper: Paper | None = None, only: Sequence[str] = ()) -> Sheet:
    """Rows as a table, the best continual values bold; beside a column what the paper prints, where it does."""
    columns = [column for column in columns_of(rows) if not only or column.group in only]
    paper = paper or {}
    winners = {column.key: best(rows, column) for column in columns}
    head, beside = ["Method"], {c.key for c in columns if any(c.key in values for values in paper.values())}
    for column in columns:
        head += [column.title + _UNITS.get(column.group, "")] + (["paper"] if column.key in beside else [])
    made = []
    for row in rows:
        cells = [Cell(row_name(row))]
        for column in columns:
            cells.append(Cell(cell(row, column), row["name"] in winners[column.key]))
            if column.key in beside:
                cells.append(Cell(paper_text(paper, row["name"], column)))
        made.append(tuple(cells))
    return Sheet(title, tuple(head), tuple(made))


def row_name(row: Row) -> str:
    """A group's name, with the part it plays where it does not compete."""
    return str(row["name"]) if row["role"] == CONTINUAL else f"{row['name']} ({row['role']})"


def paper_text(paper: Paper, name: str, column: Column) -> str:
    """The paper's number for a group, or a dash."""
    value = paper.get(name, {}).get(column.key)
    return value.text if value else ABSENT


def scene_sheets(scene: Scene) -> list[Sheet]:
    """A scene's results, and what they cost."""
    rows, paper, runs = scene.rows, paper_of(scene), max(len(group.runs) for group in scene.groups)
    over = f", mean ± standard deviation over up to {runs} runs" if runs > 1 else ""
    return [
        sheet_of(rows, f"{scene.title}{over}", paper, (ACCURACY, SCORES, FORGETTING)),
        sheet_of(rows, f"{scene.title}: size and time", paper, (COST,)),
    ]


def overview(scenes: Sequence[Scene]) -> Sheet | None:
    """Methods by benchmarks, Last and AIA in percent with the paper's beside them; None for a single scene."""
    if len(scenes) < 2:
        return None
    benchmarks = list(dict.fromkeys(scene.benchmark for scene in scenes))
    encoders = {scene.encoder for scene in scenes}
    if len({(scene.benchmark, scene.encoder) for scene in scenes}) < len(scenes):
        benchmarks, encoders = [], set()  # scenes that differ otherwise: a column each
    places = benchmarks or [scene.title for scene in scenes]
    lines: dict[tuple[str, str], dict[str, tuple[Row, Mapping[str, PaperValue]]]] = {}
    for scene in scenes:
        paper = paper_of(scene)
        for row in scene.rows:
            line = lines.setdefault((scene.encoder if len(encoders) > 1 else "", row_name(row)), {})
            line[scene.benchmark if benchmarks else scene.title] = row, paper.get(row["name"], {})
    keys = ("last", "aia")
    shown = {column.key: column for scene in scenes for column in columns_of(scene.rows) if column.key in keys}
    printed = {
        (place, key) for line in lines.values() for place, (_, values) in line.items() for key in shown if key in values
    }
    head = ["Method"]
    for place in places:
        for key, column in shown.items():
            head += [f"{place} {column.title}"] + (["paper"] if (place, key) in printed else [])
    made = []
    for (encoder, name), line in lines.items():
        cells = [Cell(f"{name}, {encoder}" if encoder else name)]
        for place in places:
            for key, column in shown.items():
                found = line.get(place)
                cells.append(Cell(cell(found[0], column) if found else ABSENT))
                if (place, key) in printed:
                    value = found[1].get(key) if found else None
                    cells.append(Cell(value.text if value else ABSENT))
        made.append(tuple(cells))
    return Sheet("Accuracy in percent, method by benchmark", tuple(head), tuple(made))
