"""The command that measures a model on labelled images: evaluate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from tpl.cli.app import MODELS, app, err, out, print_json
from tpl.cli.options import (
    OUTPUT,
    AsJson,
    Batch,
    Device,
    Download,
    Folder,
    Model,
    Strict,
    TestData,
    Weights,
    check_folder_of,
)
from tpl.cli.text import SHOWN, listed, percent, unknown_text, warn
from tpl.errors import TplError

if TYPE_CHECKING:
    from tpl.bench.paired import Paired
    from tpl.learner import Learner
    from tpl.stream import Labelled

SHARE = 0.05  # of known images that may be rejected as unknown
PICTURES = 60  # wrongly named images on the page of --report


@app.command(rich_help_panel=MODELS)
def evaluate(
    model: Model,
    place: Folder = None,
    data: TestData = None,
    download: Download = False,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="OLDER",
            help="Compare with an older version (a number of `tpl history`) or another model directory.",
        ),
    ] = None,
    fail_if_worse: Annotated[
        bool, typer.Option("--fail-if-worse", help="With --against: exit with 1 if the model is worse.")
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE.html",
            help="Also write a page with the wrongly named pictures, intervals and the calibration curve.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    strict: Strict = False,
    batch: Batch = 256,
    weights: Weights = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure a model on labelled images: accuracy in all and per class, and the confusions.

    As fast as `tpl predict`. Images of classes that the model does not know measure how well it detects unknown
    images. Of a folder with train/ and test/, the test/ part is used. With `--against`, a model that is worse than an
    older one says so; both are compared on images of classes that both know.

    Examples:

    `tpl evaluate model test-photos/`

    `tpl evaluate model --data digits --json`

    `tpl evaluate model test-photos/ --report page.html`

    `tpl evaluate model test-photos/ --against 3 --fail-if-worse`
    """
    from tpl.console import work_progress
    from tpl.learner import Learner
    from tpl.stream import labelled_images

    if fail_if_worse and against is None:
        raise TplError("--fail-if-worse compares with another model: name it with --against.")
    if page is not None:
        check_folder_of(page)
    given = labelled_images(place, data, download, testing=True)
    learner = Learner.load(model, weights, device)
    older = None if against is None else _older(model, against, weights, device)
    with work_progress(err, as_json) as progress:
        progress.begin("evaluating", len(given.images))
        seen = _predict(learner, given, batch, strict, progress.advance)
        if older is not None:
            progress.begin(f"evaluating {against}", len(given.images))
            before = _predict(older, given, batch, strict, progress.advance)
    if not seen.truth:
        raise TplError(f"None of the {len(given.images)} images in {given.origin} can be read: {seen.errors[0]}")
    report = {"model": str(model), "source": given.origin, **seen.report(learner), "skipped": list(given.skipped)}
    if older is not None:
        report["against"] = {"older": against, **_compared(seen, before, learner, older).to_dict()}
    if page is not None:
        _write_page(report, seen, given, learner, page)
        report["report"] = str(page)
    if as_json:
        print_json(report)
    else:
        for text in (*given.skipped, *seen.errors)[:SHOWN]:
            warn(f"left out: {text}")
        _print(report)
        if older is not None:
            print_against(report["against"])
        if page is not None:
            out.print(f"The page: [bold]{escape(str(page))}[/]", soft_wrap=True, highlight=False)
    if fail_if_worse and report["against"]["verdict"] == "worse":
        raise typer.Exit(1)


def _older(model: Path, against: str, weights: Path | None, device: str) -> Learner:
    """The model to compare with: an older version of `model`, or another directory."""
    from tpl.learner import Learner

    if against.isdecimal() and not Path(against).is_dir():
        return Learner.load(model, weights, device, version=int(against))
    if not Path(against).is_dir():
        raise TplError(f"--against takes the number of a version (`tpl history {model}`) or a model; got '{against}'.")
    return Learner.load(against, weights, device)


def compare(
    older: Learner, learner: Learner, given: Labelled, name: str, advance: Callable[[int], None], batch: int = 256
) -> dict[str, Any]:
    """How a model compares with an older one, called `name`, on labelled images; for `print_against` and JSON."""
    now, before = (_predict(each, given, batch, False, advance) for each in (learner, older))
    return {"older": name, **_compared(now, before, learner, older).to_dict()}


