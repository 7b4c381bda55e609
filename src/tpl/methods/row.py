"""ROW: out-of-distribution detection with replay for task prediction (Kim et al., ICML 2023).

Tasks are trained like TPL's; each has two more heads on the frozen features. The one for classes (WP) is tuned on the
new task's images alone. The one for tasks (TP) is trained again after every task, for all tasks: the task's own images
in the memory against all others. With temperature 5,

    P(class c of task j | x) ~ softmax(WP_j)_c * max_c softmax(TP_j)_c * MD_j / sum_i MD_i,    MD_j = max_c 1 / d_M

where d_M uses 0.8 Sigma + 0.2 I. The public code initialises its adapters with a constant 1e-26, which half precision
rounds to a zero that cannot be trained; here they are initialised as in all methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tpl.config import option
from tpl.engine import Compute, Samples
from tpl.methods.bank import BankMethod, MemoryConfig, Outputs
from tpl.methods.bank.heads import Heads, TaskCentres, epoch_of, fit_heads, head_with_others, train_heads
from tpl.methods.base import register
from tpl.nets import Encoder
from tpl.store import under_prefix
from tpl.stream import Task

SHRINKAGE = 0.2  # of the covariance towards the identity


@dataclass(frozen=True)
class ROWConfig(MemoryConfig):
    """ROW's options beyond those of training."""

    class_head_epochs: int = option(
        5, "passes over a new task that tune its head for classes", minimum=0, group="training"
    )
    task_head_epochs: int = option(
        10, "passes over the memory that train every task's head for tasks", minimum=0, group="training"
    )
    head_batch: ClassVar[int] = 32  # images a step of both; as many of others come on top in the second
    temperature: float = option(5.0, "temperature of both heads' softmax", above=0, group="task prediction")


