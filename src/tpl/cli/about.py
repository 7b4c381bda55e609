"""Commands that list and describe what the package has: list, describe."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from tpl.cli.app import REFERENCE, app, out, print_json
from tpl.cli.options import AsJson
from tpl.names import refuse_unknown
from tpl.outline import method_outlines, outline


@app.command("list", rich_help_panel=REFERENCE)
def list_(as_json: AsJson = False) -> None:
    """Show all methods, benchmarks, encoders, scores, training techniques and protections.

    Example: `tpl list --json`
    """
    benchmarks = outline("tpl.bench.benchmarks").BENCHMARKS
    scores = outline("tpl.scores").SCORES
    techniques = outline("tpl.methods.bank.techniques").TECHNIQUES
    protections = outline("tpl.methods.bank.protect").PROTECTIONS
    sections = {
        "methods": {name: m.summary for name, m in method_outlines().items()},
        "benchmarks": {name: f"{b.summary}; encoder {b.encoder}" for name, b in benchmarks.items()},
        "encoders": outline("tpl.nets.weights").ENCODERS,
        "scores": {name: s.summary for name, s in scores.items()},
        "techniques": {name: t.summary for name, t in techniques.items()},
        "protections": {name: p.summary for name, p in protections.items()},
    }
    if as_json:
        print_json({k: [{"name": n, "summary": s} for n, s in v.items()] for k, v in sections.items()})
        return
    for title, entries in sections.items():
        table = Table(title=title.capitalize(), title_justify="left", title_style="bold", show_header=False, box=None)
        for name, summary in entries.items():
            table.add_row(name, summary)
        out.print(table, "")


@app.command(rich_help_panel=REFERENCE)
def describe(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="A method; `tpl list` shows all.")],
    as_json: AsJson = False,
) -> None:
    """Explain a method: its idea, its paper, what it keeps and costs, and every option with its default.

    Example: `tpl describe tpl`
    """
    methods = method_outlines()
    refuse_unknown("method", method, methods)
    found = methods[method]
    fields = [
        {
            "name": f.name,
            "default": f.default,
            "choices": list(f.metadata["choices"]),
            "help": f.metadata["help"],
            "group": f.metadata["group"],
        }
        for f in dataclasses.fields(found.config_class)
    ]
    if as_json:
        about = {
            "name": found.name,
            "summary": found.summary,
            "paper": found.paper,
            "keeps": found.keeps,
            "cost": found.cost,
            "from_scratch": found.from_scratch,
        }
        print_json(about | {"options": fields})
        return
    out.print(f"[bold]{found.name}[/]: {found.summary}")
    if found.paper:
        out.print(found.paper, style="italic", markup=False)
    for title, text in (("Keeps", found.keeps), ("Cost", found.cost)):
        if text:
            out.print(f"[bold]{title}[/]: {text}")
    if found.from_scratch:
        out.print("[bold]Encoder[/]: pre-trained ones, or resnet18 from scratch")
    doc = sys.modules[found.__module__].__doc__ or ""
    out.print("\n" + reflowed(doc) + "\n", highlight=False, markup=False)
    _print_options(fields)


def _print_options(fields: list[dict[str, Any]]) -> None:
    """Print one table per group of options; its columns are as wide as in the other tables."""
    names, defaults = (max(len(str(field[key])) for field in fields) for key in ("name", "default"))
    out.print("[bold]Options[/], for `--set NAME=VALUE`:")
    for group in dict.fromkeys(field["group"] for field in fields):
        table = Table(title=group or "other", title_justify="left", title_style="bold", show_header=False, box=None)
        table.add_column(width=names, no_wrap=True)
        table.add_column(width=defaults, style="cyan", overflow="fold")
        table.add_column()
        for field in fields:
            if field["group"] == group:
                values = f"\n[dim]{' | '.join(field['choices'])}[/]" if field["choices"] else ""
                table.add_row(field["name"], str(field["default"]), escape(field["help"]) + values)
        out.print("", table)


def reflowed(text: str) -> str:
    """Join the lines of each paragraph, for a terminal of any width; indented and numbered lines stay as they are."""
    lines: list[str] = []
    for line in text.strip().splitlines():
        begins = not line or line.startswith(" ") or re.match(r"\d+\. ", line)
        if begins or not lines or not lines[-1] or lines[-1].startswith(" "):
            lines.append(line)
        else:
            lines[-1] += " " + line
    return "\n".join(lines)
