"""How far a run has come, and how long the rest will take: computed from its events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class Pace:
    """The position of a run in its tasks and epochs, and the speed so far."""

    images: list[int] = field(default_factory=list)  # training images of each task
    task: int = 0  # number of tasks learned and measured
    epoch: int = 0
    epochs: int = 0
    since: float = 0.0  # when this attempt began to learn
    share_then: float = 0.0  # share done at that time

    @property
    def share(self) -> float:
        """The share of the run that is done, by training images."""
        images, task, epochs = self.images, self.task, self.epochs  # another thread may change them meanwhile
        now = images[task] * self.epoch / epochs if epochs and task < len(images) else 0
        return (sum(images[:task]) + now) / sum(images) if sum(images) else 0.0

    def seconds_left(self, now: float) -> float | None:
        """Seconds that the rest takes at the speed so far; None before the first epoch."""
        done = self.share - self.share_then
        return (now - self.since) * (1 - self.share) / done if done > 0 else None

    def handle(self, kind: str, data: dict[str, Any], now: float) -> None:
        """Update the position by an event of the run."""
        if kind == "run":
            self.images, self.task = list(data["images"]), int(data["learned"])
            self.epoch = self.epochs = 0
            self.since, self.share_then = now, self.share
        elif kind == "epoch":
            self.epoch, self.epochs = int(data["epoch"]), int(data["epochs"])
        elif kind == "stage":
            self.task, self.epoch, self.epochs = int(data["stage"]) + 1, 0, 0
