"""Tables of results as cells, and written as Markdown, LaTeX (booktabs) and for the terminal."""

from __future__ import annotations

import io
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import table as rich_tables
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.text import Text

from tpl.bench.bounds import bounds_sentence
from tpl.report.columns import (
    ACCURACY,
    CONTINUAL,
    COST,
    FORGETTING,
    MISSING,
    OR,
    SCORES,
    Column,
    Row,
    best,
    bound_names,
    cell,
    columns_of,
    contamination_note,
    shown_name,
)
from tpl.report.find import Experiment
from tpl.report.paper import PaperValue, Ranking, paper_of

_UNITS = {ACCURACY: " (%)", SCORES: " (%)", FORGETTING: " forgetting (points)"}
Paper = Mapping[str, Mapping[str, PaperValue]]  # by group, then by column


@dataclass(frozen=True)
class Cell:
    """The text of one cell; bold for the best value."""

    text: str
    bold: bool = False
    indent: bool = False  # for a part of the method in the row above


@dataclass(frozen=True)
class Table:
    """One table: the first column is text, the others are numbers."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""  # a sentence about the table


def results_table(
    rows: Sequence[Row], title: str = "", paper: Paper | None = None, only: Sequence[str] = (), note: str = ""
) -> Table:
    """Rows as a table, the best continual values bold; a column is followed by the paper's values if it has any.

    `only` names the groups of columns to show; empty: all of them.
    """
    columns = [column for column in columns_of(rows) if not only or column.group in only]
    paper = paper or {}
    winners = {column.key: best(rows, column) for column in columns}
    head, beside = ["Method"], {c.key for c in columns if any(c.key in values for values in paper.values())}
    for column in columns:
        head += [column.title + _UNITS.get(column.group, "")] + (["paper"] if column.key in beside else [])
    made = []
    for row in rows:
        cells = [Cell(_row_name(row), indent=row["part"] is not None)]
        for column in columns:
            cells.append(Cell(cell(row, column), row["name"] in winners[column.key]))
            if column.key in beside:
                cells.append(_paper_cell(paper.get(row["name"], {}), column))
        made.append(tuple(cells))
    return Table(title, tuple(head), tuple(made), note)


def _row_name(row: Row) -> str:
    """The row's name, with its role if it is a bound."""
    return shown_name(row) if row["role"] == CONTINUAL else f"{shown_name(row)} ({row['role']})"


def _paper_cell(values: Mapping[str, PaperValue], column: Column) -> Cell:
    value = values.get(column.key)
    return Cell(value.text if value else MISSING)


def experiment_tables(experiment: Experiment) -> list[Table]:
    """An experiment's results, and its costs."""
    rows, paper, runs = experiment.rows, paper_of(experiment), max(len(group.runs) for group in experiment.groups)
    whole = [row for row in rows if row["part"] is None]  # a part has no costs of its own
    over = f", mean ± standard deviation over up to {runs} runs" if runs > 1 else ""
    if note := contamination_note(rows):
        over += f". {note}"
    return [
        results_table(
            rows, f"{experiment.title}{over}", paper, (ACCURACY, SCORES, FORGETTING), forgetting_sentence(experiment)
        ),
        results_table(whole, f"{experiment.title}: size and time", paper, (COST,)),
    ]


def forgetting_sentence(experiment: Experiment) -> str:
    """What rectified forgetting is measured against in an experiment."""
    considered = [each for run in experiment.runs for each in experiment.bounds_of(run)]
    return bounds_sentence(considered or experiment.bounds, bound_names(experiment.rows))


def overview(experiments: Sequence[Experiment]) -> Table | None:
    """Methods by benchmarks: Last and AIA in percent, with the paper's values; None for a single experiment."""
    if len(experiments) < 2:
        return None
    benchmarks = list(dict.fromkeys(experiment.benchmark for experiment in experiments))
    encoders = {experiment.encoder for experiment in experiments}
    if len({(experiment.benchmark, experiment.encoder) for experiment in experiments}) < len(experiments):
        benchmarks, encoders = [], set()  # the experiments differ in something else: one column each
    headings = benchmarks or [experiment.title for experiment in experiments]
    lines: dict[tuple[str, str], dict[str, tuple[Row, Mapping[str, PaperValue]]]] = {}
    for experiment in experiments:
        paper = paper_of(experiment)
        for row in experiment.rows:
            line = lines.setdefault((experiment.encoder if len(encoders) > 1 else "", _row_name(row)), {})
            line[experiment.benchmark if benchmarks else experiment.title] = row, paper.get(row["name"], {})
    rows = [row for experiment in experiments for row in experiment.rows]
    columns = [column for column in columns_of(rows) if column.key in ("last", "aia")]
    pairs = [(heading, column) for heading in headings for column in columns]
    beside = {(heading, key) for line in lines.values() for heading, (_, values) in line.items() for key in values}
    head = ["Method"]
    for heading, column in pairs:
        head += [f"{heading} {column.title}"] + (["paper"] if (heading, column.key) in beside else [])
    made = []
    for (encoder, name), line in lines.items():
        cells = [Cell(f"{name}, {encoder}" if encoder else name)]
        for heading, column in pairs:
            found, values = line.get(heading, (None, {}))
            cells.append(Cell(cell(found, column) if found else MISSING))
            if (heading, column.key) in beside:
                cells.append(_paper_cell(values, column))
        made.append(tuple(cells))
    return Table("Accuracy in percent, method by benchmark", tuple(head), tuple(made))


