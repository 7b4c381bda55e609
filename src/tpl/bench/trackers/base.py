"""What a tracker must offer, and what it is told."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

PROJECT = "tpl"  # the experiment or project where none is named
LOSS = "training_loss"
Numbers = Mapping[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told at the start."""

    place: Path
    settings: dict[str, Any]  # run.json, flattened
    learned: int  # tasks that an earlier process has learned
    epochs: int  # epochs that these have taken
    resumed: bool  # whether an earlier process has worked here

    @property
    def ident(self) -> str:
        """The same for the same directory, so that a resumed run goes on where it was."""
        return hashlib.sha256(str(self.place.absolute()).encode()).hexdigest()[:16]


class Tracker(ABC):
    """One place where a run's numbers go."""

    package: ClassVar[str]  # to be imported
    extra: ClassVar[str]  # of this package, that installs it

    @abstractmethod
    def __init__(self, where: str, run: TrackedRun) -> None:
        """Open the place; `where` is what follows the tracker's name, or nothing."""

    @abstractmethod
    def stage(self, task: int, numbers: Numbers) -> None:
        """The numbers after a task, counted from 1."""

    @abstractmethod
    def loss(self, epoch: int, value: float) -> None:
        """The training loss of an epoch, counted from 1 over all tasks."""

    @abstractmethod
    def close(self, finished: bool) -> None:
        """The run has ended or was interrupted."""
