"""The command that names images: predict."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpl.cli.app import Device, Model, Weights, app, err
from tpl.cli.model_words import percent, printable, round_up, warn
from tpl.errors import TplError

if TYPE_CHECKING:
    from tpl.answers import Answer
    from tpl.learner import Learner
    from tpl.stream import Batch

UNKNOWN = "unknown"


@app.command()
def predict(
    model: Model,
    images: Annotated[
        list[str], typer.Argument(metavar="IMAGE...", help="Image files, folders, zips; - reads paths from stdin.")
    ],
    top: Annotated[int | None, typer.Option(min=1, help="Show this many classes of each image.")] = None,
    reject: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Call an image unknown, at the cost of this share of known ones."),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a line of column names.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line and nothing else.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first image that cannot be read.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Images seen at a time; memory grows with it.")] = 256,
    weights: Weights = None,
    device: Device = "auto",
) -> None:
    """Say what images show: class, probability, task, and how unknown they look.

    Every task looks at every image: with the compact encoder, a few hundred images a second and task on two cores,
    after some seconds to start. Folders are searched with all folders inside; any number of images takes the same
    memory. An image that cannot be read is a line of the output, not its end. Exit code 1 means that none could be.

    Examples:

    `tpl predict model photo.jpg --top 3`

    `tpl predict model photos/ --json > answers.jsonl`

    `find . -name "*.jpg" -print0 | tpl predict model - --csv --reject 0.05`
    """
    if as_csv and as_json:
        raise TplError("Choose one of --csv and --json.")
    if reject is not None and not 0 < reject < 1:
        raise TplError(f"--reject takes a share between 0 and 1, such as 0.05; got {reject:g}.")
    from tpl.console import WorkProgress
    from tpl.learner import Learner
    from tpl.stream import batches, find_images

    learner = Learner.load(model, weights, device)
    _tell_if_too_few(learner, reject)
    form = _Json(top, reject) if as_json else _Csv(top, reject) if as_csv else _Text(top, reject)
    found = find_images(images, _stdin())
    seen = failed = 0
    watched = err.is_terminal and not sys.stdout.isatty()  # a bar between printed lines would tear both
    try:
        with WorkProgress(err, quiet=not watched) as progress:
            progress.begin("predicting", None)
            with closing(batches(found, learner.method.preprocess, batch)) as ready:
                for part in ready:
                    _refuse_errors(part, strict)
                    answers = iter(learner.answers_of(part.pixels, form.top) if len(part.pixels) else [])
                    _write(form.lines(part, answers, first=seen == 0))
                    seen += len(part.names)
                    failed += sum(error is not None for error in part.errors)
                    progress.advance(len(part.names))
    except BrokenPipeError:  # whoever reads has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to be flushed at exit
        raise typer.Exit(0) from None
    if not seen:
        raise TplError(f"There are no images in {printable(', '.join(images))}: name image files, folders or zips.")
    if failed and not (as_json or as_csv):
        err.print(f"{failed} of {seen} images could not be read.", highlight=False)
    if failed == seen:
        raise typer.Exit(1)


def _stdin() -> Any:
    # Unbuffered: the thread that waits for paths must hold no lock that the program's end needs.
    buffer = sys.stdin.buffer
    return getattr(buffer, "raw", buffer)


def _tell_if_too_few(learner: Learner, reject: float | None) -> None:
    from tpl.answers import ROUNDING

    floor = learner.rejection_floor()
    if reject is None or reject >= floor - ROUNDING:
        return
    fewest = min(learner.tasks_, key=lambda task: task.held_out)
    needed = math.ceil(1 / reject - 1 - ROUNDING)
    use = f"; --reject {round_up(floor):g} is the least that can" if floor < 1 else ""
    warn(
        f"--reject {reject:g} cannot reject anything: it takes {needed} held-out images in every task, and "
        f"'{fewest.name}' has {fewest.held_out}{use}. `tpl learn --update` adds images."
    )


def _refuse_errors(batch: Batch, strict: bool) -> None:
    problem = next(filter(None, batch.errors), None)
    if strict and problem:
        raise TplError(f"{printable(problem)} (--strict was given.)")


def _write(text: Iterator[str]) -> None:
    """Print a batch at once, in UTF-8 whatever the terminal's language: file names may need it."""
    sys.stdout.write("".join(text))
    sys.stdout.flush()


class _Form:
    """How answers are printed; `top` is how many classes of each image are asked for."""

    usual_top = 1

    def __init__(self, top: int | None, reject: float | None) -> None:
        self.top, self.reject = top or self.usual_top, reject

    def lines(self, batch: Batch, answers: Iterator[Answer], first: bool) -> Iterator[str]:
        """A line for every image of a batch."""
        for name, error in zip(batch.names, batch.errors, strict=True):
            yield self.error(name, error) if error is not None else self.answer(name, next(answers))

    def answer(self, name: str, answer: Answer) -> str:
        raise NotImplementedError

    def error(self, name: str, error: str) -> str:
        raise NotImplementedError

    def rejected(self, answer: Answer) -> bool:
        return self.reject is not None and answer.rejected(self.reject)


class _Text(_Form):
    """For people."""

    def answer(self, name: str, answer: Answer) -> str:
        best = f"{answer.name} {percent(answer.probability)}"
        if self.rejected(answer):
            said = f"{UNKNOWN} ({answer.unknown:.2f}); of the known classes {best}, task {answer.task}"
        else:
            said = f"{best}, task {answer.task}, unknown {answer.unknown:.2f}"
        others = ", ".join(f"{other} {percent(p)}" for other, p in answer.top[1:])
        return printable(f"{name}: {said}{'; then ' if others else ''}{others}") + "\n"

    def error(self, name: str, error: str) -> str:
        return printable(f"error: {error}") + "\n"  # which names the image


class _Json(_Form):
    """For programs: one object a line."""

    usual_top = 5

    def answer(self, name: str, answer: Answer) -> str:
        rejected = self.rejected(answer)
        content = {"path": name} | answer.to_dict()
        if self.reject is not None:
            content |= {"class": None if rejected else answer.name, "rejected": rejected}
        return _object(content)

    def error(self, name: str, error: str) -> str:
        return _object({"path": name, "error": error})


class _Csv(_Form):
    """For spreadsheets."""

    def lines(self, batch: Batch, answers: Iterator[Answer], first: bool) -> Iterator[str]:
        more = [f"{column}_{rank}" for rank in range(2, self.top + 1) for column in ("class", "probability")]
        if first:
            yield self._row("path", "class", "probability", "task", "unknown", "rejected", "error", *more)
        yield from super().lines(batch, answers, first)

    def answer(self, name: str, answer: Answer) -> str:
        rejected = self.rejected(answer)
        mark = "" if self.reject is None else str(rejected).lower()
        chosen = UNKNOWN if rejected else answer.name
        more = [cell for other, p in answer.top[1:] for cell in (other, f"{p:.6f}")]
        return self._row(
            name, chosen, f"{answer.probability:.6f}", answer.task, f"{answer.unknown:.6f}", mark, "", *more
        )

    def error(self, name: str, error: str) -> str:
        return self._row(name, "", "", "", "", "", error)

    def _row(self, *cells: str) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow([_encodable(cell) for cell in cells])
        return text.getvalue()


def _object(content: dict[str, Any]) -> str:
    text = json.dumps(content, ensure_ascii=False)
    if _encodable(text) != text:  # a file name that is no UTF-8: as \udcXX, it is the same name when read back
        text = json.dumps(content)
    return text + "\n"


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
