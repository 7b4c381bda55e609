"""The command that predicts classes of images: predict. Also its output formats and the file that --out writes."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer
from rich.markup import escape

from tpl.cli.app import MODELS, app, err, importing, out, print_json
from tpl.cli.options import ADVANCED, OUTPUT, Address, Batch, Device, Model, Strict, Weights, check_folder_of, may_exist
from tpl.cli.text import percent, round_up, warn
from tpl.errors import TplError
from tpl.files import at_home
from tpl.lines import printable

if TYPE_CHECKING:
    from tpl.answers import Answer
    from tpl.bulk import Answered
    from tpl.learner import Learner
    from tpl.stream import Found

ENGINES = ("local", "ray")
UNKNOWN = "unknown"


@app.command(rich_help_panel=MODELS)
def predict(
    model: Model,
    images: Annotated[
        list[str], typer.Argument(metavar="IMAGE", help="Image files, folders or zips; - reads paths from stdin.")
    ],
    top: Annotated[int | None, typer.Option(min=1, help="Show this many classes for each image.")] = None,
    reject: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Call images unknown whose unknown score only this share of known images reaches, e.g. 0.05.",
        ),
    ] = None,
    strict: Strict = False,
    as_csv: Annotated[
        bool,
        typer.Option(
            "--csv",
            help="Print CSV with column names in the first line; `nearest` is the most probable class, of images that "
            "are called unknown, too.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object per line and nothing else.", rich_help_panel=OUTPUT),
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE.jsonl",
            help="Write JSON lines there; the same command again continues the file.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="Where predictions are computed: local (this process) or ray (a cluster).", rich_help_panel=ADVANCED
        ),
    ] = "local",
    address: Address = None,
    batch: Batch = 256,
    weights: Weights = None,
    device: Device = "auto",
) -> None:
    """Predict the class of images, with probability, task, and a score of how unknown they look.

    Every task's model sees every image: with the compact encoder, a few hundred images per second and task on two
    cores, after some seconds to start. Folders are searched with all their subfolders; memory use does not grow with
    the number of images. An image that cannot be read becomes an error line of the output; exit code 1 means that none
    could be read. With --out, images that are already in the file are skipped; --engine ray divides the work among
    machines, and takes some 20 seconds more to start.

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
    form = JsonFormat(top, reject) if as_json or file else CsvFormat(top, reject) if as_csv else TextFormat(top, reject)
    if file is not None:
        check_folder_of(file)
    elif not any(map(may_exist, images)):
        _print_absent(model, images, form, strict)
        raise typer.Exit(1)
    from tpl.console import shares_stdout, work_progress
    from tpl.stream import find_images

    answer = _answering(model, weights, device, engine, address, batch, form)
    found = find_images(images, _stdin())
    seen = failed = 0
    started = time.perf_counter()
    mixed = file is None and shares_stdout(err)  # progress lines would come between the answers
    try:
        with work_progress(err, quiet=mixed) as progress, _answer_file(file, model, form) as kept:
            progress.begin("predicting", None)
            with closing(answer(kept.rest(found) if kept else found)) as answered:
                for part in answered:
                    _refuse_errors(part.errors, strict)
                    text = "".join(form.lines(part, first=seen == 0))
                    kept.write(text) if kept else _write(text)
                    seen += len(part.names)
                    failed += sum(error is not None for error in part.errors)
                    progress.advance(len(part.names))
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit does not fail
        raise typer.Exit(0) from None
    earlier = kept.earlier if kept else 0
    seen, failed = seen + earlier, failed + (kept.failed if kept else 0)
    if not seen:
        raise TplError(f"There are no images in {printable(', '.join(images))}: name image files, folders or zips.")
    if file:
        _print_file(file, seen, earlier, failed, time.perf_counter() - started, as_json)
    elif isinstance(form, TextFormat):
        _print_failed(failed, seen)
    if failed == seen:
        raise typer.Exit(1)


def _print_absent(model: Path, images: list[str], form: Format, strict: bool) -> None:
    """Say that none of the given paths exists: the output is the usual one, without the time to load the model."""
    from tpl.store import ModelStore

    ModelStore(model).header()
    paths = [str(at_home(name)) for name in images]
    errors = [f"{path} does not exist: check the path." for path in paths]
    _refuse_errors(errors, strict)
    _write("".join(form.error_lines(paths, errors)))
    if isinstance(form, TextFormat):
        _print_failed(len(images), len(images))


def _print_failed(failed: int, seen: int) -> None:
    if failed:
        err.print(f"{failed:,} of {seen:,} images could not be read.", highlight=False)


