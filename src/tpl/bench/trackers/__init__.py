"""Experiment trackers: TensorBoard, MLflow and Weights & Biases hear what a run tells, if they are asked to.

None of them is needed: events.jsonl in the run directory has it all. A tracker that fails, such as one whose server is
away, is dropped with a warning, and the run goes on. A resumed run goes on in the same place. One file each; their
packages are imported when a run begins, not before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from tpl.bench.trackers.base import TrackedRun, Tracker
from tpl.bench.trackers.mlflow import MlflowTracker
from tpl.bench.trackers.tensorboard import TensorBoardTracker
from tpl.bench.trackers.wandb import WandbTracker
from tpl.engine import Callback, Event
from tpl.errors import TplError

__all__ = ["TRACKERS", "TrackedRun", "Tracker", "Tracking", "check_trackers", "epochs_of", "flat"]

TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MlflowTracker,
    "wandb": WandbTracker,
}


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are unknown or not installed, before anything runs."""
    for text in names:
        name = text.partition(":")[0]
        if name not in TRACKERS:
            raise TplError(f"There is no tracker '{name}'; there are {', '.join(TRACKERS)}.")
        kind = TRACKERS[name]
        if find_spec(kind.package) is None:
            raise TplError(f"--track {name} needs the package {kind.package}: pip install 'tpl-cil[{kind.extra}]'")


class Tracking:
    """Passes a run's events on to its trackers, and drops those that fail."""

    def __init__(self, names: Sequence[str], run: TrackedRun, warn: Callback) -> None:
        self.warn, self.epoch, self.finished = warn, run.epochs, False
        self.open: dict[str, Tracker] = {}
        for text in names:
            name, _, where = text.partition(":")
            with self._guarded(text):
                self.open[text] = TRACKERS[name](where, run)

    def __call__(self, event: Event) -> None:
        """Tell the trackers of an epoch or a stage; they care for nothing else."""
        if event.kind == "epoch":
            self.epoch += 1
            self._each(lambda tracker: tracker.loss(self.epoch, float(event.data["loss"])))
        elif event.kind == "stage":
            task, numbers = int(event.data["stage"]) + 1, event.data["so_far"]
            self.finished = task == event.data["stages"]
            self._each(lambda tracker: tracker.stage(task, numbers))

    def close(self) -> None:
        """End all."""
        self._each(lambda tracker: tracker.close(self.finished))

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for text, tracker in list(self.open.items()):
            with self._guarded(text):
                act(tracker)

    @contextmanager
    def _guarded(self, text: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a foreign package or a server does, the run goes on
            self.open.pop(text, None)
            self.warn(Event("warning", {"text": f"--track {text} has stopped: {type(error).__name__}: {error}"}))


def flat(content: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """run.json as names and plain values; lists of classes are told by their lengths."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{key}.")
        elif key == "classes":
            found[f"{before}classes_per_task"] = json.dumps([len(names) for names in value])
        else:
            found[before + key] = value if isinstance(value, str | int | float) else json.dumps(value)
    return found


def epochs_of(lines: Iterable[str], learned: int) -> int:
    """The epochs of the first `learned` tasks, as events.jsonl tells; those of interrupted attempts do not count."""
    counts: dict[int, int] = {}
    task = now = 0
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            event = json.loads(line)
            if event["kind"] == "run":
                task, now = int(event["learned"]), 0
            elif event["kind"] == "task":
                now = 0
            elif event["kind"] == "epoch":
                now += 1
                counts[task] = now
            elif event["kind"] == "stage":
                task, now = int(event["stage"]) + 1, 0
    return sum(count for number, count in counts.items() if number < learned)
