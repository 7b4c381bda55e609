"""Where the runs of a suite stand: heard from an engine while they work, or read from their directories at any time."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpl.bench.pace import Pace
from tpl.bench.results import RunResult
from tpl.errors import TplError
from tpl.files import replace_text
from tpl.store import ModelStore

WAITING, RUNNING, FINISHED, FAILED, INTERRUPTED = "waiting", "running", "finished", "failed", "interrupted"
STATES = (FINISHED, RUNNING, WAITING, INTERRUPTED, FAILED)
PLAN = "suite.json"
FAILURE = "failure.json"


@dataclass
class RunState(Pace):
    """One run of a suite."""

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
        """The run in a few words."""
        return f"{self.method} on {self.benchmark}, {self.order}, seed {self.seed}"

    def doing(self) -> str:
        """Where a running one is."""
        if not self.images:
            return "starting"
        if self.task == len(self.images):
            return "measured"
        where = f"task {self.task + 1} of {len(self.images)}"
        return f"{where}, epoch {self.epoch} of {self.epochs}" if self.epochs else where

    def finish(self) -> None:
        """Take up the numbers in its directory."""
        self.result = RunResult.read(self.directory)
        self.state, self.error = FINISHED, None

    def interrupt(self) -> None:
        """It was cut off, or did not even begin; the next call goes on."""
        self.state, self.error = INTERRUPTED, None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        summary = self.result.summary if self.result else {}
        return {
            "method": self.method,
            "benchmark": self.benchmark,
            "order": self.order,
            "seed": self.seed,
            "state": self.state,
            "last": summary.get("last"),
            "aia": summary.get("aia"),
            "directory": str(self.directory),
            "reused": self.reused,
            "error": self.error,
        }

    def progress(self, now: float) -> dict[str, Any]:
        """For the JSON of a suite that may be running."""
        left = self.seconds_left(now) if self.state == RUNNING else None
        return {
            "task": self.task,
            "tasks": len(self.images) or None,
            "epoch": self.epoch,
            "share": 1.0 if self.state == FINISHED else self.share,
            "seconds_left": None if left is None else round(left, 1),
        }


def read_states(out: Path) -> list[RunState]:
    """All runs of a suite's directory: those that were planned, and any others that lie there."""
    if not out.is_dir():
        raise TplError(f"There is no directory {out}; name the --out of a suite.")
    try:
        planned = _read(out / PLAN).get("runs", [])
        states = [RunState(**{**run, "directory": out / run["directory"]}) for run in planned]
    except (TypeError, KeyError):
        raise TplError(f"{out / PLAN} is not what a suite writes; remove it, the runs tell the rest.") from None
    known = {state.directory for state in states}
    others = [file.parent for file in sorted(out.glob("*/run.json")) if file.parent not in known]
    states += [_described(place) for place in others]
    if not states:
        raise TplError(f"{out} holds no suite and no runs; name the --out of a suite.")
    for state in states:
        look(state)
    return states


def _described(place: Path) -> RunState:
    """A run that says itself what it is."""
    what = _read(place / "run.json")
    method, benchmark, order = (str(what.get(key, "?")) for key in ("method", "benchmark", "order"))
    return RunState(method, benchmark, order, int(what.get("seed", 0)), place)


def look(state: RunState) -> None:
    """Find out from its directory where a run stands."""
    place = state.directory
    if (place / "results.json").exists():
        state.finish()
        return
    for line in _newest_events(place):
        state.hear(line["kind"], line, line["time"])
    if _held(place):
        state.state = RUNNING
    elif failure := _read(place / FAILURE):
        state.state, state.error = FAILED, str(failure.get("error"))
    else:
        state.state = INTERRUPTED if (place / "run.json").exists() else WAITING


def write_failure(state: RunState) -> None:
    """Leave word of a failure, for those who look later. The next attempt wipes it out."""
    try:
        state.directory.mkdir(parents=True, exist_ok=True)
        replace_text(state.directory / FAILURE, json.dumps({"error": state.error, "time": time.time()}) + "\n")
    except OSError:
        pass  # a directory that cannot be written is what failed, and the suite says so itself


def _held(place: Path) -> bool:
    """Whether a process is at work in a run directory: its signature lies there, and it lives."""
    holder = _read(ModelStore(place / "model").holder_file)
    if not holder:
        return False
    if holder.get("host") != socket.gethostname():
        return True  # nobody here can tell
    return is_alive(int(holder["pid"]))  # one that was killed could not take its signature away


def is_alive(pid: int) -> bool:
    """Whether a process of this machine is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody else's
    return True


def _newest_events(place: Path) -> list[dict[str, Any]]:
    """What the newest process to work here has told. A line that is being written is left out."""
    try:
        lines = (place / "events.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found: list[dict[str, Any]] = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        found = [event] if event["kind"] == "run" else [*found, event] if event["kind"] in ("epoch", "stage") else found
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