@register
class ROW(BankMethod):
    """A head for classes, a head for tasks, and a Mahalanobis distance."""

    name = "row"
    summary = "task models under HAT masks; a head for classes and one for tasks, trained on replay, times MD"
    paper = "Kim et al., Learnability and Algorithm for Continual Learning, ICML 2023"
    keeps = "a class-balanced memory; a task's mask, norms, three heads, means and covariance"
    cost = "training: as tpl, then two heads per task on frozen features; prediction: one pass per task"
    splits = True
    config_class = ROWConfig
    from_scratch = True
    config: ROWConfig

    def __init__(self, encoder: Encoder, config: ROWConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.centres_ = TaskCentres(SHRINKAGE)
        self.class_heads_: list[Heads] = []
        self.task_heads_: list[Heads] = []

    def conclude(self, task: Task, samples: Samples) -> None:
        """Fit statistics and train both heads with the task's images, then store some of them."""
        newest = len(self.bank.tasks) - 1
        outputs = self.outputs_of_newest(samples)
        self.centres_.add(outputs, samples.labels)
        head = head_with_others(self.bank.tasks[newest], self.generator("others", newest))
        self.class_heads_.append(self._tuned(head, outputs.features, samples.labels) if newest else head)
        self.task_heads_.append(head)
        if newest and self.config.task_head_epochs:
            self._train_task_heads(newest, outputs.features, samples)
        self.remember(task, outputs.features)

    def _tuned(self, head: Heads, features: Tensor, labels: Tensor) -> Heads:
        """WP: the head trained further on the task's own images alone."""
        config, count, generator = self.config, len(labels), self.generator("class head")
        epochs = [epoch_of([count], count, config.head_batch, generator) for _ in range(config.class_head_epochs)]
        rows = torch.cat(epochs) if epochs else torch.zeros(0, 1, 1, dtype=torch.long)
        return fit_heads(head, features.unsqueeze(0), labels.unsqueeze(0), rows, config.lr, config.momentum)

    def _train_task_heads(self, newest: int, features: Tensor, samples: Samples) -> None:
        """TP: every task's images against all others', from the memory and as many images of each new class."""
        config, generator = self.config, self.generator("task heads", newest)
        chosen = self._as_many_as_stored(samples, generator)
        fresh = samples.pixels[chosen.to(samples.pixels.device)]
        owner, own_labels = self.remembered()
        own_labels = torch.cat([own_labels, samples.labels[chosen.to(samples.labels.device)]])
        owner = torch.cat([owner, torch.full((len(chosen),), newest, device=owner.device)])
        remembered = self.memory.pixels(self.preprocess, self.compute.device)

        def data(t: int) -> tuple[Tensor, Tensor]:
            if t < newest:
                parts = [self.memory_outputs_[t].features, self.bank.outputs(fresh, t).features]
            else:
                parts = [self.bank.outputs(remembered, t).features, features[chosen.to(features.device)]]
            return torch.cat(parts), torch.where(owner == t, own_labels, self.bank.tasks[t].own)

        def rows(group: list[int]) -> Tensor:
            epochs, owner_here = range(config.task_head_epochs), owner.cpu()  # once: no draw waits for the device
            drawn = [[self._paired(owner_here == t, generator) for t in group] for _ in epochs]
            return torch.cat([torch.cat(heads, dim=1) for heads in drawn])

        self.task_heads_ = train_heads(self.task_heads_, data, rows, config.lr, config.momentum)

    def _as_many_as_stored(self, samples: Samples, generator: torch.Generator) -> Tensor:
        """Random rows of the new task: of each class at most as many as the memory has of an old one."""
        classes = int(samples.labels.max()) + 1
        quota = max(len(self.memory) // max(len(self.classes_), 1), 1)
        labels, chosen = samples.labels.cpu(), []
        for c in range(classes):
            members = torch.nonzero(labels == c).squeeze(1)
            chosen.append(members[torch.randperm(len(members), generator=generator)[:quota]])
        return torch.cat(chosen)

    def _paired(self, mine: Tensor, generator: torch.Generator) -> Tensor:
        """One epoch, `[steps, 1, 2 batch]`: own rows and as many others' rows; the smaller set is repeated.

        `mine` says of every row whether it is the task's own, on the CPU.
        """
        sides = [torch.nonzero(side).squeeze(1) for side in (mine, ~mine)]
        length, batch = max(len(side) for side in sides), self.config.head_batch
        drawn = epoch_of([len(side) for side in sides], length, batch, generator)
        parts = [
            torch.where(drawn[:, i] >= 0, side[drawn[:, i].clamp_min(0)] if len(side) else -1, -1)
            for i, side in enumerate(sides)
        ]
        return torch.cat(parts, dim=1).unsqueeze(1)

    def closeness(self, outputs: list[Outputs]) -> Tensor:
        """MD_j / sum_i MD_i of every task, `[n, tasks]`."""
        closeness = self.centres_.closeness(outputs)
        return closeness / closeness.sum(dim=1, keepdim=True)

    def covariance_estimators(self) -> list[str]:
        """How each task's covariance was estimated."""
        return self.centres_.estimators()

    def task_scores(self, outputs: list[Outputs], common: Tensor | None = None) -> Tensor:
        """The task head's confidence that an image is the task's, times the share of MD."""
        if len(outputs) == 1:  # no other task to compare with
            return self.closeness(outputs)
        confidences = [
            head.own_probabilities(each.features, task.own, self.config.temperature).amax(dim=1)
            for head, each, task in zip(self.task_heads_, outputs, self.bank.tasks, strict=True)
        ]
        return torch.stack(confidences, dim=1) * self.closeness(outputs)

    def log_probabilities_of(
        self, outputs: list[Outputs], scores: Tensor | None = None, common: Tensor | None = None
    ) -> Tensor:
        """Class probabilities within the task, times the task's score, normalised."""
        scores = self.task_scores(outputs) if scores is None else scores
        parts = []
        for t, (head, each) in enumerate(zip(self.class_heads_, outputs, strict=True)):
            logits = head.logits(each.features.unsqueeze(0))[0, :, : self.bank.tasks[t].own]
            within = (logits / self.config.temperature).log_softmax(dim=1)
            parts.append(within + scores[:, t : t + 1].clamp_min(1e-300).log())
        return torch.cat(parts, dim=1).log_softmax(dim=1)

    def in_distribution_score(self, task: int, outputs: Outputs) -> Tensor:
        """Closeness of the feature to the task's nearest class, which no later task changes."""
        return self.centres_[task].score_features(*outputs)

    def task_state(self, task: int) -> dict[str, Tensor]:
        """Both current heads, and the statistics."""
        both = {"class_head": self.class_heads_[task], "task_head": self.task_heads_[task]}
        heads = {f"{name}.{k}": v for name, head in both.items() for k, v in head._asdict().items()}
        return self.centres_.state(task) | heads

    def load_own_state(self, shared: dict[str, Tensor], tasks: list[dict[str, Tensor]]) -> None:
        """Restore heads and statistics."""
        self.centres_.load_state(tasks)
        self.class_heads_ = [Heads(**under_prefix("class_head.", own)) for own in tasks]
        self.task_heads_ = [Heads(**under_prefix("task_head.", own)) for own in tasks]
