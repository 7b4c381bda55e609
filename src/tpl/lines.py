"""Progress as plain lines, for a log or another standard error that is not a terminal.

[00:42] tpl: task 2 of 5 (task 2): 2 classes, 286 images
[00:50] tpl: task 2 of 5: epoch 12 of 40, loss 0.31, about 18 s left in this task
[01:05] tpl: task 2 of 5 done in 23 s: 97.8 % accuracy on the classes so far; about 1 min 10 s left

The time in brackets is counted from the start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from tpl.bench.pace import Pace

if TYPE_CHECKING:
    from tpl.engine import Event, RunLabel

MIN_SECONDS = 5.0  # between two lines about the same task, unless one of them begins or ends it
MAX_SECONDS = 30.0  # after so long without a line, the next event writes one in any case

Clock = Callable[[], float]


def duration(seconds: float) -> str:
    """Seconds in hours, minutes and seconds, rounded to the precision of an estimate."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 10:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if rest else f"{hours} h"


def counted(number: int, one: str, many: str) -> str:
    """A number and the right form of its noun."""
    return f"{number} {one if number == 1 else many}"


def printable(text: str) -> str:
    """`text` on one line, with unprintable characters escaped: file names may contain anything."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Throttle:
    """Decides when some work writes a line: at every tenth of it, neither too often nor too rarely."""

    def __init__(self, now: float) -> None:
        self.last = now  # when the last line was written
        self.tenth = 0

    def due(self, share: float | None, now: float) -> bool:
        """Whether to write a line now that a `share` of the work is done; None where the total is unknown."""
        tenth = 0 if share is None else int(10 * share + 1e-6)
        if tenth < self.tenth:
            self.tenth = 0  # new work has begun
        quiet = now - self.last
        if quiet >= MAX_SECONDS or (tenth > self.tenth and quiet >= MIN_SECONDS):
            self.last, self.tenth = now, tenth
            return True
        return False


@dataclass
class _Run(Pace):
    """The progress of one run, as far as its lines need it."""

    label: RunLabel
    title: str = "task"
    began: float | None = None  # when the task began
    counted: int = 0  # images of the task, read or encoded
    first_epoch: float = 0.0  # when the first epoch ended

    @property
    def prefix(self) -> str:
        label = self.label
        return f"run {label.number + 1} of {label.runs} ({label.name}): " if label.name else ""


@dataclass
class _Group:
    """Runs that learn side by side, or one alone; they share a throttle."""

    began: float
    throttle: Throttle
    runs: dict[RunLabel, _Run] = field(default_factory=dict)


def pace(speed: float) -> str:
    """Steps a second with two digits, or nothing: below one it is a time, and thousands are over at once."""
    if not 1 <= speed < 10_000:
        return ""
    step = 10 ** max(len(str(int(speed))) - 2, 0)
    return f"{round(speed / step) * step:,} a second"


class _Phase:
    """Work without tasks, in steps of about the same length."""

    def __init__(self, name: str, total: int | None, now: float) -> None:
        self.name, self.total, self.began = name, total, now
        self.done, self.reported = 0, False
        self.throttle = Throttle(now)

    def advance(self, steps: int, now: float) -> str | None:
        """The line to write after some more steps, if any."""
        self.done += steps
        seconds = now - self.began
        speed = self.done / max(seconds, 1e-9)
        if self.reported and self.done == self.total:
            return f"{self.name}: all {self.total:,} done in {duration(seconds)}"
        if not self.throttle.due(self.done / self.total if self.total else None, now):
            return None
        self.reported = True
        fast = f", {pace(speed)}" if pace(speed) else ""
        if not self.total:
            return f"{self.name}: {self.done:,} so far{fast}"
        left = duration((self.total - self.done) / max(speed, 1e-9))
        return f"{self.name}: {self.done:,} of {self.total:,}{fast}, about {left} left"


class ProgressLines:
    """A callback that writes lines where a bar cannot be drawn: when a task begins or ends, and at times in between.

    Every line is flushed at once. A log that can no longer be written does not end the work. `left` estimates the
    seconds that the whole command still takes; by default from the events.
    """

    def __init__(
        self, console: Console, clock: Clock = time.monotonic, left: Callable[[], float | None] | None = None
    ) -> None:
        self.console, self.clock = console, clock
        self.left = left or self._estimate
        self.started = clock()
        self.groups: dict[int, _Group] = {}
        self.phase: _Phase | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        """Every line has been written already, however the work ends."""

    def __call__(self, event: Event) -> None:
        """Write the line of an event, if any."""
        self.handle(event.kind, event.data, event.run)

    def handle(self, kind: str, data: dict[str, Any], label: RunLabel) -> None:
        """Write the line of an event given by its parts, as another process sends it."""
        if kind == "phase":
            self.begin(data["phase"], data["steps"])
        elif kind == "step":
            self.advance(data["steps"])
        elif (handler := getattr(self, f"_on_{kind}", None)) is not None:
            group = self._group(label)
            run = group.runs.setdefault(label, _Run(label))
            run.handle(kind, data, self.clock())
            handler(group, run, data)

    # Work without tasks

    def begin(self, phase: str, total: int | None) -> None:
        """Start a phase of `total` steps, each of about the same length; None if the number is unknown."""
        self.phase = _Phase(phase, total, self.clock())

    def advance(self, steps: int, doing: str | None = None) -> None:
        """Count some more steps of the phase; `doing` is for bars."""
        line = self.phase.advance(steps, self.clock()) if self.phase is not None else None
        if line is not None:
            self._print(line)

    # Tasks

    def _on_warning(self, group: _Group, run: _Run, data: dict[str, Any]) -> None:
        self._write_line(group, run, f"warning: {data['text']}")

    def _on_run(self, group: _Group, run: _Run, data: dict[str, Any]) -> None:
        run.began = None

    def _on_task(self, group: _Group, run: _Run, data: dict[str, Any]) -> None:
        run.began, run.counted = self.clock(), 0
        content = f"{counted(len(data['classes']), 'class', 'classes')}, {counted(data['images'], 'image', 'images')}"
        if run.images:
            run.title = f"task {run.task + 1} of {len(run.images)}"
            self._write_line(group, run, f"{run.title} ({data['task']}): {content}")
        else:
            run.title = f"task {data['task']}"
            self._write_line(group, run, f"{run.title}: {content}")

    def _on_prepare(self, group: _Group, run: _Run, data: dict[str, Any]) -> None:
        self._count(group, run, data, "read")

    def _on_encode(self, group: _Group, run: _Run, data: dict[str, Any]) -> None:
        self._count(group, run, data, "encoded")

    def _count(self, group: _Group, run: _Run, data: dict[str, Any], what: str) -> None:
        whole = data["images"]
        run.counted = data["done"] + (run.counted if run.counted < whole else 0)  # else other images have begun
        if group.throttle.due(run.counted / max(whole, 1), self.clock()):
            self._write_line(group, run, f"{run.title}: {run.counted:,} of {whole:,} images {what}")

    def _on_epoch(self, group: _Group, run: _Run, data: dict[str, Any]) -> None:
        now, epoch, epochs = self.clock(), data["epoch"], data["epochs"]
        if epoch == 1:
            run.first_epoch = now  # the first one may take much longer than the others
        if not group.throttle.due(epoch / epochs, now):
            return
        text = f"{run.title}: epoch {epoch} of {epochs}, loss {data['loss']:.2f}"
        if 1 < epoch < epochs:
            left = (now - run.first_epoch) / (epoch - 1) * (epochs - epoch)
            text += f", about {duration(left)} left in this task"
        self._write_line(group, run, text)

    def _on_stage(self, group: _Group, run: _Run, data: dict[str, Any]) -> None:
        right = f"{100 * data['so_far']['last']:.1f} % accuracy on the classes so far"
        self._done(group, run, f"task {run.task} of {len(run.images)}", right)

    def _on_learned(self, group: _Group, run: _Run, data: dict[str, Any]) -> None:
        accuracy, images = data["accuracy"], counted(data["held_out"], "held-out image", "held-out images")
        on = f" on {images}" if data["held_out"] else ", each image left out in turn"
        right = "" if accuracy is None else f"{100 * accuracy:.1f} % accuracy{on}"
        self._done(group, run, run.title, right)

    def _done(self, group: _Group, run: _Run, title: str, right: str) -> None:
        took = "" if run.began is None else f" in {duration(self.clock() - run.began)}"
        self._write_line(group, run, f"{title} done{took}{': ' if right else ''}{right}{self._rest()}")
        run.began = None

    # Runs of a suite

    def _on_started(self, group: _Group, run: _Run, data: dict[str, Any]) -> None:
        again = "" if data["attempt"] == 1 else f" again, attempt {data['attempt']}"
        self._write_line(group, run, f"started{again}")

    def _on_finished(self, group: _Group, run: _Run, data: dict[str, Any]) -> None:
        self._write_line(group, run, f"finished: Last {100 * data['last']:.2f} %{self._rest()}")

    def _on_retried(self, group: _Group, run: _Run, data: dict[str, Any]) -> None:
        self._write_line(group, run, f"failed and will be tried once more: {data['error']}")

    def _on_failed(self, group: _Group, run: _Run, data: dict[str, Any]) -> None:
        self._write_line(group, run, f"failed: {data['error']}")

    # Shared by all

    def _group(self, label: RunLabel) -> _Group:
        number, now = label.number // label.together, self.clock()
        if number not in self.groups:
            self.groups[number] = _Group(now, Throttle(now))
        return self.groups[number]

    def _rest(self) -> str:
        left = self.left()
        return f"; about {duration(left)} left" if left is not None and left >= 0.5 else ""

    def _estimate(self) -> float | None:
        """Seconds left: of the newest group at its speed, and for each group to come the mean of all so far."""
        number, group = list(self.groups.items())[-1]
        now, label = self.clock(), next(iter(group.runs))
        rests = [rest for run in group.runs.values() if (rest := run.seconds_left(now)) is not None]
        if not rests:
            return None
        rest = max(rests)
        groups = list(self.groups.values())
        whole = [later.began - earlier.began for earlier, later in pairwise(groups)] + [now - group.began + rest]
        to_come = label.runs // label.together - number - 1
        return rest + to_come * sum(whole) / len(whole)

    def _write_line(self, group: _Group, run: _Run, text: str) -> None:
        group.throttle.last = self.clock()
        self._print(run.prefix + text)

    def _print(self, text: str) -> None:
        minutes, seconds = divmod(int(self.clock() - self.started), 60)
        hours, minutes = divmod(minutes, 60)
        stamp = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes:02d}:{seconds:02d}"
        file = self.console.file
        with suppress(OSError):  # the pipe is closed or the disk is full: the command continues
            file.write(f"[{stamp}] tpl: {printable(text)}\n")
            file.flush()