def _compared(now: Predictions, before: Predictions, learner: Learner, older: Learner) -> Paired:
    """Both models on images of classes that both know."""
    from tpl.bench.paired import Paired

    common = set(learner.classes_) & set(older.classes_)
    if not common:
        raise TplError("The two models have no class in common: there is nothing to compare.")
    rows = zip(now.truth, now.predicted, before.predicted, strict=True)
    kept = [row for row in rows if row[0] in common]
    return Paired.of(*([row[i] for row in kept] for i in range(3)))


@dataclass
class Predictions:
    """Every image's true class, predicted class and unknown score, and the errors of images that cannot be read.

    `rows` are the places of the readable images among all, `probability` is that of the predicted class.
    """

    truth: list[str] = field(default_factory=list)
    predicted: list[str] = field(default_factory=list)
    probability: list[float] = field(default_factory=list)
    unknown: list[float | None] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def report(self, learner: Learner) -> dict[str, Any]:
        """Accuracy, per class too, confusions, and how well unknown images are detected."""
        from tpl.answers import Measured

        known = set(learner.classes_)
        pairs = [(t, p) for t, p in zip(self.truth, self.predicted, strict=True) if t in known]
        confusion = {name: Counter(p for t, p in pairs if t == name) for name in learner.classes_}
        by_class = {
            name: {"images": row.total(), "right": row[name], "accuracy": row[name] / row.total()}
            for name, row in confusion.items()
            if row
        }
        right = sum(t == p for t, p in pairs)
        wrong = Counter(pair for pair in pairs if pair[0] != pair[1])
        return {
            "images": len(pairs),
            "right": right,
            "accuracy": right / len(pairs) if pairs else None,
            "interval": Measured(right, len(pairs)).interval if pairs else None,
            "classes": by_class,
            "confused": [{"true": t, "predicted": p, "count": n} for (t, p), n in wrong.most_common()],
            "confusion": {name: dict(row.most_common()) for name, row in confusion.items() if row},
            "unknown": self._unknown(learner, known),
            "unreadable": self.errors,
        }

    def _unknown(self, learner: Learner, known: set[str]) -> dict[str, Any]:
        import numpy as np

        from tpl.answers import ROUNDING
        from tpl.bench.metrics import auroc

        scores = np.array(self.unknown, dtype=float)  # NaN without an unknown score
        outside = np.array([name not in known for name in self.truth])
        floor = learner.rejection_floor() if learner.method.has_unknown_score else None
        able = floor is not None and floor < 1  # otherwise there is no score, or one that is always 0

        def rejected(part: Any) -> dict[str, Any] | None:
            if floor is None or floor > SHARE + ROUNDING or not len(part):
                return None
            return _share(int((part >= 1 - SHARE - ROUNDING).sum()), len(part))

        parts = {"known": rejected(scores[~outside]), "unknown": rejected(scores[outside])}
        return {
            "images": int(outside.sum()),
            "classes": sorted({name for name in self.truth if name not in known}),
            "auroc": auroc(scores[outside], scores[~outside]) if able and outside.any() and not outside.all() else None,
            "reject": SHARE,
            "smallest_reject": floor,
            **{f"{name}_rejected": None if part is None else part["share"] for name, part in parts.items()},
            "rejected": parts,
        }


def _share(count: int, images: int) -> dict[str, Any]:
    """Some of the images as a share, with a 95 % interval."""
    from tpl.answers import Measured

    return {"count": count, "images": images, "share": count / images, "interval": Measured(count, images).interval}


def _predict(learner: Learner, given: Labelled, size: int, strict: bool, advance: Any) -> Predictions:
    from tpl.stream import batches_of

    seen, first = Predictions(), 0
    with closing(batches_of(given.images, learner.method.preprocess, size)) as ready:
        for part in ready:
            problems = [error for error in part.errors if error is not None]
            if strict and problems:
                raise TplError(f"{problems[0]} (--strict was given.)")
            seen.errors += problems
            answers = learner.answers_of(part.pixels, top=1) if len(part.pixels) else []
            labels = [int(label) for label, error in zip(part.labels, part.errors, strict=True) if error is None]
            seen.truth += [given.class_names[label] for label in labels]
            seen.predicted += [answer.name for answer in answers]
            seen.probability += [answer.probability for answer in answers]
            seen.rows += [first + i for i, error in enumerate(part.errors) if error is None]
            first += len(part.names)
            seen.unknown += [answer.unknown for answer in answers]
            advance(len(part.names))
    return seen


