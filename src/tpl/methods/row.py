"""ROW: out-of-distribution detection with replay for task prediction (Kim et al., ICML 2023).

Tasks are trained as TPL's are; two more heads a task stand on the frozen features. The one for classes (WP) is tuned on
the new task's images alone. The one for tasks (TP) is trained after every task, for all tasks: the task's own images
in the memory against everybody else's. With temperature 5,

    P(class c of task j | x) ~ softmax(WP_j)_c * max_c softmax(TP_j)_c * MD_j / sum_i MD_i,    MD_j = max_c 1 / d_M

where d_M uses 0.8 Sigma + 0.2 I. The public code leaves its adapters at a constant 1e-26 at the start, which half
precision turns into a zero that cannot learn; here they start as everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpl.config import option
from tpl.engine import Compute, Samples
from tpl.methods.bank import BankMethod, MemoryConfig, Outputs
from tpl.methods.bank.heads import Heads, TaskCentres, alike, epoch_of, fit_heads, head_with_others, joined
from tpl.methods.base import register
from tpl.nets import Encoder
from tpl.state import beginning_with
from tpl.stream import Task

SHRINKAGE = 0.2  # of the covariance towards the identity


@dataclass(frozen=True)
class ROWConfig(MemoryConfig):
    """ROW's options beyond those of training."""

    class_head_epochs: int = option(5, "passes over a new task that tune its head for classes", minimum=0)
    task_head_epochs: int = option(10, "passes over the memory that train every task's head for tasks", minimum=0)
    head_batch: int = option(32, "images a step of both; as many of others come on top in the second", minimum=1)
    temperature: float = option(5.0, "temperature of both heads' softmax", above=0)