def _answering(
    model: Path, weights: Path | None, device: str, engine: str, address: str | None, batch: int, form: Format
) -> Callable[[Iterator[Found]], Generator[Answered]]:
    """The function that answers found images, here or on a cluster; a model that cannot be loaded is an error now."""
    with importing():
        from tpl.bulk import WorkerPool, answer_here
        from tpl.learner import Learner
        from tpl.store import ModelStore

    if engine == "local" or form.reject is not None:
        learner = Learner.load(model, weights, device if engine == "local" else "cpu")
        _warn_of_small_share(learner, form.reject)
    if engine == "local":
        return lambda found: answer_here(learner, found, batch, form.top)
    ModelStore(model).header()
    pool = WorkerPool(model, weights, device, form.top, address)
    return lambda found: pool.answer(found, batch)


@contextmanager
def _answer_file(file: Path | None, model: Path, form: Format) -> Iterator[AnswerFile | None]:
    """The file that --out names, open for writing; None without --out."""
    if file is None:
        yield None
        return
    from tpl.files import sha256_of
    from tpl.store import ModelStore

    job = {"model": sha256_of(ModelStore(model).header_file), "top": form.top, "reject": form.reject}
    with AnswerFile(file, job).open() as kept:
        yield kept


def _print_file(file: Path, seen: int, earlier: int, failed: int, seconds: float, as_json: bool) -> None:
    if as_json:
        counts = {"images": seen, "earlier": earlier, "unreadable": failed, "seconds": round(seconds, 2)}
        print_json({"out": str(file)} | counts)
        return
    before = f", {earlier:,} of them before" if earlier else ""
    unreadable = f"; {failed:,} could not be read" if failed else ""
    out.print(f"{seen:,} images{before}{unreadable}: [bold]{escape(str(file))}[/]", soft_wrap=True, highlight=False)


def _stdin() -> Any:
    # Unbuffered: a thread that waits for paths must not hold a lock that the interpreter needs at exit.
    buffer = sys.stdin.buffer
    return getattr(buffer, "raw", buffer)


def _warn_of_small_share(learner: Learner, reject: float | None) -> None:
    from tpl.answers import ROUNDING

    if reject is None:
        return
    learner.method.check_unknown_score()
    floor = learner.rejection_floor()
    if reject >= floor - ROUNDING:
        return
    if learner.method.left_out() is not None and floor >= 1:
        warn(
            f"--reject {reject:g} cannot reject anything: no class has two images, of which one could be left out and "
            "compared with the other. `tpl learn --update` adds images."
        )
        return
    if learner.method.left_out() is not None:
        warn(
            f"--reject {reject:g} rests on extrapolation: about that share of known images is rejected from "
            f"{round_up(floor):g} on, one in all images learned plus one. `tpl learn --update` adds images."
        )
        return
    fewest = min(learner.tasks_, key=lambda task: task.held_out)
    needed = math.ceil(1 / reject - 1 - ROUNDING)
    use = f"; --reject {round_up(floor):g} is the least that can" if floor < 1 else ""
    warn(
        f"--reject {reject:g} cannot reject anything: it takes {needed} held-out images in every task, and "
        f"'{fewest.name}' has {fewest.held_out}{use}. `tpl learn --update` adds images."
    )


def _refuse_errors(errors: Sequence[str | None], strict: bool) -> None:
    problem = next(filter(None, errors), None)
    if strict and problem:
        raise TplError(f"{printable(problem)} (--strict was given.)")


