"""Distances to every task's classes: what MORE and ROW judge tasks by."""

from __future__ import annotations

import torch
from torch import Tensor

from tpl.methods.bank.bank import Outputs
from tpl.scores import Mahalanobis
from tpl.store import under_prefix

PREFIX = "score."


class TaskCentres:
    """The means of every task's classes, and a covariance a task to measure distances to them by."""

    def __init__(self, shrinkage: str | float = "auto") -> None:
        self.shrinkage = shrinkage  # of the covariance
        self.tasks: list[Mahalanobis] = []

    def __getitem__(self, task: int) -> Mahalanobis:
        return self.tasks[task]

    def add(self, outputs: Outputs, labels: Tensor) -> None:
        """Keep means and covariance of one more task, given what its model says of its training images."""
        self.tasks.append(Mahalanobis(self.shrinkage).fit_features(*outputs, labels))

    def closeness(self, outputs: list[Outputs]) -> Tensor:
        """max_c 1 / d_M(z_j, mu_c) of every task j, `[n, tasks]`."""
        squares = [centre.score_features(*seen) for centre, seen in zip(self.tasks, outputs, strict=True)]
        return torch.stack(squares, dim=1).sqrt()

    def state(self, task: int) -> dict[str, Tensor]:
        """One task's statistics, for storage."""
        return {PREFIX + k: v for k, v in self.tasks[task].state().items()}

    def load_state(self, tasks: list[dict[str, Tensor]]) -> None:
        """Take up the statistics of all tasks."""
        self.tasks = [Mahalanobis(self.shrinkage).load_state(under_prefix(PREFIX, own)) for own in tasks]
