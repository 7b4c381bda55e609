"""The report: one HTML page that compares runs, complete in itself and readable offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tpl._version import __version__
from tpl.errors import TplError
from tpl.files import replace_text
from tpl.report import words
from tpl.report.columns import COLUMNS, Column
from tpl.report.compare import Comparison, comparison_sheet
from tpl.report.figures import scale_colours
from tpl.report.find import Findings
from tpl.report.scenes import Scene, scenes_of
from tpl.report.sections import scene_sections, study_sections
from tpl.report.sheets import overview
from tpl.report.tables import columns_of


def write_page(findings: Findings, file: Path, title: str, comparison: Comparison | None = None) -> list[Scene]:
    """Write the page about the runs found; gives the scenes it shows."""
    scenes = scenes_of(findings.runs)
    page = render(findings, scenes, title, comparison)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, page)
    except OSError as error:
        raise TplError(f"The report {file} cannot be written: {error}.") from error
    return scenes


def render(findings: Findings, scenes: Sequence[Scene], title: str, comparison: Comparison | None = None) -> str:
    """The page as text."""
    if not scenes:
        raise TplError("A report needs at least one finished run.")
    descriptions = [run.what for run in findings.runs]
    return _environment().get_template("page.html.j2").render(
        title=title,
        lead=_lead(scenes),
        unfinished=[str(place) for place in findings.unfinished],
        machines=words.machines(descriptions),
        overview=overview(scenes),
        comparison=comparison,
        moved=comparison_sheet(comparison) if comparison else None,
        scenes=[scene_sections(scene, f"s{number}") for number, scene in enumerate(scenes, 1)],
        studies=[study_sections(study, f"study{number}") for number, study in enumerate(findings.studies, 1)],
        meanings=_meanings(scenes),
        scale=", ".join(scale_colours()),
        version=__version__,
    )  # fmt: skip


def _environment() -> Environment:
    loader = PackageLoader("tpl.report", ".")
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=loader)


def _lead(scenes: Sequence[Scene]) -> str:
    if len(scenes) == 1:
        return words.lead(scenes[0].runs[0].what["classes"])
    return words.summary([run.what for scene in scenes for run in scene.runs])


def _meanings(scenes: Sequence[Scene]) -> dict[str, list[Column]]:
    """The columns of all tables by their groups, for the page to explain."""
    shown = {column.key for scene in scenes for column in columns_of(scene.rows + scene.run_rows())}
    groups: dict[str, list[Any]] = {}
    for column in COLUMNS:
        if column.key in shown:
            groups.setdefault(column.group, []).append(column)
    return groups
