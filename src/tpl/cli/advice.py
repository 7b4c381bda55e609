"""Commands that help to better images: check, suggest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from tpl.cli.app import MODELS, app, err, out, print_json
from tpl.cli.options import AsJson, Batch, Device, Encoder, Folder, Model, Weights, may_exist
from tpl.cli.text import SHOWN, listed, percent, warn
from tpl.errors import TplError
from tpl.lines import printable

if TYPE_CHECKING:
    from tpl.advice.check import Reference
    from tpl.advice.features import FeatureReader
    from tpl.stream import Labelled

SEVERAL = 20  # images that `suggest` names


@app.command(rich_help_panel=MODELS)
def check(
    place: Folder = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Compare with this model's classes, too, by what it stores of its images; with its encoder."),
    ] = None,
    encoder: Encoder = None,
    batch: Batch = 256,
    weights: Weights = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Check photos before learning them: bad files, equal pictures, likely wrong labels, classes that look alike.

    Every photo is compared with all others by the encoder's features; nothing is trained or changed. After some
    seconds to start, about as fast as reading the photos: often 100 a second on two cores. Also says how many photos
    are recognised by the others, and about how many would be with twice as many photos.

    Examples:

    `tpl check photos/`

    `tpl check tomorrow.zip --model model --json`
    """
    from tpl.advice.check import check as checked
    from tpl.console import work_progress
    from tpl.stream import labelled_images

    given = labelled_images(place)
    reader, reference = _reader(given, model, encoder, weights, device)
    with work_progress(err, as_json) as progress:
        progress.begin("checking", len(given.images))
        found = checked(given, place, reader, reference, batch, progress.advance)
    report = {"source": given.origin, "encoder": reader.encoder.name, **found.to_dict()}
    if as_json:
        print_json(report)
    else:
        _print(report)


def _reader(
    given: Labelled, model: Path | None, encoder: str | None, weights: Path | None, device: str
) -> tuple[FeatureReader, Reference | None]:
    """What computes features, and the images that a model stores."""
    from tpl.advice.check import Reference
    from tpl.advice.features import FeatureReader
    from tpl.cli.encoder import announce_download, choose_encoder
    from tpl.engine import choose_compute
    from tpl.nets import create_encoder

    if model is None:
        name = choose_encoder(encoder, weights, given.images).name
        announce_download(name, weights)
        return FeatureReader(create_encoder(name, weights), choose_compute(device, "auto", "auto")), None
    if encoder is not None:
        raise TplError("--model has its own encoder: leave out --encoder.")
    from tpl.learner import Learner

    method = Learner.load(model, weights, device).method
    reader = FeatureReader(method.encoder, method.compute)
    reference = Reference.of(method, reader)
    if not len(reference.labels):
        warn(f"{model} stores nothing of its images: its classes are compared by name alone.")
    return reader, reference


def _print(report: dict[str, Any]) -> None:
    """Print what was found, the worst first."""
    images, classes = sum(report["classes"].values()), report["classes"]
    words = f"{len(classes)} class{'es' * (len(classes) != 1)}"
    out.print(f"{images} readable images of {words} in {escape(report['source'])}.", highlight=False)
    _section(
        "Files left out",
        [f"{k['count']} x {k['suffix']}, such as {k['example']}: {k['hint']}" for k in report["left_out"]]
        + report["skipped"],
    )
    _section("Unreadable", report["unreadable"])
    _section("Names of classes that are nearly equal", [", ".join(map(repr, g)) for g in report["names_alike"]])
    _section(
        "The same picture",
        [f"{' = '.join(g['files'])}{_in_classes(g['classes'])}" for g in report["equal_pictures"]],
    )
    _section(
        "Labels that are likely wrong",
        [f"{s['file']}: {s['likely']} ({percent(s['probability'])})?" for s in report["likely_wrong_labels"]],
    )
    _section(
        "Classes that look alike",
        [
            f"{' and '.join(a['classes'])}: {a['confused']} of {a['images']} are taken for the other"
            for a in report["classes_that_look_alike"]
        ],
    )
    _print_outlook(report)


