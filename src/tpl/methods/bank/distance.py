"""A replaying bank that judges tasks by distance: what MORE and ROW have in common."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from tpl.engine import Compute, Samples
from tpl.methods.bank.bank import Outputs
from tpl.methods.bank.replay import MemoryConfig, ReplayBank
from tpl.nets import Encoder
from tpl.scores import Mahalanobis
from tpl.state import beginning_with

CENTRES = "score."


class DistanceBank(ReplayBank):
    """Every task has the means of its classes, and a covariance to measure distances to them by."""

    shrinkage: ClassVar[str | float] = "auto"  # of the covariance

    def __init__(self, encoder: Encoder, config: MemoryConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.centres_: list[Mahalanobis] = []

    def centre_newest(self, outputs: Outputs, samples: Samples) -> None:
        """Keep means and covariance of the task just trained."""
        self.centres_.append(Mahalanobis(self.shrinkage).fit_features(*outputs, samples.labels))

    def closeness(self, outputs: list[Outputs]) -> Tensor:
        """max_c 1 / d_M(z_j, mu_c) of every task j, `[n, tasks]`."""
        squares = [centre.score_features(*seen) for centre, seen in zip(self.centres_, outputs, strict=True)]
        return torch.stack(squares, dim=1).sqrt()

    def knownness(self, task: int, outputs: Outputs) -> Tensor:
        """How close the feature is to the task's nearest class: no later task changes it."""
        return self.centres_[task].score_features(*outputs)

    def remembered(self) -> tuple[Tensor, Tensor]:
        """The task of every image in the memory, and its class's number within that."""
        numbers, owner = self.memory.labels.to(self.compute.device), self.memory_tasks(self.task_classes_)
        first = torch.tensor([self.classes_.index(names[0]) for names in self.task_classes_], device=numbers.device)
        return owner, numbers - first[owner]

    def task_state(self, task: int) -> dict[str, Tensor]:
        """The statistics."""
        return {CENTRES + k: v for k, v in self.centres_[task].state().items()}

    def load_own_state(self, shared: dict[str, Tensor], tasks: list[dict[str, Tensor]]) -> None:
        """Statistics back."""
        self.centres_ = [Mahalanobis(self.shrinkage).load_state(beginning_with(CENTRES, own)) for own in tasks]
