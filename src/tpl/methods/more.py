"""MORE: a multi-head model with replayed images as each task's out-of-distribution class (Kim et al., CoLLAs 2022).

Tasks are trained like TPL's. After each task the heads of all earlier ones are trained further on the memory and as
many images of the new task, all other tasks' images labelled `others` (back-update). A prediction is the softmax of a
head over its classes and `others`, times the closeness of the feature to the nearest class mean:

    P(class c of task j | x) ~ softmax(f_j(x) / 2)_c * max_c 20 / d_M(z_j, mu_c)

The public code updates every head on the features of the first task's mask; here head j gets the features of mask j.
It creates a new optimiser for every batch, which amounts to no momentum, the default here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tpl.config import option
from tpl.engine import Compute, Samples
from tpl.methods.bank import BankMethod, MemoryConfig, Outputs
from tpl.methods.bank.heads import Heads, TaskCentres, epoch_of, head_with_others, train_heads
from tpl.methods.base import register
from tpl.nets import Encoder
from tpl.store import under_prefix
from tpl.stream import Task

DISTANCE_SCALE = 20.0


@dataclass(frozen=True)
class MOREConfig(MemoryConfig):
    """MORE's options beyond those of training."""

    back_update_epochs: int = option(
        10, "epochs in which earlier heads are trained further after each task", minimum=0, group="training"
    )
    back_update_lr: ClassVar[float] = 0.01  # learning rate of the back-update
    back_update_momentum: float = option(
        0.0,
        "momentum of the back-update; the public code creates a new optimiser for every batch, so has none",
        minimum=0,
        group="training",
    )
    back_update_batch: ClassVar[int] = 16  # images a step of the back-update
    temperature: float = option(2.0, "temperature of a head's softmax", above=0, group="task prediction")


@register
class MORE(BankMethod):
    """Heads with a class for others, updated after every task, times a Mahalanobis distance."""

    name = "more"
    summary = "task models under HAT masks with replay as an OOD class, heads updated back, times MD"
    paper = "Kim et al., A Multi-Head Model for Continual Learning via Out-of-Distribution Replay, CoLLAs 2022"
    keeps = "a class-balanced memory; a task's mask, norms, head, means and covariance"
    cost = "training: as tpl, then all earlier heads on frozen features; prediction: one pass per task"
    splits = True
    config_class = MOREConfig
    from_scratch = True
    config: MOREConfig

    def __init__(self, encoder: Encoder, config: MOREConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.centres_ = TaskCentres()
        self.heads_: list[Heads] = []  # a task's own classes, then others

    def conclude(self, task: Task, samples: Samples) -> None:
        """Fit the task's statistics, update the earlier heads with its images, then store some of them."""
        newest = len(self.bank.tasks) - 1
        outputs = self.outputs_of_newest(samples)
        self.centres_.add(outputs, samples.labels)
        self.heads_.append(head_with_others(self.bank.tasks[newest], self.generator("others", newest)))
        if newest and self.config.back_update_epochs:
            self._update_back(newest, samples)
        self.remember(task, outputs.features)

    def _update_back(self, newest: int, samples: Samples) -> None:
        """Train every earlier head on the memory and as many images of the new task."""
        config, generator = self.config, self.generator("back-update", newest)
        chosen = torch.randperm(len(samples), generator=generator)[: max(len(self.memory), 1)]
        fresh = samples.pixels[chosen.to(samples.pixels.device)]
        owner, labels = self.remembered()

        def data(t: int) -> tuple[Tensor, Tensor]:
            others = self.bank.tasks[t].own
            own = torch.where(owner == t, labels, others)
            features = torch.cat([self.memory_outputs_[t].features, self.bank.outputs(fresh, t).features])
            return features, torch.cat([own, torch.full((len(fresh),), others, device=own.device)])

        def rows(group: list[int]) -> Tensor:
            count, batch = len(labels) + len(fresh), config.back_update_batch
            epochs = [epoch_of([count], count, batch, generator) for _ in range(config.back_update_epochs)]
            return torch.cat(epochs).expand(-1, len(group), -1)

        old, rate, momentum = self.heads_[:newest], config.back_update_lr, config.back_update_momentum
        self.heads_[:newest] = train_heads(old, data, rows, rate, momentum)

    def _within(self, outputs: list[Outputs]) -> list[Tensor]:
        """softmax(f / T) of every head over its classes and others; the columns of its own classes."""
        rows = zip(self.heads_, outputs, self.bank.tasks, strict=True)
        return [head.own_probabilities(each.features, task.own, self.config.temperature) for head, each, task in rows]

    def covariance_estimators(self) -> list[str]:
        """How each task's covariance was estimated."""
        return self.centres_.estimators()

    def task_scores(self, outputs: list[Outputs], common: Tensor | None = None) -> Tensor:
        """The largest class score of each task."""
        best = torch.stack([within.amax(dim=1) for within in self._within(outputs)], dim=1)
        return best * DISTANCE_SCALE * self.centres_.closeness(outputs)

    def log_probabilities_of(
        self, outputs: list[Outputs], scores: Tensor | None = None, common: Tensor | None = None
    ) -> Tensor:
        """Every head's probabilities times the task's closeness, normalised."""
        closeness = DISTANCE_SCALE * self.centres_.closeness(outputs)
        raw = [within * closeness[:, t : t + 1] for t, within in enumerate(self._within(outputs))]
        return torch.cat(raw, dim=1).clamp_min(1e-300).log().log_softmax(dim=1)

    def in_distribution_score(self, task: int, outputs: Outputs) -> Tensor:
        """Closeness of the feature to the task's nearest class, which no later task changes."""
        return self.centres_[task].score_features(*outputs)

    def task_state(self, task: int) -> dict[str, Tensor]:
        """The current head, and the statistics."""
        return self.centres_.state(task) | {f"head.{k}": v for k, v in self.heads_[task]._asdict().items()}

    def load_own_state(self, shared: dict[str, Tensor], tasks: list[dict[str, Tensor]]) -> None:
        """Restore heads and statistics."""
        self.centres_.load_state(tasks)
        self.heads_ = [Heads(**under_prefix("head.", own)) for own in tasks]
