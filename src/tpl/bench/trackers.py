"""Experiment trackers: TensorBoard, MLflow and Weights & Biases get the numbers of a run, if asked for.

None of them is needed: events.jsonl in the run directory has it all. A tracker that fails, such as one whose server
cannot be reached, is dropped with a warning, and the run goes on. A resumed run continues in the same place. The
packages are imported when a run begins, not before.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from tpl.engine import Callback, Event
from tpl.errors import TplError
from tpl.files import at_home

PROJECT = "tpl"  # the experiment or project where none is named
LOSS = "training_loss"
Numbers = Mapping[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker knows of a run at the start."""

    place: Path
    settings: dict[str, Any]  # run.json, flattened
    learned: int  # tasks that an earlier process has learned
    epochs: int  # epochs that these tasks took
    resumed: bool  # whether an earlier process has worked on this run

    @property
    def ident(self) -> str:
        """An id derived from the directory, so that a resumed run continues in the same place."""
        return hashlib.sha256(str(self.place.absolute()).encode()).hexdigest()[:16]


class Tracker(ABC):
    """One place where a run's numbers go."""

    package: ClassVar[str]  # to be imported
    extra: ClassVar[str]  # of this project, which installs the package

    @abstractmethod
    def __init__(self, where: str, run: TrackedRun) -> None:
        """Open the place; `where` is what follows the tracker's name, or nothing."""

    @abstractmethod
    def stage(self, task: int, numbers: Numbers) -> None:
        """Record the numbers after a task, counted from 1."""

    @abstractmethod
    def loss(self, epoch: int, value: float) -> None:
        """Record the training loss of an epoch, counted from 1 over all tasks."""

    @abstractmethod
    def close(self, finished: bool) -> None:
        """End the record: the run has finished, or was interrupted."""


class TensorBoardTracker(Tracker):
    """Event files in RUN/tensorboard, or in WHERE/NAME-OF-RUN, which `tensorboard --logdir` shows."""

    package, extra = "tensorboard", "tensorboard"

    def __init__(self, where: str, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = at_home(where) / run.place.name if where else run.place / "tensorboard"
        # Two writers, since tasks and epochs count separately. `purge_step` drops what an interrupted task has written.
        self.stages = SummaryWriter(str(folder), purge_step=run.learned + 1)
        self.training = SummaryWriter(str(folder / "training"), purge_step=run.epochs + 1)
        if not run.learned:
            rows = "".join(f"| {key} | {value} |\n" for key, value in run.settings.items())
            self.stages.add_text("settings", f"| setting | value |\n| --- | --- |\n{rows}")

    def stage(self, task: int, numbers: Numbers) -> None:
        """Record the numbers after a task."""
        for key, value in numbers.items():
            self.stages.add_scalar(key, value, task)
        self.stages.flush()

    def loss(self, epoch: int, value: float) -> None:
        """Record the loss of an epoch."""
        self.training.add_scalar(LOSS, value, epoch)
        self.training.flush()

    def close(self, finished: bool) -> None:
        """Close both files."""
        self.stages.close()
        self.training.close()


class MlflowTracker(Tracker):
    """A run of the experiment `tpl` in WHERE: a folder, a database such as sqlite:///runs.db, or a server's address."""

    package, extra = "mlflow", "mlflow"

    def __init__(self, where: str, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder needs no database
        from mlflow import MlflowClient

        uri = where or os.environ.get("MLFLOW_TRACKING_URI") or "mlruns"
        self.client = MlflowClient(uri if "://" in uri else at_home(uri).absolute().as_uri())
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        experiment = self.client.get_experiment_by_name(name)
        ident = experiment.experiment_id if experiment else self.client.create_experiment(name)
        known = self.client.search_runs([ident], f"tags.`tpl.run` = '{run.ident}'") if run.resumed else []
        if known:
            self.run_id = known[0].info.run_id
            self.client.update_run(self.run_id, status="RUNNING")
            return
        tags = {"tpl.run": run.ident, "tpl.directory": str(run.place.absolute())}
        self.run_id = self.client.create_run(ident, tags=tags, run_name=run.place.name).info.run_id
        for key, value in run.settings.items():
            self.client.log_param(self.run_id, key, str(value)[:500])

    def stage(self, task: int, numbers: Numbers) -> None:
        """Record the numbers after a task."""
        for key, value in numbers.items():
            self.client.log_metric(self.run_id, key, value, step=task)

    def loss(self, epoch: int, value: float) -> None:
        """Record the loss of an epoch."""
        self.client.log_metric(self.run_id, LOSS, value, step=epoch)

    def close(self, finished: bool) -> None:
        """Set the run's status."""
        self.client.set_terminated(self.run_id, "FINISHED" if finished else "KILLED")


class WandbTracker(Tracker):
    """A run of the project WHERE, or `tpl`; WANDB_MODE=offline keeps it in RUN/wandb, to be sent later."""

    package, extra = "wandb", "wandb"

    def __init__(self, where: str, run: TrackedRun) -> None:
        import wandb

        self.run = wandb.init(
            project=where or os.environ.get("WANDB_PROJECT") or PROJECT, name=run.place.name, id=run.ident,
            resume="allow", config=run.settings, dir=str(run.place), reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        self.run.define_metric("task")
        self.run.define_metric("epoch")
        self.run.define_metric("*", step_metric="task")
        self.run.define_metric(LOSS, step_metric="epoch")

    def stage(self, task: int, numbers: Numbers) -> None:
        """Record the numbers after a task."""
        self.run.log({"task": task} | dict(numbers))

    def loss(self, epoch: int, value: float) -> None:
        """Record the loss of an epoch."""
        self.run.log({"epoch": epoch, LOSS: value})

    def close(self, finished: bool) -> None:
        """Finish the run."""
        self.run.finish(exit_code=0 if finished else 1)


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
    """An event callback that passes a run's losses and stages on to its trackers, and drops those that fail."""

    def __init__(self, names: Sequence[str], run: TrackedRun, warn: Callback) -> None:
        self.warn, self.epoch, self.finished = warn, run.epochs, False
        self.open: dict[str, Tracker] = {}
        for text in names:
            name, _, where = text.partition(":")
            with self._guarded(text):
                self.open[text] = TRACKERS[name](where, run)

    def __call__(self, event: Event) -> None:
        """Pass on an epoch or a stage; other events are not tracked."""
        if event.kind == "epoch":
            self.epoch += 1
            self._each(lambda tracker: tracker.loss(self.epoch, float(event.data["loss"])))
        elif event.kind == "stage":
            task, numbers = int(event.data["stage"]) + 1, event.data["so_far"]
            self.finished = task == event.data["stages"]
            self._each(lambda tracker: tracker.stage(task, numbers))

    def close(self) -> None:
        """Close all trackers."""
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
    """run.json as names and plain values; of the lists of classes, the lengths."""
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
    """The number of epochs of the first `learned` tasks in events.jsonl; interrupted attempts do not count."""
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