def _write(text: str) -> None:
    """Print the lines of a batch at once; on a terminal without what it would take for a command."""
    sys.stdout.write("\n".join(map(printable, text.split("\n"))) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class Format:
    """How answers are printed, with the `top` most probable classes of each image."""

    usual_top = 1

    def __init__(self, top: int | None, reject: float | None) -> None:
        self.top, self.reject = top or self.usual_top, reject

    def lines(self, part: Answered, first: bool) -> Iterator[str]:
        """One line for every image of a batch; `first`: nothing was printed before."""
        answers = iter(part.answers)
        for name, error in zip(part.names, part.errors, strict=True):
            yield self._error(name, error) if error is not None else self._answer(name, next(answers))

    def error_lines(self, names: Sequence[str], errors: Sequence[str]) -> Iterator[str]:
        """The whole output if no image can be read."""
        return map(self._error, names, errors)

    def _answer(self, name: str, answer: Answer) -> str:
        raise NotImplementedError

    def _error(self, name: str, error: str) -> str:
        raise NotImplementedError

    def _rejected(self, answer: Answer) -> bool:
        return self.reject is not None and answer.rejected(self.reject)


class TextFormat(Format):
    """Sentences for people."""

    def _answer(self, name: str, answer: Answer) -> str:
        best = f"{answer.name} {percent(answer.probability)}"
        if self._rejected(answer):
            said = f"{UNKNOWN} ({answer.unknown:.2f}); of the known classes {best}, task {answer.task}"
        else:
            unknown = "" if answer.unknown is None else f", unknown {answer.unknown:.2f}"
            said = f"{best}, task {answer.task}{unknown}"
        others = ", ".join(f"{other} {percent(p)}" for other, p in answer.top[1:])
        return printable(f"{name}: {said}{'; then ' if others else ''}{others}") + "\n"

    def _error(self, name: str, error: str) -> str:
        return printable(f"error: {error}") + "\n"  # which names the image


class JsonFormat(Format):
    """One JSON object per line."""

    usual_top = 5

    def _answer(self, name: str, answer: Answer) -> str:
        rejected = self._rejected(answer)
        content = {"path": name} | answer.to_dict()
        if self.reject is not None:
            content |= {"class": None if rejected else answer.name, "rejected": rejected}
        return _object(content)

    def _error(self, name: str, error: str) -> str:
        return _object({"path": name, "error": error})


class CsvFormat(Format):
    """A table in CSV; probability and task are those of the `nearest` class, which is the class unless rejected."""

    columns = ("path", "class", "nearest", "probability", "task", "unknown", "rejected", "error")

    def lines(self, part: Answered, first: bool) -> Iterator[str]:
        """One line for every image of a batch, after a line of column names."""
        if first:
            yield self._head()
        yield from super().lines(part, first)

    def error_lines(self, names: Sequence[str], errors: Sequence[str]) -> Iterator[str]:
        """The column names and a line for every error."""
        yield self._head()
        yield from super().error_lines(names, errors)

    def _head(self) -> str:
        more = [f"{column}_{rank}" for rank in range(2, self.top + 1) for column in ("class", "probability")]
        return self._row(*self.columns, *more)

    def _answer(self, name: str, answer: Answer) -> str:
        rejected = self._rejected(answer)
        mark = "" if self.reject is None else str(rejected).lower()
        chosen = UNKNOWN if rejected else answer.name
        unknown = "" if answer.unknown is None else f"{answer.unknown:.6f}"
        more = [cell for other, p in answer.top[1:] for cell in (other, f"{p:.6f}")]
        return self._row(name, chosen, answer.name, f"{answer.probability:.6f}", answer.task, unknown, mark, "", *more)

    def _error(self, name: str, error: str) -> str:
        return self._row(name, *[""] * (len(self.columns) - 2), error)

    def _row(self, *cells: str) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow([_encodable(cell) for cell in cells])
        return text.getvalue()


def _object(content: dict[str, Any]) -> str:
    text = json.dumps(content, ensure_ascii=False)
    if _encodable(text) != text:  # a file name that is not UTF-8: as \udcXX, it reads back as the same name
        text = json.dumps(content)
    return text + "\n"


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


class AnswerFile:
    """The file that --out names; a second call continues after its last line.

    FILE            one JSON object per line, in the order of the images
    FILE.job.json   the model and options it was made with: a call with others is refused

    `earlier` counts the lines of previous calls, `failed` the errors among them.
    """

    def __init__(self, path: Path, job: dict[str, Any]) -> None:
        self.path, self.job = path, job
        self.job_file = path.with_name(path.name + ".job.json")
        self.earlier = self.failed = 0
        self.stream: BinaryIO

    @contextmanager
    def open(self) -> Iterator[AnswerFile]:
        """Open and lock the file for writing; a second writer is refused."""
        from filelock import FileLock, Timeout

        file = self.path.with_name(self.path.name + ".lock")
        try:
            with FileLock(file, timeout=0):
                self._check()
                with self.path.open("ab+") as self.stream:
                    yield self
                file.unlink(missing_ok=True)
        except Timeout:
            raise TplError(f"{self.path} is being written by another process; wait for it to finish.") from None
        except OSError as error:
            raise TplError(f"{self.path} cannot be written: {error}.") from error

    def _check(self) -> None:
        if not self.path.exists() or not self.path.stat().st_size:
            self.job_file.write_text(json.dumps(self.job, indent=2) + "\n", encoding="utf-8")
            return
        other = f"choose another --out, or remove {self.path}."
        try:
            before = json.loads(self.job_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise TplError(f"{self.path} is there, and nothing says what it was made with; {other}") from None
        differing = [name for name in self.job if before.get(name) != self.job[name]]
        if differing:
            raise TplError(f"{self.path} was made with another {', '.join(differing)}; {other}")

    def rest(self, found: Iterator[Found]) -> Iterator[Found]:
        """The images that have no line yet; those before them must be the ones in the file, in the same order."""
        self.stream.seek(0)
        end = 0
        for number, line in enumerate(self.stream, start=1):
            if not line.endswith(b"\n"):
                break  # cut off in the middle: written again
            item = next(found, None)
            try:
                content = json.loads(line)
                path = content["path"]
            except (ValueError, KeyError, TypeError):
                path = None
            if item is None or path != item.name:
                raise TplError(
                    f"{self.path} was made from other images: line {number} is of {path}, and now that one would be "
                    f"{item.name if item else 'too many'}; choose another --out, or remove {self.path}."
                )
            end += len(line)
            self.earlier, self.failed = number, self.failed + ("error" in content)
        self.stream.truncate(end)
        yield from found

    def write(self, text: str) -> None:
        """Append lines."""
        self.stream.write(text.encode("utf-8"))
        self.stream.flush()
