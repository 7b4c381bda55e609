"""Commands that look at a model or edit its classes: show, rename, remove."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from tpl.cli.app import MODELS, app, err, out, print_json
from tpl.cli.options import AsJson, Device, Model, Weights
from tpl.cli.text import (
    bytes_on_disk,
    capacity_text,
    covariance_text,
    listed,
    memory_text,
    percent,
    size,
    unknown_text,
    warn_about_names,
    weighting_text,
)
from tpl.errors import TplError
from tpl.names import refuse_unknown


@app.command(rich_help_panel=MODELS)
def show(model: Model, weights: Weights = None, as_json: AsJson = False) -> None:
    """Show what a model knows: tasks, classes, accuracy when learned, encoder, memory, size.

    A model of an earlier version must be loaded for that, which takes a few seconds and perhaps --weights.

    Example: `tpl show model`
    """
    about = _about(model, weights)
    if as_json:
        print_json(about)
        return
    table = Table("task", "classes", "images", "held out", "accuracy", "learned", box=None, header_style="bold")
    for task in about["tasks"]:
        accuracy = "–" if task["accuracy"] is None else percent(task["accuracy"])
        learned = task["learned"].replace("T", " ")[:16]
        names = escape(listed(task["classes"]))
        table.add_row(escape(task["name"]), names, str(task["images"]), str(task["held_out"]), accuracy, learned)
    out.print(table)
    memory, encoder = about["memory"], about["encoder"]
    facts = {
        "classes": f"{len(about['classes'])} in {len(about['tasks'])} task{'s' * (len(about['tasks']) > 1)}",
        "method": about["method"],
        "encoder": f"{encoder['name']}, sha256 {encoder['sha256']}",
        "memory": memory_text(memory),
        "on disk": size(about["bytes"]),
        "capacity": capacity_text(about["capacity"]),
        "unknown": unknown_text(about["smallest_reject"]),
    }
    if about["covariance_estimators"]:
        facts["covariance"] = covariance_text(about["covariance_estimators"])
    if about["weighting"] is not None:
        facts["weighting"] = weighting_text(about["weighting"])
    grid = Table.grid(padding=(0, 2))
    for name, text in facts.items():
        grid.add_row(f"[bold]{name}[/]", escape(text))
    out.print("", grid)


@app.command(rich_help_panel=MODELS)
def rename(
    model: Model,
    old: Annotated[str, typer.Argument(metavar="OLD", help="The present name of the class.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Its new name.")],
    weights: Weights = None,
    as_json: AsJson = False,
) -> None:
    """Rename a class; nothing else changes. Takes a few seconds.

    Example: `tpl rename model cat "tabby cat"`
    """
    known = _classes(model)
    refuse_unknown("class", old, known)
    if new != old and new in known:
        raise TplError(f"There is a class '{new}' already; class names must be unique.")
    from tpl.advice.files import names_alike
    from tpl.learner import Learner

    with Learner.changing(model, weights=weights, device="cpu") as learner:
        learner.rename(old, new)
    alike = names_alike([new], learner.classes_)
    warn_about_names(alike)
    if as_json:
        renamed, groups = {"from": old, "to": new}, [list(group) for group in alike]
        print_json({"model": str(model), "renamed": renamed, "classes": learner.classes_, "names_alike": groups})
        return
    out.print(f"'{old}' is now called '{new}'.", markup=False, highlight=False)


@app.command(rich_help_panel=MODELS)
def remove(
    model: Model,
    name: Annotated[str, typer.Argument(metavar="CLASS", help="The class to remove.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    weights: Weights = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Remove a class for good: its stored images, its statistics and its name. Takes a few seconds.

    The other classes stay. Older versions of the model are deleted, as they hold the class. On a terminal it asks for
    confirmation.

    Example: `tpl remove model cat --yes`
    """
    refuse_unknown("class", name, _classes(model))
    question = f"Remove '{name}' for good? Its stored images are deleted, and so are older versions."
    if not yes and not _confirmed(question):
        err.print("Nothing was removed.")
        raise typer.Exit(1)
    from tpl.learner import Learner

    with Learner.changing(model, weights=weights, device=device) as learner:
        learner.remove(name)
    if as_json:
        print_json({"model": str(model), "removed": name, "classes": learner.classes_, "bytes": bytes_on_disk(model)})
        return
    left = len(learner.classes_)
    out.print(f"'{name}' is removed; {left} classes are left.", markup=False, highlight=False)


def _classes(model: Path) -> list[str]:
    """The classes of a model, from its header: a mistyped name is told before the model is loaded."""
    from tpl.store import ModelStore

    return [name for task in ModelStore(model).header()["tasks"] for name in task["classes"]]


def _at_terminal() -> bool:
    return sys.stdin.isatty()


def _confirmed(question: str) -> bool:
    if not _at_terminal():
        raise TplError("Removing a class cannot be undone: without a terminal to ask on, pass --yes.")
    return typer.confirm(question, err=True)


def _about(model: Path, weights: Path | None) -> dict[str, Any]:
    """What `show` prints, for --json: from the header alone, without torch, if it has all of it."""
    from tpl.answers import TaskEntry
    from tpl.store import ModelStore

    store = ModelStore(model)
    header = store.header()
    tasks = [TaskEntry.from_dict(task, t).record for t, task in enumerate(header["tasks"], start=1)]
    method, encoder = header["method"], {key: header["encoder"][key] for key in ("name", "sha256")}
    facts = header.get("facts")
    if facts is None:  # of an earlier version
        from tpl.learner import Learner

        facts = Learner.load(model, weights, device="cpu").facts()
    return {
        "model": str(model),
        "method": method,
        "classes": [name for task in tasks for name in task.classes],
        "tasks": [
            {
                "name": task.name,
                "classes": list(task.classes),
                "images": task.images,
                "held_out": task.held_out,
                "accuracy": task.accuracy,
                "learned": task.learned,
                "source": task.source,
            }
            for task in tasks
        ],
        "encoder": encoder,
        **facts,
        "bytes": bytes_on_disk(model),
    }
