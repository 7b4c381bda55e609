"""The bank: all task models in one network, kept apart by a protection such as HAT's masks.

The encoder is shared, and so are the weights trained in it: adapters, or all of a network that starts from scratch. A
task owns its mask, its norms and its head. While it is trained, the protection holds still every weight that an earlier
task uses, so an old task's features never change: with binary masks not by a single bit.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tpl.engine import Compute, Event, Listener, Samples
from tpl.methods.bank.asking import Question, asking
from tpl.methods.bank.lessons import Lesson, learn_lessons
from tpl.methods.bank.protect import PROTECTIONS, ProtectConfig
from tpl.methods.bank.techniques import Technique
from tpl.methods.base import Method
from tpl.nets import Encoder, Trainable, Weights
from tpl.scores.conformal import smallest_share, unknown_scores
from tpl.stream import Task

NEARLY_FULL = 0.95
ENOUGH_TO_HOLD_OUT = 5  # samples of a class; one with fewer needs them all


class Outputs(NamedTuple):
    """What one task's model says of some images."""

    features: Tensor  # [n, dim]
    logits: Tensor  # [n, own classes]


class HeldOut(NamedTuple):
    """Images that were not trained on, as their own task's model sees them."""

    features: Tensor  # [n, dim]
    labels: Tensor  # [n], the task's own classes

    def without(self, own: int) -> HeldOut:
        """All but one class; later ones move up."""
        kept = self.labels != own
        labels = self.labels[kept]
        return HeldOut(self.features[kept], labels - (labels > own).long())


class TaskModel(nn.Module):
    """What one task owns; `embedding` is what the protection keeps of it."""

    def __init__(self, own: int, embedding: Tensor, norms: Tensor, head_weight: Tensor, head_bias: Tensor) -> None:
        super().__init__()
        self.embedding = nn.Parameter(embedding, requires_grad=embedding.is_floating_point())
        self.norms = nn.Parameter(norms)
        self.head_weight = nn.Parameter(head_weight)
        self.head_bias = nn.Parameter(head_bias)
        self.own = own  # the first `own` outputs are the task's classes, what follows stands for others

    def own_head(self) -> tuple[Tensor, Tensor]:
        """Weights and biases of the task's own classes."""
        return self.head_weight[: self.own].detach(), self.head_bias[: self.own].detach()

    def drop(self, row: int) -> None:
        """Remove one output of the head."""
        kept = torch.arange(len(self.head_bias), device=self.head_bias.device) != row
        self.own -= row < self.own
        for name in ("head_weight", "head_bias"):
            setattr(self, name, nn.Parameter(getattr(self, name).detach()[kept], requires_grad=False))


