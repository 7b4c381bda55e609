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
from tpl.engine import Batches, Compute, Event, GatedSGD, Listener, Recipe, Samples, in_batches, train
from tpl.methods.base import Method
from tpl.nets import Adapters, Encoder, hat

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

    def mask(self, task: int) -> Tensor:
        """The mask of a finished task."""
        return hat.task_mask(self.tasks[task].embedding.detach(), self.config.s_max, self.config.masks)

    def features(self, images: Tensor, model: TaskModel, mask: Tensor) -> Tensor:
        """Features of normalised images under one task's norms and a mask."""
        z: Tensor = self.encoder(images, model.norms, self.adapters, mask)
        return z.float()

    def outputs(self, pixels: Tensor, task: int) -> Outputs:
        """Features and own-class logits of uint8 images under a finished task's model."""
        model, mask = self.tasks[task], self.mask(task)
        z = in_batches(lambda images: self.features(images, model, mask), pixels, self.compute, self.normalise)
        with torch.no_grad():
            return Outputs(z, model.logits(z)[:, : model.own])

    def learn(
        self,
        samples: Samples,
        replay: Samples | None,
        own: int,
        outputs: int,
        recipe: Recipe,
        generator: torch.Generator,
        listen: Listener,
    ) -> None:
        """Train one more task with `outputs` head outputs, `own` of them its classes."""
        self._warn_if_full(listen)
        model = self._new_task(own, outputs, generator).to(self.compute.device)
        objective = HatObjective(self, model)
        optimiser = GatedSGD(
            [*self.adapters.parameters(), *model.parameters()],
            lr=recipe.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            nesterov=recipe.nesterov,
        )
        if self.used is not None:
            for name, gate in self.adapters.gates(self.used).items():
                optimiser.gate(self.adapters.get_parameter(name), gate)
        batches = Batches(samples, replay, recipe.batch_size, generator)
        train(objective, optimiser, batches, recipe.epochs, self.normalise, listen)
        self.add(model)
        listen(Event("capacity", self.capacity()))

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

    def _new_task(self, own: int, outputs: int, generator: torch.Generator) -> TaskModel:
        dim = self.encoder.dim
        bound = dim**-0.5  # torch's own initialisation of a linear layer
        head = torch.empty(outputs, dim).uniform_(-bound, bound, generator=generator)
        bias = torch.empty(outputs).uniform_(-bound, bound, generator=generator)
        embedding = torch.randn(self.adapters.units, generator=generator)
        return TaskModel(own, embedding, self.encoder.new_norms(), head, bias)

    def _warn_if_full(self, listen: Listener) -> None:
        frozen = self.capacity()["frozen"]
        if frozen >= NEARLY_FULL:
            text = (
                f"{frozen:.1%} of the adapters' weights belong to earlier tasks. A new task still gets its own norms, "
                f"mask and head, but hardly any free weights; a model with a larger latent size has more room."
            )
            listen(Event("warning", {"text": text}))


class HatObjective:
    """Cross-entropy plus HAT's regulariser, with the mask annealed inside every epoch (Eq. 2)."""

    def __init__(self, bank: Bank, model: TaskModel) -> None:
        self.bank, self.model, self.config = bank, model, bank.config

    def loss(self, images: Tensor, labels: Tensor, progress: Tensor) -> Tensor:
        """Loss of one batch, at the scale that belongs to this point of the epoch."""
        s_max = self.config.s_max
        scale, embedding = hat.scale_at(progress, s_max), self.model.embedding
        if self.config.mask_gradient == "analytic":
            mask: Tensor = hat.AnalyticMask.apply(embedding, scale, s_max)  # type: ignore[no-untyped-call]
        else:
            mask = hat.soft_mask(embedding, scale)
        with self.bank.compute.autocast():
            z = self.bank.features(images, self.model, mask)
        sparsity = self.config.sparsity * hat.regulariser(mask, self.bank.used)
        return F.cross_entropy(self.model.logits(z), labels) + sparsity

    def after_backward(self, progress: Tensor) -> None:
        """Free the embedding's gradient from the annealed scale."""
        embedding = self.model.embedding
        if self.config.mask_gradient == "autograd" and embedding.grad is not None:
            scale = hat.scale_at(progress, self.config.s_max)
            embedding.grad = hat.compensate(embedding.grad, embedding.detach(), scale, self.config.s_max)

    def after_step(self) -> None:
        """Keep the embedding where its sigmoid still has a slope."""
        with torch.no_grad():
            self.model.embedding.clamp_(-hat.EMBEDDING_BOUND, hat.EMBEDDING_BOUND)


class BankMethod(Method):
    """A method that asks every task's model and then weighs what they say.

    The two steps are apart so that outputs that cannot change are computed once, and so that a trained bank serves
    every way of weighing.
    """

    bank: Bank

    @abstractmethod
    def task_scores(self, outputs: list[Outputs]) -> Tensor:
        """How much each task claims each image, `[n, tasks]`."""

    @abstractmethod
    def log_probabilities_of(self, outputs: list[Outputs]) -> Tensor:
        """log P(class | image) from every task's outputs."""

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
