"""How `tpl learn` tells a person what it has learned, or would learn."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from tpl.cli.app import out
from tpl.cli.model_words import capacity_text, listed, memory_text, percent, size, unknown_text


def print_learned(report: dict[str, Any]) -> None:
    """What was learned, how well, and what the model is like now."""
    classes, seconds = escape(listed(list(report["classes"]))), report["seconds"]
    if report["updated"]:
        out.print(f"Took up {report['images']} more images of {classes} in {seconds:.0f} s.", highlight=False)
    else:
        out.print(
            f"Learned [bold]{classes}[/] from {report['images']} images in {seconds:.0f} s, {report['epochs']} epochs.",
            highlight=False,
        )
        _print_accuracy(report)
    grid = Table.grid(padding=(0, 2))
    memory = report["memory"]
    kept = memory_text(memory)
    if "memory_budget_bytes" in report:
        kept += f" ({size(report['memory_budget_bytes'])} are about {memory['budget']} such images)"
    for name, text in (
        ("memory", kept),
        ("capacity", capacity_text(report["capacity"])),
        ("unknown", unknown_text(report["smallest_reject"])),
        ("on disk", f"{size(report['bytes'])} in {report['model']}"),
    ):
        grid.add_row(f"[bold]{name}[/]", escape(text))
    out.print(grid)


def _print_accuracy(report: dict[str, Any]) -> None:
    if report["accuracy"] is None:
        out.print("No image was held out: `tpl evaluate` can measure it on others.", highlight=False)
        return
    held = report["held_out"]
    few = ", too few for more than a hint" if held < 30 else ""
    out.print(
        f"Accuracy on {held} held-out images{few}: [bold]{percent(report['accuracy'])}[/], "
        f"among all {report['known_classes']} classes.",
        highlight=False,
    )
    for pair in report["confused"][:5]:
        text = f"  {pair['true']} was taken for {pair['predicted']}: {pair['count']} of them"
        out.print(escape(text), highlight=False)


def print_plan(report: dict[str, Any]) -> None:
    """What would be learned."""
    table = Table("class", box=None, header_style="bold")
    table.add_column("images", justify="right")
    for name, count in report["classes"].items():
        table.add_row(escape(name), str(count))
    out.print(table)
    out.print(f"To learn: {report['images']} images; held out to measure on: {report['held_out']}.", highlight=False)
    if report["updated"]:
        out.print("An update trains nothing: it takes little longer than predicting the images.")
    else:
        minutes, seconds = divmod(round(report["seconds"]), 60)
        lasts = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
        out.print(
            f"Time: about {lasts} for {report['epochs']} epochs, measured on a few steps just now. "
            f"On disk: about {size(report['bytes'])}.",
            highlight=False,
        )
    memory = report["memory"]
    if memory["kind"] != "images":
        out.print("Memory: no images. Nothing was stored.", highlight=False)
        return
    budget = memory["budget"]
    of = f", {size(report['memory_budget_bytes'])}" if "memory_budget_bytes" in report else ""
    out.print(f"Memory: at most {budget} images{of}. Nothing was stored.", highlight=False)
