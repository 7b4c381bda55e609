"""What all methods over a bank share: learning by lessons, answers in two steps, and telling unknown images."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tpl.engine import Listener, Samples
from tpl.methods.bank.asking import Question
from tpl.methods.bank.bank import Bank, Outputs
from tpl.methods.bank.lessons import Lesson, learn_lessons
from tpl.methods.base import UNKNOWN, Answers, Method
from tpl.scores.conformal import smallest_share, unknown_scores
from tpl.stream import Task

ENOUGH_TO_HOLD_OUT = 5  # samples of a class; one with fewer needs them all


class HeldOut(NamedTuple):
    """Images that were not trained on, as their own task's model sees them."""

    features: Tensor  # [n, dim]
    labels: Tensor  # [n], the task's own classes
    common: Tensor | None = None  # [n, ...], what tells which tasks would be asked about them, where not all are

    def without(self, own: int) -> HeldOut:
        """All but one class; later ones move up."""
        kept = self.labels != own
        labels = self.labels[kept]
        common = None if self.common is None else self.common[kept]
        return HeldOut(self.features[kept], labels - (labels > own).long(), common)

    def extended(self, more: HeldOut) -> HeldOut:
        """With more images; what is missing of some of them is missing of all."""
        if not len(self.labels):
            return more
        common = None if self.common is None or more.common is None else torch.cat([self.common, more.common])
        return HeldOut(torch.cat([self.features, more.features]), torch.cat([self.labels, more.labels]), common)

    def tensors(self) -> dict[str, Tensor]:
        """What there is, by name."""
        return {name: tensor for name, tensor in self._asdict().items() if tensor is not None}


