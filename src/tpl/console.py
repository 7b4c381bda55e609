"""Progress on stderr: bars with the time left on a terminal, plain lines elsewhere, and warnings."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from tpl.lines import ProgressLines, pace

if TYPE_CHECKING:
    from tpl.engine import Event, RunLabel


def draws(console: Console) -> bool:
    """Whether progress bars can be drawn on a console; where they cannot, progress is printed in lines.

    FORCE_COLOR makes rich treat any file as a terminal: colours do no harm there, but bars would fill it with escapes.
    """
    return console.is_terminal and console.file.isatty() and not console.is_dumb_terminal


def shares_stdout(console: Console) -> bool:
    """Whether a console writes to the same terminal or file as standard output."""
    try:
        if console.file.isatty() and sys.stdout.isatty():
            return True
        return os.path.sameopenfile(sys.stdout.fileno(), console.file.fileno())
    except (OSError, ValueError):  # one of them is not a file, but an object in memory
        return False


def writes_lines(console: Console, as_json: bool = False) -> bool:
    """Whether progress is printed in lines; never where they would get into the JSON output."""
    return not draws(console) and not (as_json and shares_stdout(console))


def run_progress(console: Console, as_json: bool = False) -> RunProgress | ProgressLines:
    """The progress callback of a command that makes runs; with `as_json` there is no bar."""
    return ProgressLines(console) if writes_lines(console, as_json) else RunProgress(console, quiet=as_json)


def work_progress(console: Console, as_json: bool = False, quiet: bool = False) -> WorkProgress | ProgressLines:
    """The progress callback of a command that works in phases: no bar with `as_json`, nothing at all if `quiet`."""
    if writes_lines(console, as_json) and not quiet:
        return ProgressLines(console)
    return WorkProgress(console, quiet=as_json or quiet)


class _StopsBar:
    """A context manager that stops its progress bar at the end, also after an error."""

    progress: Progress
    bar: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.progress.stop()


class RunProgress(_StopsBar):
    """A callback that draws one bar per run; of runs trained side by side, only the first has a bar.

    Progress goes to stderr, since stdout is for results.
    """

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self.console, self.quiet = console, quiet
        self.progress = Progress(
            TextColumn("[bold]{task.description:<9}"),
            BarColumn(bar_width=16),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[doing]}", table_column=Column(width=42, no_wrap=True)),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
            disable=quiet,
        )
        self.images: list[int] = []
        self.stage = 0
        self.run: RunLabel | None = None  # the run that the bar shows
        self.full = ""  # the used share of the network's capacity, if the method reports it

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if event.kind == "run" and self.stage == len(self.images):
            self.run = event.run
        if event.run != self.run and event.kind != "warning":
            return
        handler = getattr(self, f"_on_{event.kind}", None)
        if handler is not None:
            handler(event.data)

    def _on_run(self, data: dict[str, Any]) -> None:
        self.images, self.stage = data["images"], data["learned"]
        done = sum(self.images[: self.stage])
        self.progress.start()  # not earlier, so that a run that fails to start prints no empty line
        self.bar = self.progress.add_task(
            data["method"], total=float(sum(self.images)), completed=done, doing="starting"
        )

    def _on_prepare(self, data: dict[str, Any]) -> None:
        self._say(f"task {self.stage + 1} of {len(self.images)}, reading {data['images']} images")

    def _on_encode(self, data: dict[str, Any]) -> None:
        self._say(f"task {self.stage + 1} of {len(self.images)}, encoding {data['images']} images")

    def _on_epoch(self, data: dict[str, Any]) -> None:
        share = self.images[self.stage] / data["epochs"]
        where = f"task {self.stage + 1} of {len(self.images)}"
        self._say(f"{where}, epoch {data['epoch']} of {data['epochs']}, loss {data['loss']:.2f}", advance=share)

    def _on_capacity(self, data: dict[str, Any]) -> None:
        self.full = f", {100 * data['units']:.0f} % full"

    def _on_warning(self, data: dict[str, Any]) -> None:
        self.console.print(f"[yellow]warning:[/] {escape(data['text'])}", soft_wrap=True)  # on stderr, also with --json

    def _on_stage(self, data: dict[str, Any]) -> None:
        last = 100 * data["so_far"]["last"]
        self.stage = data["stage"] + 1
        self._say(f"{last:.1f} % right after task {self.stage} of {len(self.images)}{self.full}")
        self.full = ""
        if self.bar is not None:
            self.progress.update(
                self.bar, completed=sum(self.images[: self.stage])
            )  # the epochs' shares may not add up exactly

    def _say(self, text: str, advance: float = 0.0) -> None:
        if self.bar is not None:
            self.progress.update(self.bar, doing=text, advance=advance)


_COUNTED = {"prepare": "preparing", "encode": "encoding"}  # phases whose steps are images


class WorkProgress(_StopsBar):
    """One bar for work in phases, such as reading images and then learning them; removed when the work is done.

    It is also the callback of learning. No bar is drawn if `quiet` or if stderr is not a terminal; warnings are printed
    in any case.
    """

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[doing]}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=quiet or not console.is_terminal,
            transient=True,
        )
        self.phase, self.done, self.started = "", 0, 0.0

    def begin(self, phase: str, total: int | None) -> None:
        """Start a phase of `total` steps of about the same length; None if their number is not known."""
        if self.bar is None:
            self.progress.start()
        else:
            self.progress.remove_task(self.bar)  # a new bar, with its own estimate of the time left
        self.bar = self.progress.add_task(phase, total=total, doing="")
        self.phase, self.done, self.started = phase, 0, time.monotonic()

    def advance(self, steps: int, doing: str | None = None) -> None:
        """Count finished steps; the bar shows `doing`, or else the speed."""
        self.done += steps
        speed = self.done / max(time.monotonic() - self.started, 1e-9)
        if self.bar is not None:
            self.progress.update(self.bar, advance=steps, doing=pace(speed) if doing is None else doing)

    def __call__(self, event: Event) -> None:
        """Show one event of learning."""
        if event.kind == "warning":
            self.console.print(f"[yellow]warning:[/] {escape(event.data['text'])}", soft_wrap=True, highlight=False)
        elif event.kind == "phase":
            self.begin(event.data["phase"], event.data["steps"])
        elif event.kind == "step":
            self.advance(event.data["steps"])
        elif event.kind in _COUNTED:
            if self.phase != _COUNTED[event.kind]:
                self.begin(_COUNTED[event.kind], event.data["images"])
            self.advance(event.data["done"])
        elif event.kind == "epoch":
            if self.phase != "learning":
                self.begin("learning", event.data["epochs"])
            self.advance(1, f"loss {event.data['loss']:.2f}")
