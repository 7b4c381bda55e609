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
from tpl.stream import Task

NEARLY_FULL = 0.95


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
        """All outputs of the head, others included."""
        return F.linear(features, self.head_weight, self.head_bias)


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

    def add(self, model: TaskModel) -> None:
        """Take up a finished task: freeze it and claim its units."""
        self.tasks.append(model.requires_grad_(False).to(self.compute.device))
        mask = self.mask(len(self.tasks) - 1)
        self.used = mask if self.used is None else torch.maximum(self.used, mask)

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


class BankMethod(Method):
    """A method that asks every task's model and then weighs what they say.

    The two steps are apart so that outputs that cannot change are computed once, and so that a trained bank serves
    every way of weighing.
    """

    bank: Bank

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
