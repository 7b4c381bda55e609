"""The command that puts runs side by side: report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tpl.cli.app import AsJson, app, out, print_json
from tpl.errors import TplError

if TYPE_CHECKING:
    from tpl.report.compare import Comparison
    from tpl.report.scenes import Scene

STDOUT = "-"
_AMPLE = 104  # characters
_STYLES = {"better": "bold green", "worse": "bold red", "within noise": "", "too few pairs": "dim"}


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Finished run directories, or folders of them, such as a suite's.")
    ],
    file: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="The page's heading.")] = "Class-incremental learning",
    against: Annotated[
        list[Path] | None,
        typer.Option(help="Other runs (once for each folder): what moved since, and is it noise?"),
    ] = None,
    markdown: Annotated[str | None, typer.Option(metavar="FILE|-", help="The tables as Markdown, too.")] = None,
    latex: Annotated[str | None, typer.Option(metavar="FILE|-", help="The tables as LaTeX (booktabs), too.")] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Curves, matrices and AUROC-accuracy as PNG and SVG, too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Put finished runs on one self-contained HTML page, and print their tables.

    Runs that differ in class order and seed only are averaged; what the paper prints for the same method, benchmark and
    encoder stands beside them. Takes about 5 seconds and half a second a run; nothing is trained or measured.

    Examples:

    `tpl report runs/digits-5t-*`

    `tpl report runs/table --out table.html --markdown table.md --latex table.tex --figures figures/`

    `tpl report runs/new --against runs/old`

    `tpl report runs/table --markdown -`
    """
    streams = [text for text in (markdown, latex) if text == STDOUT]
    if len(streams) + as_json > 1:
        raise TplError("Only one of --json, --markdown - and --latex - can have the standard output.")
    from tpl.report import compare, find_runs, write_page
    from tpl.report.gallery import write_figures

    found = find_runs(runs)
    comparison = compare(found.runs, find_runs(against).runs) if against else None
    scenes = write_page(found, file, title, comparison)
    written = {"report": str(file)}
    written |= _write_tables(scenes, comparison, markdown, latex)
    pictures = write_figures(scenes, found.studies, figures) if figures else []
    if as_json:
        print_json(_content(scenes, comparison) | written | {"figures": [str(picture) for picture in pictures]})
        return
    if streams:
        return
    _print(scenes, comparison)
    if found.unfinished:
        out.print(f"Not finished, and so not shown: {len(found.unfinished)}", highlight=False)
    for what, where in written.items():
        out.print(f"The {'page' if what == 'report' else what}: [bold]{escape(where)}[/]", soft_wrap=True)
    if pictures:
        out.print(f"{len(pictures)} pictures: [bold]{escape(str(figures))}[/]", soft_wrap=True, highlight=False)


def _write_tables(
    scenes: list[Scene], comparison: Comparison | None, markdown: str | None, latex: str | None
) -> dict[str, str]:
    """The same tables in one or two languages; the files written."""
    if markdown is None and latex is None:
        return {}
    from tpl.report.compare import comparison_sheet
    from tpl.report.ranking import ranking_of
    from tpl.report.sheets import overview, scene_sheets
    from tpl.report.texts import all_latex, all_markdown

    first = overview(scenes)
    sheets = [comparison_sheet(comparison)] if comparison else []
    sheets += [first] if first else []
    for scene in scenes:
        ranking = ranking_of(scene)
        sheets += [*scene_sheets(scene), *([ranking.sheet(f"{scene.title}: order")] if ranking else [])]
    written = {}
    for what, where, text in (("markdown", markdown, all_markdown), ("latex", latex, all_latex)):
        if where == STDOUT:
            sys.stdout.write(text(sheets))
        elif where is not None:
            _write(Path(where), text(sheets))
            written[what] = where
    return written


def _write(file: Path, text: str) -> None:
    from tpl.files import replace_text

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, text)
    except OSError as error:
        raise TplError(f"{file} cannot be written: {error}.") from error


def _content(scenes: list[Scene], comparison: Comparison | None) -> dict[str, Any]:
    """For JSON: every run, and the means a scene."""
    from tpl.report.ranking import ranking_of
    from tpl.report.sheets import paper_of

    runs: list[dict[str, Any]] = []
    tables: list[dict[str, Any]] = []
    for scene in scenes:
        where = {"benchmark": scene.benchmark, "encoder": scene.encoder}
        runs += [row | where | {"place": str(row["place"])} for row in scene.run_rows()]
        paper = paper_of(scene)
        rows = [
            row | {"paper": {key: {"value": v.value, "row": v.row} for key, v in paper[row["name"]].items()}}
            for row in scene.rows
        ]
        ranking = ranking_of(scene)
        order = ranking.to_dict() if ranking else None
        tables.append({"title": scene.title} | where | {"rows": rows, "ranking": order})
    content: dict[str, Any] = {"runs": runs, "tables": tables}
    return content if comparison is None else content | {"comparison": comparison.to_dict()}


def _print(scenes: list[Scene], comparison: Comparison | None) -> None:
    from tpl.report import rich_table
    from tpl.report.ranking import ranking_of

    for scene in scenes:
        out.print(rich_table(scene.rows, title=scene.title if len(scenes) > 1 else None, width=out.width))
        if ranking := ranking_of(scene):
            out.print(ranking.words, highlight=False)
    if comparison is not None:
        _print_comparison(comparison)


def _print_comparison(comparison: Comparison) -> None:
    from tpl.report.compare import comparison_sheet

    sheet = comparison_sheet(comparison)
    # Where there is little room, the difference says it without the numbers it is of.
    shown = [n for n, text in enumerate(sheet.head) if out.width >= _AMPLE or text not in ("Before", "Now")]
    table = Table(title=sheet.title, box=None, header_style="bold")
    for number in shown:
        numeric = sheet.head[number] not in ("Method", "Benchmark", "Quantity", "Verdict")
        table.add_column(sheet.head[number], justify="right" if numeric else "left", no_wrap=number > 1)
    for row in sheet.rows:
        table.add_row(*(Text(row[n].text, style=_STYLES.get(row[n].text, "")) for n in shown))
    out.print(table if sheet.rows else "No run has a counterpart: nothing can be compared.")
    if comparison.alone or comparison.missing:
        counts = f"{len(comparison.alone)} here, {len(comparison.missing)} there"
        out.print(f"Runs without a counterpart: {counts}", highlight=False)
