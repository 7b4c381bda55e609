"""Commands that say what there is: list, describe."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Annotated

import typer
from rich.table import Table

from tpl.cli.app import AsJson, app, out, print_json


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """Show all methods, benchmarks, encoders, scores, training techniques and protections.

    Example: `tpl list --json`
    """
    from tpl.bench.benchmarks import BENCHMARKS
    from tpl.methods import load_methods
    from tpl.methods.bank.protect import PROTECTIONS
    from tpl.methods.bank.techniques import TECHNIQUES
    from tpl.nets import ENCODERS
    from tpl.scores import SCORES

    sections = {
        "methods": {name: m.summary for name, m in sorted(load_methods().items())},
        "benchmarks": {name: b.summary for name, b in BENCHMARKS.items()},
        "encoders": ENCODERS,
        "scores": {name: s.summary for name, s in SCORES.items()},
        "techniques": {name: t.summary for name, t in TECHNIQUES.items()},
        "protections": {name: p.summary for name, p in PROTECTIONS.items()},
    }
    if as_json:
        print_json({k: [{"name": n, "summary": s} for n, s in v.items()] for k, v in sections.items()})
        return
    for title, entries in sections.items():
        table = Table(title=title.capitalize(), title_justify="left", title_style="bold", show_header=False, box=None)
        for name, summary in entries.items():
            table.add_row(name, summary)
        out.print(table, "")


@app.command()
def describe(method: Annotated[str, typer.Argument(help="One of `tpl list`.")], as_json: AsJson = False) -> None:
    """Explain a method: its idea, its paper, what it keeps and costs, and every option with its default.

    Example: `tpl describe tpl`
    """
    from tpl.names import method_names, refuse_unknown

    refuse_unknown("method", method, method_names())
    from tpl.methods import find_method

    found = find_method(method)
    fields = [
        {
            "name": f.name,
            "default": f.default,
            "choices": list(f.metadata["choices"]),
            "help": f.metadata["help"],
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
        out.print(found.paper, style="italic")
    for title, text in (("Keeps", found.keeps), ("Cost", found.cost)):
        if text:
            out.print(f"[bold]{title}[/]: {text}")
    if found.from_scratch:
        out.print("[bold]Encoder[/]: pre-trained ones, or resnet18 from scratch")
    doc = sys.modules[found.__module__].__doc__ or ""
    out.print("\n" + reflowed(doc) + "\n", highlight=False)
    table = Table("option", "default", "values", "what it does", box=None, header_style="bold")
    for field in fields:
        table.add_row(field["name"], str(field["default"]), ", ".join(field["choices"]), field["help"])
    out.print(table)


def reflowed(text: str) -> str:
    """Paragraphs as one line each, for a terminal of any width; what is indented or numbered keeps its lines."""
    lines: list[str] = []
    for line in text.strip().splitlines():
        begins = not line or line.startswith(" ") or re.match(r"\d+\. ", line)
        if begins or not lines or not lines[-1] or lines[-1].startswith(" "):
            lines.append(line)
        else:
            lines[-1] += " " + line
    return "\n".join(lines)