class Bank:
    """The set of task models in one network."""

    def __init__(
        self,
        encoder: Encoder,
        config: ProtectConfig,
        compute: Compute,
        normalise: Callable[[Tensor], Tensor],
        generator: torch.Generator,
        technique: type[Technique] = Technique,
    ) -> None:
        self.encoder, self.config, self.compute, self.normalise = encoder, config, compute, normalise
        self.technique = technique  # how heads are trained and read
        self.protection = PROTECTIONS[config.protect](config)
        self.adapters: Trainable = encoder.new_adapters(config.latent, generator).to(compute.device)
        self.protection.prepare(self.adapters)
        self.tasks: list[TaskModel] = []
        self.used: Tensor | None = None  # units that some finished task holds
        self.retired: Tensor | None = None  # units of tasks that are gone: their weights are never trained again
        self.same_as: Bank | None = None  # the bank that every task here was copied from, if there is one
        self._ask = asking(self, encoder, compute)

    def weights(self, task: int) -> Weights:
        """The shared weights as a finished task sees them."""
        return self.protection.finished(self.adapters.weights, self.tasks[task].embedding.detach())

    def unit_mask(self, task: int) -> Tensor | None:
        """How far each unit is open for a finished task, if masks are over units."""
        return self.protection.claim(self.tasks[task].embedding.detach())

    def outputs(self, pixels: Tensor, task: int) -> Outputs:
        """Features and own-class logits of uint8 images under a finished task's model."""
        return self.answers(pixels, [Question(task)])[0]

    def answers(self, pixels: Tensor, questions: Sequence[Question]) -> list[Outputs]:
        """The same for several tasks, each of its own choice of the images: quicker than one by one, the same bits."""
        with torch.no_grad():
            features = self._ask(pixels, questions)
        return [Outputs(seen, self.logits(seen, task)) for seen, (task, _) in zip(features, questions, strict=True)]

    def logits(self, features: Tensor, task: int) -> Tensor:
        """What a finished task's head says of its own classes.

        Computed in float64: to float32, the number of images that share the product then makes no difference.
        """
        model = self.tasks[task]
        with torch.no_grad():
            return self.technique.logits(features, *model.own_head()).float()

    def restart(self, retired: Tensor | None) -> None:
        """Hold no task, with the units of tasks long gone in use."""
        self.tasks, self.used, self.retired = [], retired, retired

    def add(self, model: TaskModel) -> None:
        """Take up a finished task: freeze it and claim its units."""
        self.same_as = None
        self.tasks.append(model.requires_grad_(False).to(self.compute.device))
        self.used = _joined(self.used, self.unit_mask(len(self.tasks) - 1))

    @torch.no_grad()
    def copy_newest(self, other: Bank) -> None:
        """Take up the newest task of a bank that was the same as this one before."""
        followed = not self.tasks or self.same_as is other
        for own, trained in zip(self.adapters.weights, other.adapters.weights, strict=True):
            own.copy_(trained)
        self.add(copy.deepcopy(other.tasks[-1]))
        self.same_as = other if followed else None

    def retire(self, task: int) -> None:
        """Let a task go. Its units stay in use: other tasks may share them, and none may move them."""
        self.retired = _joined(self.retired, self.unit_mask(task))
        self.same_as = None
        del self.tasks[task]

    def capacity(self) -> dict[str, float]:
        """How full the network is: the share of units in use, and of shared weights that are frozen."""
        return self.protection.capacity(self.adapters, self.used)

    def new_task(self, own: int, outputs: int, generator: torch.Generator) -> TaskModel:
        """An untrained task with `outputs` head outputs, `own` of them its classes."""
        dim = self.encoder.dim
        bound = dim**-0.5  # torch's own initialisation of a linear layer
        head = torch.empty(outputs, dim).uniform_(-bound, bound, generator=generator)
        bias = torch.empty(outputs).uniform_(-bound, bound, generator=generator)
        embedding = self.protection.initial(self.adapters, generator)
        return TaskModel(own, embedding, self.encoder.new_norms(), head, bias).to(self.compute.device)

    def warn_if_full(self, listen: Listener) -> None:
        """Tell that hardly any weight is left to learn with."""
        frozen = self.capacity()["frozen"]
        if frozen >= NEARLY_FULL:
            text = (
                f"{frozen:.1%} of the shared weights belong to earlier tasks. A new task still gets its own norms, "
                f"mask and head, but hardly any free weights; a model with a larger latent size (a wider network, if "
                f"it is trained from scratch) has more room."
            )
            listen(Event("warning", {"text": text}))


def within_tasks(outputs: list[Outputs]) -> Tensor:
    """log P(class | image, task) of every task, side by side, `[n, classes]`."""
    return torch.cat([seen.logits.double().log_softmax(dim=1) for seen in outputs], dim=1)


def _joined(used: Tensor | None, claim: Tensor | None) -> Tensor | None:
    return claim if used is None or claim is None else torch.maximum(used, claim)


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
        """Task models asked about an image, on average over images with these `common_features`."""
        return float(len(self.bank.tasks))

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
