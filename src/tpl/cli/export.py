"""The command that writes a model as one ONNX file: export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from tpl.cli.app import MODELS, app, err, out, print_json
from tpl.cli.options import DATA, AsJson, Download, Model, TestData, Weights
from tpl.cli.text import SHOWN, percent, size, warn
from tpl.errors import TplError
from tpl.files import at_home

if TYPE_CHECKING:
    from torch import Tensor

    from tpl.export.file import Agreement, Exported
    from tpl.learner import Learner
    from tpl.stream import Labelled


@app.command(rich_help_panel=MODELS)
def export(
    model: Model,
    file: Annotated[Path, typer.Argument(metavar="OUT.onnx", help="The file to write; an existing file is replaced.")],
    precision: Annotated[
        str, typer.Option(help="fp32; fp16: the encoder in half precision; int8: its linear layers quantised.")
    ] = "fp32",
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Also compare on labelled images: class folders, a zip of them, or a CSV file.",
            rich_help_panel=DATA,
        ),
    ] = None,
    data: TestData = None,
    download: Download = False,
    weights: Weights = None,
    as_json: AsJson = False,
) -> None:
    """Write a model of closed-form, tpl or tpl-plus as one ONNX file that runs without this package and without torch.

    Input: uint8 images. Output: log-probabilities of classes, probabilities of tasks and the unknown score. Class names
    and input size are in the file. It is compared with the model on a few stored images, or on noise if none are
    stored, before it is written; with --check or --data, also on labelled images. Takes about half a minute.

    Examples:

    `tpl export model model.onnx`

    `tpl export model small.onnx --precision int8 --check test-photos/`
    """
    from tpl.export import check_ready

    file = at_home(file)
    check_ready(file, precision)
    from tpl.export.file import export_onnx
    from tpl.learner import Learner
    from tpl.stream import labelled_images

    given = labelled_images(check, data, download, testing=True) if check is not None or data is not None else None
    learner = Learner.load(model, weights, device="cpu", precision="fp32")
    with nullcontext() if as_json else err.status("Exporting ...", spinner="line"):
        made = export_onnx(learner, file, precision)
    measured, left_out = (None, []) if given is None else _measured(learner, made.file, given, as_json)
    if as_json:
        print_json(_report(model, learner, made, measured, left_out))
        return
    for text in left_out[:SHOWN]:
        warn(f"left out: {text}")
    _print(learner, made, measured)


def _measured(learner: Learner, file: Path, given: Labelled, as_json: bool) -> tuple[Agreement, list[str]]:
    """Compare model and file on labelled images; also name the images that could not be read."""
    from tpl.console import work_progress
    from tpl.export.file import compare
    from tpl.stream import batches_of

    left_out = list(given.skipped)
    with (
        work_progress(err, as_json) as progress,
        closing(batches_of(given.images, learner.method.preprocess)) as ready,
    ):
        progress.begin("comparing", len(given.images))

        def parts() -> Iterator[tuple[Tensor, list[str]]]:
            for part in ready:
                left_out.extend(error for error in part.errors if error is not None)
                labels = [label for label, error in zip(part.labels, part.errors, strict=True) if error is None]
                yield part.pixels, [given.class_names[label] for label in labels]
                progress.advance(len(part.names))

        found = compare(learner, file, parts())
    if not found.images:
        raise TplError(f"{file} is written, but none of the images in {given.origin} can be read: {left_out[0]}")
    return found, left_out


def _report(
    model: Path, learner: Learner, made: Exported, measured: Agreement | None, left_out: list[str]
) -> dict[str, Any]:
    preprocess = learner.method.preprocess
    return {
        "model": str(model),
        "file": str(made.file),
        "precision": made.precision,
        "bytes": made.bytes,
        "classes": learner.classes_,
        "tasks": [task.name for task in learner.tasks_],
        "input": {"name": "images", "type": "uint8", "shape": ["n", 3, preprocess.height, preprocess.width]},
        "outputs": list(made.outputs),
        "stored_images": made.comparison.to_dict(),
        "check": None if measured is None else measured.to_dict() | {"left_out": left_out},
    }


def _print(learner: Learner, made: Exported, measured: Agreement | None) -> None:
    preprocess, classes, tasks = learner.method.preprocess, len(learner.classes_), len(learner.tasks_)
    where = escape(str(made.file))
    out.print(f"[bold]{where}[/]: {size(made.bytes)}, {made.precision}", soft_wrap=True, highlight=False)
    lines = [
        f"in    images, uint8 [n, 3, {preprocess.height}, {preprocess.width}]",
        f"out   {', '.join(made.outputs)}: {classes} classes, {tasks} task{'s' * (tasks > 1)}",
        f"check {_compared(made.comparison)}",
    ]
    if measured is not None:
        lines.append(f"      {_compared(measured)}")
        if measured.known:
            right, right_model = (percent(n / measured.known) for n in (measured.right, measured.right_model))
            lines.append(f"      accuracy on {measured.known} images: {right}; the model itself: {right_model}")
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _compared(found: Agreement) -> str:
    differences = f"probabilities differ by {found.probability:.1g} at most"
    if found.unknown is not None:
        differences += f", unknown scores by {found.unknown:.1g}"
    return f"the model's class on {found.same} of {found.images} images; {differences}"
