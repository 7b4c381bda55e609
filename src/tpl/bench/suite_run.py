"""Making the runs of a suite: what is finished is reused, what was interrupted goes on, what fails is named.

DIR/suite.json          the grid, and every run's directory
DIR/RUN/                a run directory, named after its settings: `tpl run` with the same ones would name it so, too
DIR/RUN/worker.log      what its process printed, tracebacks included
DIR/RUN/failure.json    why its last attempt failed
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tpl.bench.engines import Engine, Job, JobEvent
from tpl.bench.engines import base as events
from tpl.bench.results import RunResult
from tpl.bench.run import RunSpec, data_hashes
from tpl.bench.suite import Suite
from tpl.bench.suite_state import (
    FAILED,
    FAILURE,
    PLAN,
    RUNNING,
    WAITING,
    RunState,
    write_failure,
)
from tpl.errors import TplError
from tpl.files import replace_text, sha256
from tpl.nets import compact
from tpl.store import ModelStore

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
        """Hold the directory, write the plan down, and find out what is finished. A second suite is refused."""
        with ModelStore(self.out).writing():  # for its lock
            runs = [
                {key: getattr(state, key) for key in ("method", "benchmark", "order", "seed")}
                | {"directory": state.directory.name}
                for state in self.states
            ]
            replace_text(self.out / PLAN, json.dumps({"suite": self.suite.to_dict(), "runs": runs}, indent=2) + "\n")
            for spec, state in zip(self.specs, self.states, strict=True):
                if self.finished.has(spec, state.directory):
                    state.finish()
                    state.reused = True
            yield self.states

    def carry_out(self, engine: Engine, watch: Watcher) -> None:
        """Make all runs that are not finished. Ctrl-C ends the workers; `interrupted` then says so."""
        todo = {s.directory.name: s for s in self.states if not s.reused}
        jobs = [
            Job.of(spec, state.directory, self.track)
            for spec, state in zip(self.specs, self.states, strict=True)
            if not state.reused
        ]
        started = time.perf_counter()
        try:
            with closing(engine.run(jobs)) as told:
                for event in told:
                    state = todo[event.job]
                    _take(state, event)
                    watch(state, event)
        except KeyboardInterrupt:
            self.interrupted = True
        for spec, state in zip(self.specs, self.states, strict=True):
            if state.state in (RUNNING, WAITING):
                # It may have finished in the very moment of the Ctrl-C.
                state.finish() if self.finished.has(spec, state.directory) else state.interrupt()
        self.seconds = time.perf_counter() - started

    def report(self) -> dict[str, Any]:
        """For JSON: every run, and how many ended how."""
        counts = Counter(state.state for state in self.states)
        return {
            "directory": str(self.out),
            "runs": [state.to_dict() for state in self.states],
            "counts": dict(sorted(counts.items())),
            "reused": sum(state.reused for state in self.states),
            "seconds": round(self.seconds, 2),
        }


def _take(state: RunState, event: JobEvent) -> None:
    """Note on a run what its engine tells of it."""
    if event.kind == events.STARTED:
        state.state, state.attempt = RUNNING, event.data["attempt"]
        (state.directory / FAILURE).unlink(missing_ok=True)
    elif event.kind == events.FINISHED:
        state.finish()
    elif event.kind in (events.FAILED, events.RETRIED):
        state.error = event.data["error"]
        if event.kind == events.FAILED:
            state.state = FAILED
            write_failure(state)
    else:
        state.hear(event.kind, event.data, time.time())


class Finished:
    """Tells which finished runs can be reused; images that several have in common are looked at once."""

    def __init__(self) -> None:
        self.data: dict[tuple[Any, ...], dict[str, str]] = {}

    def has(self, spec: RunSpec, place: Path) -> bool:
        """Whether a finished run of just these settings and images is here.

        The directory's name says all but where images and weights lie; so these are compared by their hashes. Where
        that cannot be done, or they differ, the run is opened as any other, and says itself what is wrong.
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
        if spec.weights is not None:
            return sha256(spec.weights)
        return str(compact.record()["sha256"] if spec.encoder == compact.NAME else before["encoder"]["sha256"])

    def _data(self, spec: RunSpec) -> dict[str, str]:
        held_out = None if spec.validation is None else (spec.validation, spec.seed)
        key = (spec.benchmark, spec.data, spec.order, spec.per_task, spec.tasks, held_out)
        if key not in self.data:
            self.data[key] = data_hashes(spec.stream())
        return self.data[key]
