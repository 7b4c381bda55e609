"""The command that names images: predict."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from tpl.cli.app import Address, Device, Model, Weights, app, err, out, print_json
from tpl.cli.model_words import printable, round_up, warn
from tpl.cli.predict_forms import CsvForm, Form, JsonForm, TextForm
from tpl.errors import TplError

if TYPE_CHECKING:
    from tpl.bulk import Answered
    from tpl.cli.predict_file import AnswerFile
    from tpl.learner import Learner
    from tpl.stream import Found

ENGINES = ("local", "ray")


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
    engine: Annotated[str, typer.Option(help="Who answers: local, this process; ray, a cluster.")] = "local",
    address: Address = None,
    file: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.jsonl", help="Write JSON lines there; the same command again goes on."),
    ] = None,
) -> None:
    """Say what images show: class, probability, task, and how unknown they look.

    Every task looks at every image: with the compact encoder, a few hundred images a second and task on two cores,
    after some seconds to start. Folders are searched with all folders inside; any number of images takes the same
    memory. An image that cannot be read is a line of the output, not its end. Exit code 1 means that none could be.
    With --out, what the file holds already is not asked again; --engine ray divides the work among machines, and takes
    some 20 seconds more to start.

    Examples:

    `tpl predict model photo.jpg --top 3`

    `tpl predict model photos/ --json > answers.jsonl`

    `find . -name "*.jpg" -print0 | tpl predict model - --csv --reject 0.05`

    `tpl predict model archive/ --engine ray --address 10.0.0.1:6379 --out answers.jsonl`
    """
    if as_csv and as_json:
        raise TplError("Choose one of --csv and --json.")
    if as_csv and file:
        raise TplError("--out writes JSON lines; leave out --csv, or print to a file: --csv > answers.csv.")
    if engine not in ENGINES:
        raise TplError(f"There is no engine '{engine}'; there are {', '.join(ENGINES)}.")
    if address is not None and engine != "ray":
        raise TplError(f"--address is not for --engine {engine}; leave it out.")
    if reject is not None and not 0 < reject < 1:
        raise TplError(f"--reject takes a share between 0 and 1, such as 0.05; got {reject:g}.")
    from tpl.console import shares_stdout, work_progress
    from tpl.stream import find_images

    form = JsonForm(top, reject) if as_json or file else CsvForm(top, reject) if as_csv else TextForm(top, reject)
    ask = _asked(model, weights, device, engine, address, batch, form)
    found = find_images(images, _stdin())
    seen = failed = 0
    started = time.perf_counter()
    mixed = file is None and shares_stdout(err)  # progress between printed answers would tear both
    try:
        with work_progress(err, quiet=mixed) as progress, _kept(file, model, form) as kept:
            progress.begin("predicting", None)
            with closing(ask(kept.rest(found) if kept else found)) as answered:
                for part in answered:
                    _refuse_errors(part, strict)
                    text = "".join(form.lines(part, first=seen == 0))
                    kept.write(text) if kept else _write(text)
                    seen += len(part.names)
                    failed += sum(error is not None for error in part.errors)
                    progress.advance(len(part.names))
    except BrokenPipeError:  # whoever reads has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to be flushed at exit
        raise typer.Exit(0) from None
    earlier = kept.earlier if kept else 0
    seen, failed = seen + earlier, failed + (kept.failed if kept else 0)
    if not seen:
        raise TplError(f"There are no images in {printable(', '.join(images))}: name image files, folders or zips.")
    if file:
        _tell_of_file(file, seen, earlier, failed, time.perf_counter() - started, as_json)
    elif failed and not (as_json or as_csv):
        err.print(f"{failed} of {seen} images could not be read.", highlight=False)
    if failed == seen:
        raise typer.Exit(1)


def _asked(
    model: Path, weights: Path | None, device: str, engine: str, address: str | None, batch: int, form: Form
) -> Callable[[Iterator[Found]], Generator[Answered]]:
    """Who is asked for answers. What can be wrong with the model is told now."""
    from tpl.bulk import Readers, answer_here
    from tpl.learner import Learner
    from tpl.store import ModelStore

    if engine == "local" or form.reject is not None:
        learner = Learner.load(model, weights, device if engine == "local" else "cpu")
        _tell_if_too_few(learner, form.reject)
    if engine == "local":
        return lambda found: answer_here(learner, found, batch, form.top)
    ModelStore(model).header()
    readers = Readers(model, weights, device, form.top, address)
    return lambda found: readers.answer(found, batch)


@contextmanager
def _kept(file: Path | None, model: Path, form: Form) -> Iterator[AnswerFile | None]:
    """The file for answers, if one is wanted."""
    if file is None:
        yield None
        return
    from tpl.cli.predict_file import AnswerFile
    from tpl.files import sha256
    from tpl.store import ModelStore

    job = {"model": sha256(ModelStore(model).header_file), "top": form.top, "reject": form.reject}
    with AnswerFile(file, job).open() as kept:
        yield kept


def _tell_of_file(file: Path, seen: int, earlier: int, failed: int, seconds: float, as_json: bool) -> None:
    if as_json:
        counts = {"images": seen, "earlier": earlier, "unreadable": failed, "seconds": round(seconds, 2)}
        print_json({"out": str(file)} | counts)
        return
    before = f", {earlier} of them before" if earlier else ""
    unreadable = f"; {failed} could not be read" if failed else ""
    out.print(f"{seen} images{before}{unreadable}: [bold]{escape(str(file))}[/]", soft_wrap=True, highlight=False)


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


def _refuse_errors(part: Answered, strict: bool) -> None:
    problem = next(filter(None, part.errors), None)
    if strict and problem:
        raise TplError(f"{printable(problem)} (--strict was given.)")


def _write(text: str) -> None:
    """Print a batch at once, in UTF-8 whatever the terminal's language: file names may need it."""
    sys.stdout.write(text)
    sys.stdout.flush()
