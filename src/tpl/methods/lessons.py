"""Training one task under HAT masks, in one bank or side by side in several.

The trunk is frozen and shared, so runs that differ only in class order or seed can be trained in one pass over it:
their adapters, norms, masks and heads are stacked along a first axis, each stack serves its own part of the batch, and
one optimiser moves them all. No number of one network enters another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.engine import IGNORED, Event, GatedSGD, Listener, Recipe, Samples, train
from tpl.nets import AdapterStack, hat
from tpl.nets.adapters import gates

if TYPE_CHECKING:
    from tpl.methods.bank import Bank, TaskModel


@dataclass(frozen=True)
class Lesson:
    """One more task for one bank: `outputs` head outputs, `own` of them the task's classes."""

    bank: Bank
    samples: Samples
    replay: Samples | None
    own: int
    outputs: int
    recipe: Recipe
    generator: torch.Generator
    listen: Listener

    @property
    def kind(self) -> tuple[object, ...]:
        """Lessons of one kind have the same shapes and settings: they can be learned side by side."""
        replayed = self.replay is not None and len(self.replay) > 0
        first = not self.bank.tasks
        trunk = self.bank.encoder.fingerprint
        return trunk, first, len(self.samples), replayed, self.outputs, self.bank.config, self.recipe, self.bank.compute


def learn_lessons(lessons: Sequence[Lesson]) -> None:
    """Train every lesson's task; those of one kind in one pass over the trunk."""
    for _, alike in groupby(sorted(lessons, key=lambda lesson: repr(lesson.kind)), key=lambda lesson: lesson.kind):
        _learn_side_by_side(list(alike))


def _learn_side_by_side(lessons: list[Lesson]) -> None:
    recipe = lessons[0].recipe
    for lesson in lessons:
        lesson.bank.warn_if_full(lesson.listen)
    models = [lesson.bank.new_task(lesson.own, lesson.outputs, lesson.generator) for lesson in lessons]
    objective = HatObjective([lesson.bank for lesson in lessons], models)
    optimiser = recipe.optimiser(objective.parameters())
    objective.protect(optimiser)
    networks = [recipe.batches(lesson.samples, lesson.replay, lesson.generator) for lesson in lessons]
    listeners = [lesson.listen for lesson in lessons]
    train(objective, optimiser, networks, recipe, lessons[0].bank.normalise, listeners)
    objective.hand_back()
    for lesson, model in zip(lessons, models, strict=True):
        lesson.bank.add(model)
        lesson.listen(Event("capacity", lesson.bank.capacity()))


class HatObjective:
    """Cross-entropy plus HAT's regulariser, with the mask annealed inside every epoch (Eq. 2).

    Holds one task of every bank, stacked along a first axis, until they are handed back.
    """

    def __init__(self, banks: Sequence[Bank], models: Sequence[TaskModel]) -> None:
        self.banks, self.models = banks, models
        self.encoder, self.config, self.dtype = banks[0].encoder, banks[0].config, banks[0].compute.dtype
        weights = zip(*(bank.adapters.weights for bank in banks), strict=True)
        self.adapters = AdapterStack(*(_stacked(parts) for parts in weights))
        self.embedding = _stacked([m.embedding for m in models])
        self.norms = _stacked([m.norms for m in models])
        self.head_weight = _stacked([m.head_weight for m in models])
        self.head_bias = _stacked([m.head_bias for m in models])
        used = [b.used for b in banks if b.used is not None]
        self.used = torch.stack(used) if used else None

    def parameters(self) -> list[Tensor]:
        """Everything that is trained."""
        return [*self.adapters, self.embedding, self.norms, self.head_weight, self.head_bias]

    def protect(self, optimiser: GatedSGD) -> None:
        """Hold still every weight that an earlier task uses."""
        if self.used is not None:
            for weights, gate in zip(self.adapters, gates(self.adapters, self.used), strict=True):
                optimiser.gate(weights, gate.detach())

    def losses(self, images: Tensor, labels: Tensor, progress: Tensor) -> Tensor:
        """Every network's loss on its part of the batch, at the scale that belongs to this point of the epoch."""
        s_max = self.config.s_max
        scale = hat.scale_at(progress, s_max)
        if self.config.mask_gradient == "analytic":
            mask: Tensor = hat.AnalyticMask.apply(self.embedding, scale, s_max)  # type: ignore[no-untyped-call]
        else:
            mask = hat.soft_mask(self.embedding, scale)
        weights, norms = self.adapters.fold(mask), self.norms
        if len(self.models) == 1:  # a plain network: without the first axis its products are faster
            weights, norms = AdapterStack(*(w.squeeze(0) for w in weights)), norms.squeeze(0)
        z = self.encoder(images, norms, weights, dtype=self.dtype).unflatten(0, labels.shape)
        logits = torch.baddbmm(self.head_bias.unsqueeze(1), z, self.head_weight.mT)
        entropies = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        counted = (labels != IGNORED).sum(dim=1)
        return entropies.sum(dim=1) / counted + self.config.sparsity * hat.regulariser(mask, self.used)

    def after_backward(self, progress: Tensor) -> None:
        """Free the embedding's gradient from the annealed scale."""
        if self.config.mask_gradient == "autograd" and self.embedding.grad is not None:
            scale = hat.scale_at(progress, self.config.s_max)
            self.embedding.grad = hat.compensate(self.embedding.grad, self.embedding.detach(), scale, self.config.s_max)

    def after_step(self) -> None:
        """Keep the embedding where its sigmoid still has a slope."""
        with torch.no_grad():
            self.embedding.clamp_(-hat.EMBEDDING_BOUND, hat.EMBEDDING_BOUND)

    @torch.no_grad()
    def hand_back(self) -> None:
        """Give every bank and task its trained part of the stacks."""
        for i, (bank, model) in enumerate(zip(self.banks, self.models, strict=True)):
            for own, trained in zip(bank.adapters.weights, self.adapters, strict=True):
                own.copy_(trained[i])
            for name in ("embedding", "norms", "head_weight", "head_bias"):
                model.get_parameter(name).copy_(getattr(self, name)[i])


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.detach() for part in parts]).requires_grad_()
