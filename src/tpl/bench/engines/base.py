"""The contract between a suite and the engine that carries out its runs.

A suite hands over jobs and gets events; both are plain data, so that an engine may be processes on this machine or on
many. Results are no events: they lie in the run directories, where an engine with workers elsewhere puts them before it
emits the event that refers to them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tpl.errors import TplError
from tpl.files import at_home

if TYPE_CHECKING:
    from tpl.bench.spec import RunSpec

# torch is imported where a job is carried out: an engine itself only starts and counts processes.

STARTED, RETRIED, FINISHED, FAILED = "started", "retried", "finished", "failed"
ATTEMPTS = 2  # a run whose process dies is taken up once more
LOG = "worker.log"  # in the run directory: what its processes have printed
PAUSE = 0.5  # seconds between two events about how far reading images has come
_PATHS = ("data", "weights")

Emit = Callable[[str, dict[str, Any]], None]
CarryOut = Callable[["Job", Emit], None]


@dataclass(frozen=True)
class Job:
    """One run to be made, or to go on with: what, and in which directory."""

    name: str  # tells jobs of a suite apart
    directory: str
    spec: dict[str, Any]  # the fields of a RunSpec, as JSON has them
    track: list[str] = field(default_factory=list)  # trackers that get the events of the run

    @classmethod
    def of(cls, spec: RunSpec, place: Path, track: Sequence[str] = ()) -> Job:
        """The job of making a run in a directory. Its paths hold whatever the current folder of a worker is."""
        content = dataclasses.asdict(spec)
        for name in _PATHS:
            content[name] = None if content[name] is None else str(at_home(content[name]).absolute())
        return cls(place.name, str(place.absolute()), content, list(track))

    def run_spec(self) -> RunSpec:
        """What to run."""
        from tpl.bench.spec import RunSpec

        paths = {name: None if self.spec[name] is None else Path(self.spec[name]) for name in _PATHS}
        sizes = self.spec["per_task"]
        return RunSpec(**self.spec | paths | {"per_task": tuple(sizes) if isinstance(sizes, list | tuple) else sizes})

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The job of that line."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class JobEvent:
    """Something happened to a job.

    Either to its process: `started` (attempt), `retried` (error), `finished`, `failed` (error); the last two end it. Or
    an event of its run: the kinds of `tpl.engine.Event`.
    """

    job: str
    kind: str
    data: dict[str, Any] = field(default_factory=dict)


class Engine(ABC):
    """Carries out jobs, several at a time."""

    name: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()  # what it takes beside the device and the number of workers

    @abstractmethod
    def slots(self, jobs: int) -> int:
        """How many of so many jobs are carried out at a time."""

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> Generator[JobEvent]:
        """Carry out all jobs. Ends when each has finished or failed; closed earlier, it ends its workers first.

        Whatever happens to one job, a crash of its process included, happens to no other. A job whose process dies
        starts again, up to ATTEMPTS times in all, and goes on from what lies in its directory.
        """


# In a worker, whichever engine started it


def carry_out(job: Job, emit: Emit) -> None:
    """Make the run, or go on with it, and emit its events."""
    from tpl.bench.run import execute
    from tpl.engine import FREQUENT, Event

    quiet_until = 0.0

    def callback(event: Event) -> None:
        nonlocal quiet_until
        if event.kind in FREQUENT:
            if time.monotonic() < quiet_until:
                return
            quiet_until = time.monotonic() + PAUSE
        emit(event.kind, event.data)

    execute(job.run_spec(), Path(job.directory), resume=True, callback=callback, track=job.track)


def try_job(carry_out: CarryOut, job: Job, emit: Emit) -> dict[str, Any] | None:
    """Carry out a job. None if it finished; else the error, and whether it is final.

    A failure that a person has to mend, a TplError, is final; after any other, another attempt is worth it.
    """
    try:
        carry_out(job, emit)
    except TplError as error:
        return {"error": str(error), "final": True}
    except Exception as error:
        traceback.print_exc()  # kept beside the run
        return {"error": f"{type(error).__name__}: {error}", "final": False}
    return None


@contextmanager
def output_kept(place: Path) -> Iterator[None]:
    """Whatever is printed meanwhile goes into a file: the terminal is the suite's."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        log = os.open(place / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        log = os.open(os.devnull, os.O_WRONLY)  # the run will say what is wrong with its directory
    before = [os.dup(stream) for stream in (1, 2)]
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    try:
        yield
    finally:
        sys.stdout.flush()
        for stream, old in enumerate(before, start=1):
            os.dup2(old, stream)
            os.close(old)


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back; it comes through afterwards. A process that is started meanwhile never gets it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # else the first process starts it, and that undoes the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