def _write_page(report: dict[str, Any], seen: Predictions, given: Labelled, learner: Learner, page: Path) -> None:
    """Write the page about the images of known classes, with the surest of the wrong names."""
    from tpl.report.evaluation import Wrong, small_picture, write_evaluation

    known = set(learner.classes_)
    rows = [i for i, name in enumerate(seen.truth) if name in known]
    right = [seen.truth[i] == seen.predicted[i] for i in rows]
    wrong = sorted((i for i, good in zip(rows, right, strict=True) if not good), key=lambda i: -seen.probability[i])
    pictures = [
        Wrong(
            given.images.name(seen.rows[i]),
            seen.truth[i],
            seen.predicted[i],
            seen.probability[i],
            small_picture(given.images.load(seen.rows[i])),
        )
        for i in wrong[:PICTURES]
    ]
    write_evaluation(report, [seen.probability[i] for i in rows], right, pictures, page)


def _print(report: dict[str, Any]) -> None:
    if report["accuracy"] is not None:
        table = Table("class", box=None, header_style="bold")
        for column in ("images", "right", "accuracy"):
            table.add_column(column, justify="right")
        table.add_column("confused with")
        for name, row in report["classes"].items():
            others = [f"{p} {n}" for p, n in report["confusion"][name].items() if p != name]
            numbers = str(row["images"]), str(row["right"]), percent(row["accuracy"])
            table.add_row(escape(name), *numbers, escape(listed(others, 5)))
        out.print(table)
        counts = _counts(report["right"], report["images"], report["interval"], " images")
        out.print(f"Accuracy: [bold]{percent(report['accuracy'])}[/], {counts}.", highlight=False)
    _print_unknown(report["unknown"])
    if report["unreadable"]:
        out.print(f"Left out: {len(report['unreadable'])} images that cannot be read.", highlight=False)


def _print_unknown(unknown: dict[str, Any]) -> None:
    if unknown["images"]:
        classes = escape(listed(unknown["classes"]))
        text = f"Unknown: {unknown['images']} images of classes that the model was not taught ({classes})."
        if unknown["auroc"] is not None:
            text += f" AUROC of the unknown score: [bold]{percent(unknown['auroc'])}[/]."
        out.print(text, highlight=False, soft_wrap=True)
    rates = [
        f"{percent(part['share'])} of the {words}, {_counts(part['count'], part['images'], part['interval'])}"
        for key, words in (("known", "known images"), ("unknown", "unknown ones"))
        if (part := unknown["rejected"][key]) is not None
    ]
    if rates:
        out.print(f"Rejected at --reject {SHARE:g}: {'; '.join(rates)}.", highlight=False, soft_wrap=True)
    elif unknown["images"]:
        words = unknown_text(unknown["smallest_reject"])
        out.print(f"Unknown images {words}.", highlight=False, soft_wrap=True)


def _counts(some: int, images: int, interval: Sequence[float], what: str = "") -> str:
    """Counts with the interval of the share, e.g. 19 of 20 (76 to 99 %)."""
    low, high = (f"{100 * side:.0f}" for side in interval)
    return f"{some:,} of {images:,}{what} ({low} to {high} %)"


def print_against(found: dict[str, Any]) -> None:
    """Say whether the model is better or worse than the older one."""
    words = {
        "better": "[bold green]Better[/] than",
        "worse": "[bold red]Worse[/] than",
        "perhaps better": "Perhaps better than",
        "perhaps worse": "[yellow]Perhaps worse[/] than",
        "equal": "As good as",
    }
    text = (
        f"{words[found['verdict']]} {escape(found['older'])}: {found['right']} of {found['images']} images are right, "
        f"{found['right_before']} were; {found['gained']} gained, {found['lost']} lost."
    )
    if found["verdict"].startswith("perhaps"):
        text += f" Such a difference may be chance (p = {found['chance']:.2g})."
    out.print(text, highlight=False, soft_wrap=True)
    if found["lost"]:
        lost = [f"{name} {count}" for name, count in found["lost_classes"].items()]
        out.print(f"Lost: {escape(listed(lost))}.", highlight=False, soft_wrap=True)