@register
class ROW(BankMethod):
    """A head for classes, a head for tasks, and a Mahalanobis distance."""

    name = "row"
    summary = "task models under HAT masks; a head for classes and one for tasks, trained on replay, times MD"
    paper = "Kim et al., Learnability and Algorithm for Continual Learning, ICML 2023"
    keeps = "a class-balanced memory; a task's mask, norms, three heads, means and covariance"
    cost = "as tpl, then two heads a task on frozen features; a pass a task and answer"
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
        """Statistics and both heads while the task's images are here, then the memory."""
        newest = len(self.bank.tasks) - 1
        outputs = self.outputs_of_newest(samples)
        self.centres_.add(outputs, samples.labels)
        head = head_with_others(self.bank.tasks[newest], self.generator("others", newest))
        self.class_heads_.append(self._tuned(head, outputs.features, samples.labels) if newest else head)
        self.task_heads_.append(head)
        if newest:
            self._train_task_heads(newest, outputs.features, samples)
        self.remember(task)

    def _tuned(self, head: Heads, features: Tensor, labels: Tensor) -> Heads:
        """WP: the head trained on with the task's own images alone."""
        config, count, generator = self.config, len(labels), self.generator("class head")
        epochs = [epoch_of([count], count, config.head_batch, generator) for _ in range(config.class_head_epochs)]
        rows = torch.cat(epochs) if epochs else torch.zeros(0, 1, 1, dtype=torch.long)
        return fit_heads(head, features.unsqueeze(0), labels.unsqueeze(0), rows, config.lr, config.momentum)

    def _train_task_heads(self, newest: int, features: Tensor, samples: Samples) -> None:
        """TP: every task's images against all others', from the memory and as many of the new task's a class."""
        config, generator = self.config, self.generator("task heads", newest)
        some = self._like_the_memory(samples, generator)
        fresh = samples.pixels[some.to(samples.pixels.device)]
        owner, own_labels = self.remembered()
        own_labels = torch.cat([own_labels, samples.labels[some.to(samples.labels.device)]])
        owner = torch.cat([owner, torch.full((len(some),), newest, device=owner.device)])
        remembered = self.memory.pixels(self.preprocess, self.compute.device)
        for group in alike(self.task_heads_):
            data, truth = [], []
            for t in group:
                if t < newest:
                    parts = [self.memory_outputs_[t].features, self.bank.outputs(fresh, t).features]
                else:
                    parts = [self.bank.outputs(remembered, t).features, features[some.to(features.device)]]
                data.append(torch.cat(parts))
                truth.append(torch.where(owner == t, own_labels, self.bank.tasks[t].own))
            rows = [
                torch.cat([self._paired(owner == t, generator) for t in group], dim=1)
                for _ in range(config.task_head_epochs)
            ]
            if rows:
                start = joined([self.task_heads_[t] for t in group])
                trained = fit_heads(
                    start, torch.stack(data), torch.stack(truth), torch.cat(rows), config.lr, config.momentum
                )
                for t, head in zip(group, trained.apart(), strict=True):
                    self.task_heads_[t] = head

    def _like_the_memory(self, samples: Samples, generator: torch.Generator) -> Tensor:
        """Rows of the new task: as many of each class as the memory has of an old one, where there are so many."""
        classes = int(samples.labels.max()) + 1
        quota = max(len(self.memory) // max(len(self.classes_), 1), 1)
        labels, chosen = samples.labels.cpu(), []
        for c in range(classes):
            members = torch.nonzero(labels == c).squeeze(1)
            chosen.append(members[torch.randperm(len(members), generator=generator)[:quota]])
        return torch.cat(chosen)

    def _paired(self, mine: Tensor, generator: torch.Generator) -> Tensor:
        """One epoch, `[steps, 1, 2 batch]`: own rows beside others' rows; the fewer are repeated."""
        sides = [torch.nonzero(side).squeeze(1).cpu() for side in (mine, ~mine)]
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

    def task_scores(self, outputs: list[Outputs], common: Tensor | None = None) -> Tensor:
        """How sure the head for tasks is that an image is the task's, times the share of MD."""
        if len(outputs) == 1:  # nobody to tell it from
            return self.closeness(outputs)
        sure = []
        for t, (head, seen) in enumerate(zip(self.task_heads_, outputs, strict=True)):
            answer = (head.logits(seen.features.unsqueeze(0))[0] / self.config.temperature).softmax(dim=1)
            sure.append(answer[:, : self.bank.tasks[t].own].amax(dim=1))
        return torch.stack(sure, dim=1) * self.closeness(outputs)

    def log_probabilities_of(
        self, outputs: list[Outputs], scores: Tensor | None = None, common: Tensor | None = None
    ) -> Tensor:
        """Class within the task, times the task's score, scaled to add up."""
        scores = self.task_scores(outputs) if scores is None else scores
        answers = []
        for t, (head, seen) in enumerate(zip(self.class_heads_, outputs, strict=True)):
            logits = head.logits(seen.features.unsqueeze(0))[0, :, : self.bank.tasks[t].own]
            within = (logits / self.config.temperature).log_softmax(dim=1)
            answers.append(within + scores[:, t : t + 1].clamp_min(1e-300).log())
        return torch.cat(answers, dim=1).log_softmax(dim=1)

    def in_distribution_score(self, task: int, outputs: Outputs) -> Tensor:
        """How close the feature is to the task's nearest class: no later task changes it."""
        return self.centres_[task].score_features(*outputs)

    def task_state(self, task: int) -> dict[str, Tensor]:
        """Both heads as they are now, and the statistics."""
        both = {"class_head": self.class_heads_[task], "task_head": self.task_heads_[task]}
        heads = {f"{name}.{k}": v for name, head in both.items() for k, v in head._asdict().items()}
        return self.centres_.state(task) | heads

    def load_own_state(self, shared: dict[str, Tensor], tasks: list[dict[str, Tensor]]) -> None:
        """Heads and statistics back."""
        self.centres_.load_state(tasks)
        self.class_heads_ = [Heads(**beginning_with("class_head.", own)) for own in tasks]
        self.task_heads_ = [Heads(**beginning_with("task_head.", own)) for own in tasks]
