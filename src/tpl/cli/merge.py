"""The command that joins two models: merge."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpl.cli.app import MODELS, app, err, out, print_json
from tpl.cli.options import AsJson, Device, Weights
from tpl.cli.text import bytes_on_disk, listed, size
from tpl.errors import TplError

if TYPE_CHECKING:
    from tpl.learner import Learner

EXPERT = {
    "added": "The sums of both classifiers over all classes were added: the result is that of learning both.",
    "learned": "The classifier over all classes learned the second model's images from its memory, which holds all.",
    "estimated": "The classifier over all classes is an estimate: the second model stores only a part of its images.",
}


@app.command(rich_help_panel=MODELS)
def merge(
    first: Annotated[Path, typer.Argument(metavar="A", help="A model directory.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one, on the same encoder.")],
    into: Annotated[Path, typer.Option("--into", metavar="C", help="The directory of the merged model; a new one.")],
    rename_equal: Annotated[
        bool,
        typer.Option(
            "--rename-equal", help="Give classes of B that A has, too, the name of B's directory in brackets."
        ),
    ] = False,
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate",
            help="If B stores only a part of its images: let each stand for several of them.",
        ),
    ] = False,
    weights: Weights = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Join two models that were trained apart into one that knows all their classes. Nothing is trained.

    Takes about as long as predicting the images that both models store. Every task's features stay the same, bit for
    bit; A and B are left as they are. Both need the same encoder, method and options, and different classes.

    Examples:

    `tpl merge pets birds --into animals`

    `tpl merge monday tuesday --into week --rename-equal`
    """
    from tpl.console import work_progress
    from tpl.learner import Learner
    from tpl.store import ModelStore

    if ModelStore(into).exists():
        raise TplError(f"{into} is a model already: name a new directory with --into.")
    a, b = (Learner.load(path, weights, device) for path in (first, second))
    renamed = _rename_equal(a, b, second, rename_equal)
    store = ModelStore(into)
    with work_progress(err, as_json) as progress, store.creating():
        progress.begin("merging", None)
        how = a.merge(b, estimate)
        a.save(into)
    if as_json:
        tasks = [{"name": task.name, "classes": list(task.classes)} for task in a.tasks_]
        report = {"model": str(into), "classes": a.classes_, "tasks": tasks, "renamed": renamed, "expert": how}
        print_json(report | {"bytes": bytes_on_disk(into)})
        return
    words = [f"'{old}' of {second} is now called '{new}'." for old, new in renamed.items()]
    words.append(f"{into} knows {len(a.classes_)} classes in {len(a.tasks_)} tasks: {listed(a.classes_)}.")
    words += [EXPERT[how]] if how is not None else []
    if any(task.accuracy is not None for task in a.tasks_):
        words.append(
            "Accuracies in `tpl show` were measured before the merge; `tpl evaluate` measures the joined model."
        )
    words.append(f"On disk: {size(bytes_on_disk(into))}.")
    for text in words:
        out.print(text, markup=False, highlight=False, soft_wrap=True)


def _rename_equal(a: Learner, b: Learner, second: Path, wanted: bool) -> dict[str, str]:
    """Rename classes of `b` that `a` has, too; the old names with the new ones."""
    known = [name for name in b.classes_ if name in a.classes_]
    if known and not wanted:
        raise TplError(
            f"Both models have {listed(known)}. If these are the same classes, add the images with `tpl learn "
            "--update` instead; if not, --rename-equal renames them in the second model."
        )
    renamed = {name: f"{name} ({second.resolve().name})" for name in known}
    for old, new in renamed.items():
        taken = set(a.classes_) | set(b.classes_)
        if new in taken:
            raise TplError(f"'{old}' cannot be renamed to '{new}', which is there already: use `tpl rename` first.")
        b.rename(old, new)
    return renamed
