"""Running a suite, and the state of its runs, from their events or their directories.

Finished runs are reused, interrupted ones continue, failures are recorded.

DIR/suite.json          the grid, and every run's directory
DIR/RUN/                a run directory, with the name that `tpl run` with the same settings would give it
DIR/RUN/worker.log      what its process printed, tracebacks included
DIR/RUN/failure.json    why its last attempt failed
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpl.bench.engines import Engine, Job, JobEvent
from tpl.bench.engines import base as events
from tpl.bench.pace import Pace
from tpl.bench.results import RunResult, is_held
from tpl.bench.run_files import MAX_BYTES, EventLine, PlannedRun
from tpl.bench.suite import Suite
from tpl.errors import TplError
from tpl.files import read_bounded, replace_atomically
from tpl.store import ModelStore

if TYPE_CHECKING:  # `tpl suite status` needs no torch
    from tpl.bench.spec import RunSpec

WAITING, RUNNING, FINISHED, FAILED, INTERRUPTED = "waiting", "running", "finished", "failed", "interrupted"
STATES = (FINISHED, RUNNING, WAITING, INTERRUPTED, FAILED)
PLAN = "suite.json"
FAILURE = "failure.json"


@dataclass
class RunState(Pace):
    """One run of a suite: what it is, and how far it has come."""

    method: str
    benchmark: str
    order: str
    seed: int
    directory: Path
    state: str = WAITING
    reused: bool = False  # it was finished before this suite began
    error: str | None = None
    result: RunResult | None = None
    attempt: int = 1

    @property
    def label(self) -> str:
        """A short name of the run."""
        return f"{self.method} on {self.benchmark}, {self.order}, seed {self.seed}"

    def doing(self) -> str:
        """What a running run is working on."""
        if not self.images:
            return "starting"
        if self.task == len(self.images):
            return "measured"
        where = f"task {self.task + 1} of {len(self.images)}"
        return f"{where}, epoch {self.epoch} of {self.epochs}" if self.epochs else where

    def finish(self) -> None:
        """Mark the run as finished, with the results in its directory."""
        self.result = RunResult.read(self.directory)
        self.state, self.error = FINISHED, None

    def interrupt(self) -> None:
        """Mark the run as cut off or never begun; the next call of the suite continues it."""
        self.state, self.error = INTERRUPTED, None

    def to_dict(self) -> dict[str, Any]:
        """The run and its result, for JSON."""
        summary = self.result.summary if self.result else {}
        return {
            "method": self.method,
            "benchmark": self.benchmark,
            "order": self.order,
            "seed": self.seed,
            "state": self.state,
            "last": summary.get("last"),
            "aia": summary.get("aia"),
            "contamination": self.result.contamination if self.result else None,
            "directory": str(self.directory),
            "reused": self.reused,
            "error": self.error,
        }

    def progress(self, now: float) -> dict[str, Any]:
        """How far the run has come, for the JSON of a suite that may be running."""
        left = self.seconds_left(now) if self.state == RUNNING else None
        return {
            "task": self.task,
            "tasks": len(self.images) or None,
            "epoch": self.epoch,
            "share": 1.0 if self.state == FINISHED else self.share,
            "seconds_left": None if left is None else round(left, 1),
        }


Watcher = Callable[[RunState, JobEvent], None]


class SuiteRun:
    """One call of a suite in its directory."""

    def __init__(self, suite: Suite, out: Path, track: Sequence[str] = ()) -> None:
        self.suite, self.out, self.track = suite, out, track
        self.specs = suite.specs()
        self.states = [RunState(s.method, s.benchmark, s.order, s.seed, out / s.directory_name()) for s in self.specs]
        self.finished = Finished()
        self.interrupted = False
        self.seconds = 0.0

    @contextmanager
    def open(self) -> Iterator[list[RunState]]:
        """Lock the directory, write suite.json, and find out which runs are finished. A second suite is refused."""
        with ModelStore(self.out).writing():  # for its lock
            runs = [
                {key: getattr(state, key) for key in ("method", "benchmark", "order", "seed")}
                | {"directory": state.directory.name}
                for state in self.states
            ]
            replace_atomically(
                self.out / PLAN, json.dumps({"suite": self.suite.to_dict(), "runs": runs}, indent=2) + "\n"
            )
            for spec, state in zip(self.specs, self.states, strict=True):
                if self.finished.has(spec, state.directory):
                    state.finish()
                    state.reused = True
            yield self.states

    def carry_out(self, engine: Engine, watch: Watcher) -> None:
        """Make all runs that are not finished. Ctrl-C ends the workers and sets `interrupted`."""
        todo = {s.directory.name: s for s in self.states if not s.reused}
        jobs = [
            Job.of(spec, state.directory, self.track)
            for spec, state in zip(self.specs, self.states, strict=True)
            if not state.reused
        ]
        started = time.perf_counter()
        try:
            with closing(engine.run(jobs)) as happened:
                for event in happened:
                    state = todo[event.job]
                    _update(state, event)
                    watch(state, event)
        except KeyboardInterrupt:
            self.interrupted = True
        for spec, state in zip(self.specs, self.states, strict=True):
            if state.state in (RUNNING, WAITING):
                # It may have finished at the very moment of the Ctrl-C.
                state.finish() if self.finished.has(spec, state.directory) else state.interrupt()
        self.seconds = time.perf_counter() - started

    def report(self) -> dict[str, Any]:
        """Every run and the number of runs in each state, for JSON."""
        counts = Counter(state.state for state in self.states)
        return {
            "directory": str(self.out),
            "runs": [state.to_dict() for state in self.states],
            "counts": dict(sorted(counts.items())),
            "reused": sum(state.reused for state in self.states),
            "seconds": round(self.seconds, 2),
        }


def _update(state: RunState, event: JobEvent) -> None:
    """Change a run's state by an event of its engine."""
    if event.kind == events.STARTED:
        state.state, state.attempt = RUNNING, event.data["attempt"]
        (state.directory / FAILURE).unlink(missing_ok=True)
    elif event.kind == events.FINISHED:
        state.finish()
    elif event.kind in (events.FAILED, events.RETRIED):
        state.error = event.data["error"]
        if event.kind == events.FAILED:
            state.state = FAILED
            _write_failure(state)
    else:
        state.handle(event.kind, event.data, time.time())


