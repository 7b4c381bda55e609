"""Commands on the versions of a model: history, undo."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from tpl.cli.app import MODELS, app, out, print_json
from tpl.cli.options import AsJson, Model
from tpl.cli.text import bytes_on_disk, percent, size


@app.command(rich_help_panel=MODELS)
def history(
    model: Model,
    keep: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Keep this many older versions, now and after every later change, and delete all others; at first 5.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the versions of a model: what each one changed, when, and what it takes on disk. Takes no time.

    `tpl undo` goes back to any of them. They share what has not changed. To remove a class deletes all older versions,
    as they hold its images.

    Examples:

    `tpl history model`

    `tpl history model --keep 1`
    """
    from tpl.versions import history as versions_of
    from tpl.versions import kept_by, prune

    if keep is not None:
        prune(model, keep)
    found = versions_of(model)
    from tpl.store import ModelStore

    kept = kept_by(ModelStore(model).header())
    if as_json:
        versions = [version.to_dict() for version in found]
        print_json({"model": str(model), "keep": kept, "bytes": bytes_on_disk(model), "versions": versions})
        return
    table = Table(box=None, header_style="bold")
    for column in ("version", "when", "classes", "newest task", "own size"):
        table.add_column(column, no_wrap=True)
    table.add_column("change")
    for version in found:
        accuracy = "–" if version.accuracy is None else percent(version.accuracy)
        when = version.committed.replace("T", " ")[:16] or "–"
        words = str(len(version.classes)), accuracy, size(version.bytes), escape(version.change)
        table.add_row(str(version.number), when, *words)
    out.print(table)
    older = f"up to {kept} older version{'s are' if kept != 1 else ' is'} kept" if kept else "no older version is kept"
    text = f"Version {found[0].number} is the present one; {older} (--keep)."
    note = "Newest task: the accuracy on its own classes when it was learned, not that of the whole model."
    out.print(f"{text} {note}", highlight=False, soft_wrap=True)


@app.command(rich_help_panel=MODELS)
def undo(
    model: Model,
    to: Annotated[
        int | None, typer.Option(metavar="VERSION", help="Go back to this version; by default to the one before.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Undo the last change of a model, or go back to an older version. Takes no time.

    Called twice, it goes back two steps. The model before the undo becomes an older version: `--to` goes there again.

    Examples:

    `tpl undo model`

    `tpl undo model --to 3`
    """
    from tpl.store import ModelStore, kept_number
    from tpl.versions import undo as go_back

    before = kept_number(ModelStore(model).header())
    version = go_back(model, to)
    if as_json:
        print_json({"model": str(model), "undone": before, **version.to_dict()})
        return
    classes = f"{len(version.classes)} class{'es' * (len(version.classes) != 1)}"
    out.print(
        f"{model} is as version {version.same_as} was: {classes}. `tpl undo {model} --to {before}` takes this back.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
