"""What all methods over a bank share: learning by lessons, answers in two steps, and telling unknown images."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tpl.engine import Listener, Samples
from tpl.methods.bank.asking import Question
from tpl.methods.bank.bank import Bank, Outputs
from tpl.methods.bank.lessons import Lesson, learn_lessons
from tpl.methods.base import Method
from tpl.scores.conformal import smallest_share, unknown_scores
from tpl.stream import Task

ENOUGH_TO_HOLD_OUT = 5  # samples of a class; one with fewer needs them all


class HeldOut(NamedTuple):
    """Images that were not trained on, as their own task's model sees them."""

    features: Tensor  # [n, dim]
    labels: Tensor  # [n], the task's own classes

    def without(self, own: int) -> HeldOut:
        """All but one class; later ones move up."""
        kept = self.labels != own
        labels = self.labels[kept]
        return HeldOut(self.features[kept], labels - (labels > own).long())


class BankMethod(Method):
    """A method that asks every task's model and then weighs what they say.

    The two steps are apart so that outputs that cannot change are computed once, and so that a trained bank serves
    every way of weighing.
    """

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

    def passes(self, common: Tensor | None = None) -> float:
        """Passes through task models for an answer, on average over images with these `common_features`."""
        return float(len(self.bank.tasks) * len(self.bank.looks))

    def answers(self, pixels: Tensor, questions: Sequence[Question]) -> list[Outputs]:
        """Features and logits of some tasks, each of the images it is asked about."""
        return self.bank.answers(pixels, questions)

    def outputs_of(self, task: int, pixels: Tensor) -> Outputs:
        """One task's features and logits."""
        return self.answers(pixels, [Question(task)])[0]

    def outputs(self, pixels: Tensor, known: list[Outputs] | None = None) -> list[Outputs]:
        """Every task's features and logits; those already `known` are not computed again."""
        known = known or []
        return known + self.answers(pixels, [Question(t) for t in range(len(known), len(self.bank.tasks))])

    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """log P(class | image) by asking every task."""
        return self.log_probabilities_of(self.outputs(pixels), common=self.common_features(pixels))

    # Images held out of training: what tells known from unknown ones

    def hold_out(self, held: Samples) -> None:
        """Keep the features of the newest task's held-out images."""
        self._extend_held_out(len(self.bank.tasks) - 1, held)

    def _extend_held_out(self, task: int, held: Samples) -> None:
        features, before = self.bank.outputs(held.pixels, task).features, self.held_[task]
        labels = held.labels.to(before.labels.device)
        self.held_[task] = HeldOut(torch.cat([before.features, features]), torch.cat([before.labels, labels]))
        self._held_scores = None

    def held_out_knownness(self, task: int) -> Tensor:
        """Knownness of a task's held-out images under its own model, sorted."""
        features = self.held_[task].features
        return self.knownness(task, Outputs(features, self.bank.logits(features, task))).sort().values

    def unknown_scores_of(self, outputs: list[Outputs]) -> Tensor:
        """1 - the largest conformal p-value of any task, from every task's outputs."""
        tasks = range(len(self.bank.tasks))
        if self._held_scores is None:
            self._held_scores = [self.held_out_knownness(t) for t in tasks]
        return unknown_scores([self.knownness(t, outputs[t]) for t in tasks], self._held_scores)

    def unknown_scores(self, pixels: Tensor) -> Tensor:
        """How little each image looks like any class learned, by asking every task."""
        return self.unknown_scores_of(self.outputs(pixels))

    def smallest_rejected_share(self) -> float:
        """The smallest share of known images at which any image can be rejected at all."""
        return smallest_share([held.labels for held in self.held_])
