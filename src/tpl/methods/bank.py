"""The bank: all task models in one network, kept apart by HAT masks.

The frozen encoder and the adapters are shared. A task owns a mask embedding, its layer norms and
its head. While a task is trained, gates hold still every adapter weight that an earlier task uses,
so an old task's features never change: with binary masks not by a single bit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.config import Config, option
from tpl.engine import Compute, Event, Inference, Listener, Samples
from tpl.methods.base import Method
from tpl.methods.lessons import Lesson, learn_lessons
from tpl.nets import Adapters, AdapterStack, Encoder, hat
from tpl.scores.conformal import smallest_share, unknown_scores
from tpl.stream import Task

NEARLY_FULL = 0.95
ENOUGH_TO_HOLD_OUT = 5  # samples of a class; one with fewer needs them all


@dataclass(frozen=True)
class HatConfig(Config):
    """The network a task is learned in."""

    latent: int = option(64, "hidden units of an adapter", minimum=1)
    masks: str = option("binary", "binary: no drift at all; soft: the paper's near-binary ones", ("binary", "soft"))
    s_max: float = option(400.0, "largest scale of the mask's sigmoid", above=1)
    sparsity: float = option(0.75, "weight of HAT's regulariser", minimum=0)
    mask_gradient: str = option(
        "autograd", "autograd with compensation, as published; analytic: its closed form", ("autograd", "analytic")
    )


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
    """What one task owns."""

    def __init__(self, own: int, embedding: Tensor, norms: Tensor, head_weight: Tensor, head_bias: Tensor) -> None:
        super().__init__()
        self.embedding = nn.Parameter(embedding)
        self.norms = nn.Parameter(norms)
        self.head_weight = nn.Parameter(head_weight)
        self.head_bias = nn.Parameter(head_bias)
        self.own = own  # the first `own` outputs are the task's classes, what follows stands for others

    def logits(self, features: Tensor) -> Tensor:
        """All outputs of the head, others included.

        Computed in float64: to float32, the number of images that share the product then makes no difference.
        """
        return F.linear(features.double(), self.head_weight.double(), self.head_bias.double()).float()

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
        config: HatConfig,
        compute: Compute,
        normalise: Callable[[Tensor], Tensor],
        generator: torch.Generator,
    ) -> None:
        self.encoder, self.config, self.compute, self.normalise = encoder, config, compute, normalise
        self.adapters: Adapters = encoder.new_adapters(config.latent, generator).to(compute.device)
        self.tasks: list[TaskModel] = []
        self.used: Tensor | None = None  # units that some finished task holds
        self.retired: Tensor | None = None  # units of tasks that are gone: their weights are never trained again
        self._features = Inference(
            lambda images, norms, *weights: encoder(images, norms, AdapterStack(*weights), dtype=compute.dtype),
            compute,
            normalise,
        )

    def mask(self, task: int) -> Tensor:
        """The mask of a finished task."""
        return hat.task_mask(self.tasks[task].embedding.detach(), self.config.s_max, self.config.masks)

    def outputs(self, pixels: Tensor, task: int) -> Outputs:
        """Features and own-class logits of uint8 images under a finished task's model."""
        model = self.tasks[task]
        with torch.no_grad():
            weights = self.adapters.weights.fold(self.mask(task))
            features = self._features(pixels, model.norms, *weights)
            return Outputs(features, model.logits(features)[:, : model.own])

    def restart(self, retired: Tensor | None) -> None:
        """Hold no task, with the units of tasks long gone in use."""
        self.tasks, self.used, self.retired = [], retired, retired

    def add(self, model: TaskModel) -> None:
        """Take up a finished task: freeze it and claim its units."""
        self.tasks.append(model.requires_grad_(False).to(self.compute.device))
        self.used = _joined(self.used, self.mask(len(self.tasks) - 1))

    def retire(self, task: int) -> None:
        """Let a task go. Its units stay in use: other tasks may share them, and none may move them."""
        self.retired = _joined(self.retired, self.mask(task))
        del self.tasks[task]

    def capacity(self) -> dict[str, float]:
        """How full the network is: the share of units in use, and of adapter weights that are frozen."""
        if self.used is None:
            return {"units": 0.0, "frozen": 0.0}
        return {"units": hat.capacity_used(self.used), "frozen": hat.frozen_share(self.adapters.gates(self.used))}

    def new_task(self, own: int, outputs: int, generator: torch.Generator) -> TaskModel:
        """An untrained task with `outputs` head outputs, `own` of them its classes."""
        dim = self.encoder.dim
        bound = dim**-0.5  # torch's own initialisation of a linear layer
        head = torch.empty(outputs, dim).uniform_(-bound, bound, generator=generator)
        bias = torch.empty(outputs).uniform_(-bound, bound, generator=generator)
        embedding = torch.randn(self.adapters.units, generator=generator)
        return TaskModel(own, embedding, self.encoder.new_norms(), head, bias).to(self.compute.device)

    def warn_if_full(self, listen: Listener) -> None:
        """Tell that hardly any weight is left to learn with."""
        frozen = self.capacity()["frozen"]
        if frozen >= NEARLY_FULL:
            text = (
                f"{frozen:.1%} of the adapters' weights belong to earlier tasks. A new task still gets its own norms, "
                f"mask and head, but hardly any free weights; a model with a larger latent size has more room."
            )
            listen(Event("warning", {"text": text}))


def _joined(used: Tensor | None, mask: Tensor) -> Tensor:
    return mask if used is None else torch.maximum(used, mask)


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
    def task_scores(self, outputs: list[Outputs]) -> Tensor:
        """How much each task claims each image, `[n, tasks]`."""

    @abstractmethod
    def log_probabilities_of(self, outputs: list[Outputs], scores: Tensor | None = None) -> Tensor:
        """log P(class | image) from every task's outputs; `scores` are their task scores if already computed."""

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
        return self.bank.config.masks == "binary"

    def outputs(self, pixels: Tensor, known: list[Outputs] | None = None) -> list[Outputs]:
        """Every task's features and logits; those already `known` are not computed again."""
        known = known or []
        return known + [self.bank.outputs(pixels, t) for t in range(len(known), len(self.bank.tasks))]

    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """log P(class | image) by asking every task."""
        return self.log_probabilities_of(self.outputs(pixels))

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
        features, model = self.held_[task].features, self.bank.tasks[task]
        with torch.no_grad():
            logits = model.logits(features)[:, : model.own]
            return self.knownness(task, Outputs(features, logits)).sort().values

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
