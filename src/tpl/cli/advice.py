"""Commands that help to better images: check, suggest."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from tpl.cli.app import MODELS, app, err, out, print_json
from tpl.cli.options import AsJson, Batch, Device, Encoder, Folder, Model, Weights
from tpl.cli.text import SHOWN, listed, percent, warn
from tpl.errors import TplError
from tpl.lines import printable

if TYPE_CHECKING:
    from tpl.advice.check import Reference
    from tpl.advice.features import FeatureReader
    from tpl.learner import Learner

SEVERAL = 20  # images that `suggest` names


@app.command(rich_help_panel=MODELS)
def check(
    place: Folder = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Compare with the classes of this model, too, by the images it stores; with its encoder."),
    ] = None,
    encoder: Encoder = None,
    batch: Batch = 256,
    weights: Weights = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Check photos before learning them: bad files, equal pictures, likely wrong labels, classes that look alike.

    Every photo is compared with all others by the encoder's features; nothing is trained or changed. As fast as reading
    the photos: about 10 seconds for 500 of them on two cores. Also says how many photos are recognised by the others,
    and about how many would be with twice as many photos.

    Examples:

    `tpl check photos/`

    `tpl check tomorrow.zip --model model --json`
    """
    from tpl.advice.check import check as checked
    from tpl.console import work_progress
    from tpl.stream import labelled_images

    given = labelled_images(place)
    reader, reference = _reader(model, encoder, weights, device)
    with work_progress(err, as_json) as progress:
        progress.begin("checking", len(given.images))
        found = checked(given, place, reader, reference, batch, progress.advance)
    report = {"source": given.origin, "encoder": reader.encoder.name, **found.to_dict()}
    if as_json:
        print_json(report)
    else:
        _print(report)


def _reader(
    model: Path | None, encoder: str | None, weights: Path | None, device: str
) -> tuple[FeatureReader, Reference | None]:
    """What computes features, and the images that a model stores."""
    from tpl.advice.check import Reference
    from tpl.advice.features import FeatureReader
    from tpl.engine import choose_compute
    from tpl.nets import create_encoder
    from tpl.nets.compact import NAME as COMPACT

    if model is None:
        return FeatureReader(create_encoder(encoder or COMPACT, weights), choose_compute(device, "auto", "auto")), None
    if encoder is not None:
        raise TplError("--model has its own encoder: leave out --encoder.")
    import torch

    from tpl.learner import Learner

    method = Learner.load(model, weights, device).method
    reader = FeatureReader(method.encoder, method.compute)
    stored, labels = torch.zeros(0, method.encoder.dim, dtype=torch.float64), torch.zeros(0, dtype=torch.long)
    if method.memory is not None and len(method.memory):
        stored, labels = reader.features(method.memory.pixels(method.preprocess)).double().cpu(), method.memory.labels
    else:
        warn(f"{model} stores no images: its classes are compared by name alone.")
    return reader, Reference(stored, labels, method.classes_)


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
            f"Recognised by all other images: {measured['right']} of {measured['images']} "
            f"({percent(measured['low'])} to {percent(measured['high'])}, {report['encoder']}, nothing trained).",
            highlight=False,
            soft_wrap=True,
        )
        if weak:
            out.print(f"Fewest: {escape(listed(weak, 5))}.", highlight=False, soft_wrap=True)
    if doubled is not None:
        out.print(
            f"With twice the images of every class: about {percent(doubled['doubled'])} "
            f"({percent(doubled['low'])} to {percent(doubled['high'])}).",
            highlight=False,
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
    from tpl.console import work_progress
    from tpl.learner import Learner

    learner = Learner.load(model, weights, device)
    with work_progress(err, as_json) as progress:
        progress.begin("looking", None)
        suggested, seen, errors = _suggested(learner, images, count, batch, progress.advance)
    if not seen:
        why = f": {errors[0]}" if errors else "."
        raise TplError(f"There are no readable images in {printable(', '.join(images))}{why}")
    if as_json:
        print_json({"model": str(model), "images": seen, "suggested": suggested, "unreadable": errors})
        return
    for text in errors[:SHOWN]:
        warn(f"left out: {text}")
    table = Table("image", "why", box=None, header_style="bold")
    for row in suggested:
        table.add_row(escape(printable(row["path"])), escape(_reason(row)))
    out.print(table)
    out.print(f"{len(suggested)} of {seen} images, the most useful first.", highlight=False)


def _suggested(
    learner: Learner, images: list[str], count: int, batch: int, advance: Any
) -> tuple[list[dict[str, Any]], int, list[str]]:
    """The images to label, how many were seen, and why others could not be read."""
    import torch

    from tpl.advice.features import centred
    from tpl.advice.suggest import most_useful, uncertainty
    from tpl.answers import DIGITS
    from tpl.methods.base import UNKNOWN
    from tpl.stream import batches, find_images

    method, names = learner.method, learner.classes_
    paths: list[str] = []
    errors: list[str] = []
    probabilities, unknown, features = [], [], []
    with closing(batches(find_images(images), method.preprocess, batch)) as ready:
        for part in ready:
            paths += [name for name, error in zip(part.names, part.errors, strict=True) if error is None]
            errors += [error for error in part.errors if error is not None]
            if len(part.pixels):
                answer = method.answer(part.pixels, {UNKNOWN})
                probabilities.append(answer.log_p.exp().cpu())
                unknown.append(torch.zeros(len(part.pixels)) if answer.unknown is None else answer.unknown.cpu())
                own = method.encoder_features(part.pixels) if method.encoder.pretrained else answer.log_p.exp()
                features.append(own.double().cpu())
            advance(len(part.names))
    if not paths:
        return [], 0, errors
    p, u = torch.cat(probabilities), torch.cat(unknown)
    unsure = uncertainty(p, u)
    top = p.topk(min(2, len(names)), dim=1)
    rows = most_useful(unsure, centred(torch.cat(features)), count)
    suggested = [
        {
            "path": paths[i],
            "top": [
                {"class": names[c], "probability": round(q, DIGITS)}
                for c, q in zip(top.indices[i].tolist(), top.values[i].tolist(), strict=True)
            ],
            "unknown": round(float(u[i]), DIGITS),
            "unsure": round(float(unsure[i]), DIGITS),
        }
        for i in rows
    ]
    return suggested, len(paths), errors


def _reason(row: dict[str, Any]) -> str:
    """Why an image is worth a label, in words."""
    first, *rest = row["top"]
    best = f"{first['class']} {percent(first['probability'])}"
    if rest and row["unsure"] <= 1 - (first["probability"] - rest[0]["probability"]) + 1e-6:
        return f"{best} or {rest[0]['class']} {percent(rest[0]['probability'])}"
    return f"{best}, but it looks like none of the classes (unknown {row['unknown']:.2f})"