@dataclass(frozen=True)
class Seen:
    """What task models say of some images."""

    outputs: list[Outputs]  # one entry a task: of all images, or of those the task was asked about
    common: Tensor | None = None  # [n, ...], the method's `common_features`
    asked: Tensor | None = None  # [n, tasks], which tasks were asked about each image; None: every task about every one
    by: Method | None = None  # whose `common` it is

    def cpu(self) -> Seen:
        """The same in the CPU's memory."""
        outputs = [Outputs(*(column.cpu() for column in each)) for each in self.outputs]
        common, asked = (None if part is None else part.cpu() for part in (self.common, self.asked))
        return Seen(outputs, common, asked, self.by)

    @classmethod
    def joined(cls, parts: Sequence[Seen]) -> Seen:
        """Several groups of images as one."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(part.outputs for part in parts), strict=True)
        outputs = [Outputs(*(torch.cat(column) for column in zip(*each, strict=True))) for each in columns]
        common, asked = (_stacked([getattr(part, name) for part in parts]) for name in ("common", "asked"))
        return cls(outputs, common, asked, parts[0].by)


def _stacked(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


class BankMethod(Method):
    """A method that asks every task's model and then weighs what they say.

    The two steps are apart so that outputs that cannot change are computed once, and so that a trained bank serves
    every way of weighing.
    """

    has_task_models = True
    bank: Bank
    held_: list[HeldOut]  # one entry a task; empty where nothing was held out
    _held_scores: list[Tensor] | None = None  # their knownness, sorted, once somebody has asked

    @abstractmethod
    def lesson(self, task: Task, samples: Samples, listen: Listener) -> Lesson:
        """What is to be trained for one more task."""

    @abstractmethod
    def conclude(self, task: Task, samples: Samples) -> None:
        """Keep what later stages need of a task, now that its model is trained: the data will be gone."""

    @abstractmethod
    def task_scores(self, outputs: list[Outputs], common: Tensor | None = None) -> Tensor:
        """How much each task claims each image, `[n, tasks]`; `common` are its `common_features`, if any."""

    @abstractmethod
    def log_probabilities_of(
        self, outputs: list[Outputs], scores: Tensor | None = None, common: Tensor | None = None
    ) -> Tensor:
        """log P(class | image) from every task's outputs.

        `scores` are their task scores if already computed, `common` the `common_features` of a method that has any.
        """

    @abstractmethod
    def knownness(self, task: int, outputs: Outputs) -> Tensor:
        """How sure a task is to know each image, by what no later task can change, `[n]`."""

    def learn_task(self, task: Task, samples: Samples, listen: Listener) -> None:
        """Train the task's model and conclude."""
        learn_lessons([self.lesson(task, samples, listen)])
        self.conclude(task, samples)

    @property
    def outputs_are_final(self) -> bool:
        """Whether a task's outputs on an image stay the same for ever."""
        return self.bank.protection.final

    def common_features(self, pixels: Tensor) -> Tensor | None:
        """What a method sees of images beside its tasks' models, if anything; no task changes it."""
        return None

    def capacity(self) -> dict[str, float] | None:
        """How full the network is."""
        return self.bank.capacity()

    def task_features(self, pixels: Tensor, task: int) -> Tensor:
        """Features of images under one task's model."""
        return self.bank.outputs(pixels, task).features

    def answers(self, pixels: Tensor, questions: Sequence[Question]) -> list[Outputs]:
        """Features and logits of some tasks, each of the images it is asked about."""
        return self.bank.answers(pixels, questions)

    def outputs_of(self, task: int, pixels: Tensor) -> Outputs:
        """One task's features and logits."""
        return self.answers(pixels, [Question(task)])[0]

    def outputs(self, pixels: Tensor, known: list[Outputs] | None = None) -> list[Outputs]:
        """Every task's features and logits; those already `known` are not computed again."""
        known = known or []
        missing = [Question(t) for t in range(len(known), len(self.bank.tasks))]
        return known + self.answers(pixels, missing) if missing else known

    def forward(self, pixels: Tensor, want: Collection[str] = (), before: Seen | None = None) -> Seen:
        """Every task's features and logits, and the method's `common_features`."""
        return Seen(self.outputs(pixels, self._still_true(before)), self._common(pixels, before), by=self)

    def _common(self, pixels: Tensor, before: Seen | None) -> Tensor | None:
        """The `common_features`, which are the same as before if it was this method that saw the images."""
        return before.common if before is not None and before.by is self else self.common_features(pixels)

    def _still_true(self, before: Seen | None) -> list[Outputs]:
        """What tasks said before and would say again: all, unless a new task has moved them."""
        if before is None or (not self.outputs_are_final and len(before.outputs) < len(self.bank.tasks)):
            return []
        return before.outputs

    def decide(self, seen: Sequence[Seen], want: Collection[str] = (), scores: Tensor | None = None) -> Answers:
        """Task scores and probabilities from what every task says; `scores` are given if they are known already."""
        all_ = Seen.joined(seen)
        scores = self.task_scores(all_.outputs, all_.common) if scores is None else scores
        log_p = self.log_probabilities_of(all_.outputs, scores, all_.common)
        unknown = self.unknown_scores_of(all_.outputs) if UNKNOWN in want else None
        passes = torch.full_like(log_p[:, 0], len(self.bank.tasks) * len(self.bank.looks), dtype=torch.long)
        return Answers(log_p, scores, unknown, passes)

    def shares_forward(self, other: Method) -> bool:
        """Whether the other's bank is the one that this was copied from, and both only read what it says."""
        return (
            isinstance(other, BankMethod)
            and other.bank is self.bank.same_as
            and self.outputs_are_final
            and all(type(method).answers is BankMethod.answers for method in (self, other))
            and self.bank.looks == other.bank.looks
        )

    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """log P(class | image) by asking the tasks."""
        return self.answer(pixels).log_p

    # Images held out of training: what tells known from unknown ones

    def hold_out(self, held: Samples) -> None:
        """Keep the features of the newest task's held-out images."""
        self._extend_held_out(len(self.bank.tasks) - 1, held)

    def _extend_held_out(self, task: int, held: Samples) -> None:
        features, before = self.bank.outputs(held.pixels, task).features, self.held_[task]
        more = HeldOut(features, held.labels.to(before.labels.device), self.held_common(held.pixels))
        self.held_[task] = before.extended(more)
        self._held_scores = None

    def held_common(self, pixels: Tensor) -> Tensor | None:
        """What is kept of held-out images to tell which tasks would be asked about them; None if all always are."""
        return None

    def held_out_knownness(self, task: int) -> Tensor:
        """Knownness of a task's held-out images under its own model, sorted."""
        features = self.held_[task].features
        return self.knownness(task, Outputs(features, self.bank.logits(features, task))).sort().values

    def held_scores(self) -> list[Tensor]:
        """`held_out_knownness` of every task, computed once."""
        if self._held_scores is None:
            self._held_scores = [self.held_out_knownness(t) for t in range(len(self.bank.tasks))]
        return self._held_scores

    def unknown_scores_of(self, outputs: list[Outputs]) -> Tensor:
        """1 - the largest conformal p-value of any task, from every task's outputs."""
        return unknown_scores([self.knownness(t, each) for t, each in enumerate(outputs)], self.held_scores())

    def rejection_floor(self) -> float:
        """The smallest share of known images at which any image can be rejected at all."""
        return smallest_share(self.held_scores())
