"""Weights & Biases: a run of a project, sent at once or kept for later."""

from __future__ import annotations

import os

from tpl.bench.trackers.base import LOSS, PROJECT, Numbers, TrackedRun, Tracker


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
        """The numbers after a task."""
        self.run.log({"task": task} | dict(numbers))

    def loss(self, epoch: int, value: float) -> None:
        """The loss of an epoch."""
        self.run.log({"epoch": epoch, LOSS: value})

    def close(self, finished: bool) -> None:
        """No more to tell."""
        self.run.finish(exit_code=0 if finished else 1)