def ranking_table(ranking: Ranking, title: str) -> Table:
    """Each method's accuracy and rank beside the paper's."""
    head = ("Method", "Last (%)", "place", "paper's Last (%)", "paper's place")
    rows = [
        (p.method, f"{100 * p.ours:.1f}", f"{p.our_place:g}", f"{100 * p.paper:.1f}", f"{p.paper_place:g}")
        for p in ranking.places
    ]
    return Table(f"{title}. {ranking.sentence}", head, tuple(tuple(map(Cell, row)) for row in rows))


_SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "`": r"\textasciigrave{}", "[": "{[}", "]": "{]}", "*": "{*}",
    "\N{DAGGER}": r"\textdagger{}",
    "\N{EN DASH}": "--", "\N{MINUS SIGN}": "$-$", "±": r"$\pm$", "…": r"\ldots{}", "×": r"$\times$",
}  # fmt: skip


def markdown(rows: Sequence[Row]) -> str:
    """Rows of results as a Markdown table, the best continual values bold."""
    return to_markdown(results_table(rows))


def to_markdown(table: Table) -> str:
    """A table as Markdown, below its title if it has one."""
    lines = [[_plain(text) for text in table.head], [":--", *("--:" for _ in table.head[1:])]]
    lines += [[("&emsp;" if c.indent else "") + _markdown(c) for c in row] for row in table.rows]
    text = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    text += f"\n{_plain(table.note)}\n" if table.note else ""
    return f"### {_plain(table.title)}\n\n{text}" if table.title else text


def _markdown(cell: Cell) -> str:
    return f"**{_plain(cell.text)}**" if cell.bold else _plain(cell.text)


def to_latex(table: Table, label: str) -> str:
    """A table as a LaTeX float; needs the package `booktabs`."""
    rows = [" & ".join((r"\quad " if c.indent else "") + _latex(c) for c in row) for row in table.rows]
    caption = f"{table.title}. {table.note}" if table.note else table.title
    body = "".join(f"{row} \\\\\n" for row in rows)
    return (
        "\\begin{table}\n\\centering\n\\small\n"
        f"\\caption{{{escape(caption)}}}\n\\label{{{label}}}\n"
        f"\\begin{{tabular}}{{l{'r' * (len(table.head) - 1)}}}\n\\toprule\n"
        f"{' & '.join(map(escape, table.head))} \\\\\n\\midrule\n{body}\\bottomrule\n\\end{{tabular}}\n\\end{{table}}\n"
    )


def _latex(cell: Cell) -> str:
    return rf"\textbf{{{escape(cell.text)}}}" if cell.bold else escape(cell.text)


def escape(text: str) -> str:
    """Escape text for LaTeX. Letters that pdflatex does not know lose their accents or become ?."""
    return "".join(_SPECIAL.get(letter) or _letter(letter) for letter in _one_line(text))


def all_markdown(tables: Sequence[Table]) -> str:
    """Several tables as Markdown."""
    return "\n".join(to_markdown(table) for table in tables)


def all_latex(tables: Sequence[Table]) -> str:
    """Several tables as a LaTeX file for `\\input`."""
    head = "% Tables by tpl report. In the preamble: \\usepackage[T1]{fontenc} \\usepackage{booktabs}\n\n"
    return head + "\n".join(to_latex(table, f"tab:tpl-{number}") for number, table in enumerate(tables, 1))


def _plain(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return re.sub(r"[\\|*`<\[\]]|(?<!\w)_|_(?!\w)", r"\\\g<0>", _one_line(text))  # _ within a word is no markup


def _one_line(text: str) -> str:
    """Text of a run, which may come from elsewhere: what is not printable, such as a terminal's codes, is a "?"."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def _letter(letter: str) -> str:
    if letter.isascii() or ("À" <= letter <= "ÿ" and letter not in "×÷"):
        return letter
    plain = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
    return "".join(_SPECIAL.get(part, part) for part in plain) or "?"


# Columns left out, in this order, if the terminal is too narrow.
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


def rich_table(rows: Sequence[Row], title: str | None = None, width: int | None = None) -> rich_tables.Table:
    """Rows as a table for the terminal, the best continual values bold, the bounds dim.

    If `width` (in characters) is too small for all columns, the least important ones are left out.
    """
    columns = columns_of(rows)
    table = _rich_table(rows, columns, title)
    unlimited = Console(width=10_000, file=io.StringIO())
    for key in _DISPENSABLE:
        if width is None or unlimited.measure(table).maximum <= width:
            break
        columns = [column for column in columns if column.key != key]
        table = _rich_table(rows, columns, title)
    return table


def _rich_table(rows: Sequence[Row], columns: Sequence[Column], title: str | None) -> rich_tables.Table:
    winners = {column.key: best(rows, column) for column in columns}
    against = bound_names(rows)
    notes = [f"Forgetting is measured against {OR.join(against)}."] if against else []
    notes += [note] if (note := contamination_note(rows)) else []
    caption = " ".join(notes) or None
    table = rich_tables.Table(
        title=title, caption=caption, box=SIMPLE_HEAD, show_edge=False, padding=0, header_style="bold"
    )
    table.add_column("\nMethod", overflow="fold", min_width=8)
    for column in columns:
        table.add_column(column.short, justify="right", no_wrap=True)
    for row in rows:
        bound = row["role"] != CONTINUAL
        name = Text(shown_name(row) if row["part"] is None else f"  {row['part']} alone")
        if bound:
            name.append(f"\n({row['role'].split()[0]})", style="italic")
        cells = [Text(cell(row, c), style="bold" if row["name"] in winners[c.key] else "") for c in columns]
        table.add_row(name, *cells, style="dim" if bound else "")
    return table