def _in_classes(classes: list[str]) -> str:
    return f" (in {' and '.join(classes)})" if len(classes) > 1 else ""


def _section(title: str, lines: list[str]) -> None:
    if not lines:
        return
    out.print(f"[bold]{title}[/]: {len(lines)}", highlight=False)
    for line in lines[:SHOWN]:
        out.print(f"  {printable(line)}", markup=False, highlight=False, soft_wrap=True)
    if len(lines) > SHOWN:
        out.print(f"  and {len(lines) - SHOWN} more; --json names all.", highlight=False)


def _print_outlook(report: dict[str, Any]) -> None:
    measured, doubled = report["leave_one_out"], report["twice_the_images"]
    if measured["images"]:
        weak = sorted(report["recognised"].items(), key=lambda entry: entry[1]["right"] / entry[1]["images"])
        weak = [f"{name} {row['right']} of {row['images']}" for name, row in weak if row["right"] < row["images"]]
        out.print(
            f"Recognised by all other images: {measured['right']} of {measured['images']}, "
            f"{percent(measured['accuracy'])} ({percent(measured['low'])} to {percent(measured['high'])}, "
            f"{report['encoder']}, nothing trained).",
            highlight=False,
            soft_wrap=True,
        )
        if weak:
            out.print(f"Fewest: {escape(listed(weak, 5))}.", highlight=False, soft_wrap=True)
    if doubled is not None:
        same = ", no gain expected" * (percent(doubled["doubled"]) == percent(doubled["now"]))
        out.print(
            f"With twice the images of every class: about {percent(doubled['doubled'])} "
            f"({percent(doubled['low'])} to {percent(doubled['high'])}){same}.",
            highlight=False,
            soft_wrap=True,
        )
    elif measured["images"]:
        out.print("With five images or more of every class, this estimates what more would bring.", highlight=False)
    if not report["problems"]:
        out.print("Nothing to mend was found.")


@app.command(rich_help_panel=MODELS)
def suggest(
    model: Model,
    images: Annotated[
        list[str], typer.Argument(metavar="FOLDER", help="Folders, zips or files of photos without labels.")
    ],
    count: Annotated[int, typer.Option(min=1, help="How many photos to name.")] = SEVERAL,
    batch: Batch = 256,
    weights: Weights = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Pick the photos most worth labelling: those the model is unsure about, as different from each other as possible.

    As fast as `tpl predict`. Put the photos in class folders, then `tpl learn --update` them (or `tpl learn`, for new
    classes).

    Examples:

    `tpl suggest model inbox/`

    `tpl suggest model inbox/ --count 5 --json`
    """
    if not any(map(may_exist, images)):
        raise TplError(f"There is no file or folder {printable(listed(images))}: check the path.")
    from tpl.advice.suggest import suggested
    from tpl.console import work_progress
    from tpl.learner import Learner
    from tpl.stream import find_images

    learner = Learner.load(model, weights, device)
    with work_progress(err, as_json) as progress:
        progress.begin("looking", None)
        found = suggested(learner.method, find_images(images), count, batch, progress.advance)
    if not found.images:
        why = f": {found.unreadable[0]}" if found.unreadable else "."
        raise TplError(f"There are no readable images in {printable(', '.join(images))}{why}")
    if as_json:
        print_json({"model": str(model)} | found.to_dict())
        return
    for text in found.unreadable[:SHOWN]:
        warn(f"left out: {text}")
    table = Table("image", "why", box=None, header_style="bold")
    for row in found.rows:
        table.add_row(escape(printable(row.path)), escape(row.reason()))
    out.print(table)
    out.print(f"{len(found.rows)} of {found.images:,} images, the most useful first.", highlight=False)
