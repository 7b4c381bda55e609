"""Tables as Markdown and as LaTeX (booktabs), safe whatever names they hold."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from tpl.report.sheets import Sheet, sheet_of
from tpl.report.tables import Row

_SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "`": r"\textasciigrave{}", "[": "{[}", "]": "{]}", "*": "{*}",
    "\N{EN DASH}": "--", "\N{MINUS SIGN}": "$-$", "±": r"$\pm$", "…": r"\ldots{}", "×": r"$\times$",
}  # fmt: skip


def markdown(rows: Sequence[Row]) -> str:
    """Rows of results as a Markdown table, the best continual values bold."""
    return to_markdown(sheet_of(rows))


def to_markdown(sheet: Sheet) -> str:
    """One table, under its title where it has one."""
    lines = [[_plain(text) for text in sheet.head], [":--", *("--:" for _ in sheet.head[1:])]]
    lines += [[f"**{_plain(c.text)}**" if c.bold else _plain(c.text) for c in row] for row in sheet.rows]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return f"### {_plain(sheet.title)}\n\n{table}" if sheet.title else table


def to_latex(sheet: Sheet, label: str) -> str:
    """One table as a float that needs `booktabs` and nothing else."""
    rows = [
        " & ".join(rf"\textbf{{{escape(c.text)}}}" if c.bold else escape(c.text) for c in row) for row in sheet.rows
    ]
    body = "".join(f"{row} \\\\\n" for row in rows)
    return (
        "\\begin{table}\n\\centering\n\\small\n"
        f"\\caption{{{escape(sheet.title)}}}\n\\label{{{label}}}\n"
        f"\\begin{{tabular}}{{l{'r' * (len(sheet.head) - 1)}}}\n\\toprule\n"
        f"{' & '.join(map(escape, sheet.head))} \\\\\n\\midrule\n{body}\\bottomrule\n\\end{{tabular}}\n\\end{{table}}\n"
    )


def escape(text: str) -> str:
    """Text that LaTeX sets as it stands. Letters that pdflatex does not know lose their accents or become ?."""
    return "".join(_SPECIAL.get(letter) or _letter(letter) for letter in " ".join(text.split()))


def all_markdown(sheets: Sequence[Sheet]) -> str:
    """Several tables, one after the other."""
    return "\n".join(to_markdown(sheet) for sheet in sheets)


def all_latex(sheets: Sequence[Sheet]) -> str:
    """Several tables, ready for `\\input`."""
    head = "% Tables by tpl report. In the preamble: \\usepackage[T1]{fontenc} \\usepackage{booktabs}\n\n"
    return head + "\n".join(to_latex(sheet, f"tab:tpl-{number}") for number, sheet in enumerate(sheets, 1))


def _plain(text: str) -> str:
    """Text that ends no cell of a Markdown table and is no markup in it."""
    text = " ".join(text.split())
    return re.sub(r"[\\|*`<\[\]]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)  # _ within a word is no markup


def _letter(letter: str) -> str:
    if letter.isascii() or ("À" <= letter <= "ÿ" and letter not in "×÷"):
        return letter if letter.isprintable() else "?"
    plain = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
    return "".join(_SPECIAL.get(part, part) for part in plain) or "?"