def _write_failure(state: RunState) -> None:
    """Record a failure for `read_states`. The next attempt removes the file."""
    try:
        state.directory.mkdir(parents=True, exist_ok=True)
        replace_atomically(state.directory / FAILURE, json.dumps({"error": state.error, "time": time.time()}) + "\n")
    except OSError:
        pass  # the directory cannot be written: that is the failure, and the suite reports it


class Finished:
    """Finds finished runs that can be reused; images that several runs share are hashed once."""

    def __init__(self) -> None:
        self.data: dict[tuple[Any, ...], dict[str, str]] = {}

    def has(self, spec: RunSpec, place: Path) -> bool:
        """Whether `place` holds a finished run with exactly these settings and images.

        The directory's name depends on all settings except the paths of images and weights; their hashes are compared
        here. If they differ or cannot be compared, the run is opened like any other and reports what is wrong.
        """
        if not (place / "results.json").exists():
            return False
        try:
            before = RunResult.read(place).description
            return bool(
                before["encoder"]["sha256"] == self._encoder(spec, before) and before["data"] == self._data(spec)
            )
        except (OSError, KeyError, TplError):
            return False

    def _encoder(self, spec: RunSpec, before: dict[str, Any]) -> str:
        from tpl.files import sha256_of
        from tpl.pretraining import PACKAGED, packaged_record

        if spec.weights is not None:
            return sha256_of(spec.weights)
        packaged = spec.encoder in PACKAGED
        return str(packaged_record(spec.encoder)["sha256"] if packaged else before["encoder"]["sha256"])

    def _data(self, spec: RunSpec) -> dict[str, str]:
        from tpl.bench.run import data_hashes

        held_out = None if spec.validation is None else (spec.validation, spec.seed)
        key = (spec.benchmark, spec.data, spec.order, spec.per_task, spec.tasks, held_out)
        if key not in self.data:
            self.data[key] = data_hashes(spec.stream())
        return self.data[key]


# From the directory, at any time and by any process


def read_states(out: Path) -> list[RunState]:
    """The states of all runs in a suite's directory: those in suite.json, and any others found there."""
    if not out.is_dir():
        raise TplError(f"There is no directory {out}; name the --out of a suite.")
    try:
        planned = [PlannedRun.model_validate(run) for run in _read(out / PLAN).get("runs", [])]
        states = [RunState(**{**run.model_dump(), "directory": out / run.directory}) for run in planned]
    except (TypeError, ValueError):
        raise TplError(f"{out / PLAN} was not written by a suite; remove it: the runs are found without.") from None
    known = {state.directory for state in states}
    others = [file.parent for file in sorted(out.glob("*/run.json")) if file.parent not in known]
    states += [_described(place) for place in others]
    if not states:
        raise TplError(f"{out} holds no suite and no runs; name the --out of a suite.")
    for state in states:
        _look(state)
    return states


def _described(place: Path) -> RunState:
    """A run that is not in suite.json, by its run.json."""
    what = _read(place / "run.json")
    method, benchmark, order = (str(what.get(key, "?")) for key in ("method", "benchmark", "order"))
    seed = what.get("seed")
    return RunState(method, benchmark, order, seed if isinstance(seed, int) else 0, place)


def _look(state: RunState) -> None:
    """Set a run's state by the files in its directory."""
    place = state.directory
    if (place / "results.json").exists():
        state.finish()
        return
    for event in _newest_events(place):
        state.handle(event["kind"], event, event["time"])
    if is_held(place):
        state.state = RUNNING
    elif failure := _read(place / FAILURE):
        state.state, state.error = FAILED, str(failure.get("error"))
    else:
        state.state = INTERRUPTED if (place / "run.json").exists() else WAITING


def _newest_events(place: Path) -> list[dict[str, Any]]:
    """The events of the newest process that worked on a run. An incomplete or damaged line is left out."""
    try:
        lines = read_bounded(place / "events.jsonl", MAX_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    found: list[dict[str, Any]] = []
    for line in lines:
        try:
            event = EventLine.model_validate(json.loads(line)).model_dump()
        except (ValueError, RecursionError):
            continue
        found = [event] if event["kind"] == "run" else [*found, event] if event["kind"] in ("epoch", "stage") else found
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_bounded(file, MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
