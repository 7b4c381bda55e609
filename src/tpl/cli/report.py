"""The command that compares runs on an HTML page: report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tpl.cli.app import EXPERIMENTS, app, out, print_json
from tpl.cli.options import OUTPUT, AsJson
from tpl.errors import TplError

if TYPE_CHECKING:
    from tpl.report.compare import Comparison
    from tpl.report.find import Experiment

STDOUT = "-"
_AMPLE = 104  # characters: a terminal wide enough for all columns
_STYLES = {"better": "bold green", "worse": "bold red", "within noise": "", "too few pairs": "dim"}


@app.command(rich_help_panel=EXPERIMENTS)
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Directories of finished runs, or folders of them, such as a suite's."),
    ],
    against: Annotated[
        list[Path] | None,
        typer.Option(
            help="Earlier runs to compare with, and whether differences are noise; may be given several times."
        ),
    ] = None,
    file: Annotated[Path, typer.Option("--out", help="The page to write.", rich_help_panel=OUTPUT)] = Path(
        "report.html"
    ),
    title: Annotated[
        str, typer.Option(help="The page's heading.", rich_help_panel=OUTPUT)
    ] = "Class-incremental learning",
    markdown: Annotated[
        str | None, typer.Option(metavar="FILE|-", help="Also write the tables as Markdown.", rich_help_panel=OUTPUT)
    ] = None,
    latex: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", help="Also write the tables as LaTeX (booktabs).", rich_help_panel=OUTPUT),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also draw curves, matrices and accuracy against AUROC, as PNG and SVG.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page about finished runs, and print their tables.

    Runs that differ only in class order and seed are averaged; the paper's numbers for the same method, benchmark and
    encoder are shown next to them. Takes 5 seconds and half a second per run; nothing is trained or measured.

    Examples:

    `tpl report runs/digits-5t-*`

    `tpl report runs/table --out table.html --markdown table.md --latex table.tex --figures figures/`

    `tpl report runs/new --against runs/old`

    `tpl report runs/table --markdown -`
    """
    streams = [text for text in (markdown, latex) if text == STDOUT]
    if len(streams) + as_json > 1:
        raise TplError("Only one of --json, --markdown - and --latex - can write to standard output.")
    from tpl.report import find_runs
    from tpl.report.compare import compare
    from tpl.report.page import write_page
    from tpl.report.pictures import write_figures

    found = find_runs(runs)
    comparison = compare(found.runs, find_runs(against).runs) if against else None
    experiments = write_page(found, file, title, comparison)
    written = {"report": str(file)}
    written |= _write_tables(experiments, comparison, markdown, latex)
    pictures = write_figures(experiments, found.studies, figures) if figures else []
    if as_json:
        print_json(_content(experiments, comparison) | written | {"figures": [str(picture) for picture in pictures]})
        return
    if streams:
        return
    _print(experiments, comparison)
    if found.unfinished:
        out.print(f"Not finished, and so not shown: {len(found.unfinished)}", highlight=False)
    for what, where in written.items():
        out.print(f"The {'page' if what == 'report' else what}: [bold]{escape(where)}[/]", soft_wrap=True)
    if pictures:
        out.print(f"{len(pictures)} pictures: [bold]{escape(str(figures))}[/]", soft_wrap=True, highlight=False)


def _write_tables(
    experiments: list[Experiment], comparison: Comparison | None, markdown: str | None, latex: str | None
) -> dict[str, str]:
    """Write the tables as Markdown and LaTeX, where asked for; the files written, by format."""
    if markdown is None and latex is None:
        return {}
    from tpl.report.compare import comparison_table
    from tpl.report.paper import ranking_of
    from tpl.report.tables import all_latex, all_markdown, experiment_tables, overview, ranking_table

    first = overview(experiments)
    tables = [comparison_table(comparison)] if comparison else []
    tables += [first] if first else []
    for experiment in experiments:
        ranking = ranking_of(experiment)
        tables += [
            *experiment_tables(experiment),
            *([ranking_table(ranking, f"{experiment.title}: order")] if ranking else []),
        ]
    written = {}
    for what, where, text in (("markdown", markdown, all_markdown), ("latex", latex, all_latex)):
        if where == STDOUT:
            sys.stdout.write(text(tables))
        elif where is not None:
            _write(Path(where), text(tables))
            written[what] = where
    return written


def _write(file: Path, text: str) -> None:
    from tpl.files import replace_atomically

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(file, text)
    except OSError as error:
        raise TplError(f"{file} cannot be written: {error}.") from error


def _content(experiments: list[Experiment], comparison: Comparison | None) -> dict[str, Any]:
    """For JSON: every run, and the means of each experiment."""
    from tpl.report.paper import paper_of, ranking_of

    runs: list[dict[str, Any]] = []
    tables: list[dict[str, Any]] = []
    for experiment in experiments:
        where = {"benchmark": experiment.benchmark, "encoder": experiment.encoder}
        runs += [row | where | {"place": str(row["place"])} for row in experiment.run_rows()]
        paper = paper_of(experiment)
        rows = [
            row | {"paper": {key: {"value": v.value, "row": v.row} for key, v in paper.get(row["name"], {}).items()}}
            for row in experiment.rows
        ]
        ranking = ranking_of(experiment)
        order = ranking.to_dict() if ranking else None
        tables.append({"title": experiment.title} | where | {"rows": rows, "ranking": order})
    content: dict[str, Any] = {"runs": runs, "tables": tables}
    return content if comparison is None else content | {"comparison": comparison.to_dict()}


def _print(experiments: list[Experiment], comparison: Comparison | None) -> None:
    from tpl.report import rich_table
    from tpl.report.paper import ranking_of

    for experiment in experiments:
        out.print(
            rich_table(experiment.rows, title=experiment.title if len(experiments) > 1 else None, width=out.width)
        )
        if ranking := ranking_of(experiment):
            out.print(ranking.sentence, highlight=False)
    if comparison is not None:
        _print_comparison(comparison)


def _print_comparison(comparison: Comparison) -> None:
    from tpl.report.compare import comparison_table

    changes = comparison_table(comparison)
    # Where there is little room, the difference says it without the numbers it is of.
    shown = [n for n, text in enumerate(changes.head) if out.width >= _AMPLE or text not in ("Before", "Now")]
    table = Table(title=changes.title, box=None, header_style="bold")
    for number in shown:
        numeric = changes.head[number] not in ("Method", "Benchmark", "Quantity", "Verdict")
        table.add_column(changes.head[number], justify="right" if numeric else "left", no_wrap=number > 1)
    for row in changes.rows:
        table.add_row(*(Text(row[n].text, style=_STYLES.get(row[n].text, "")) for n in shown))
    out.print(table if changes.rows else "No run has a counterpart: nothing can be compared.")
    if comparison.only_ours or comparison.only_theirs:
        counts = f"{len(comparison.only_ours)} here, {len(comparison.only_theirs)} there"
        out.print(f"Runs without a counterpart: {counts}", highlight=False)
