"""A class-balanced set: a memory, and as many images of every new class as it has of an old one.

A task's new images outnumber what is remembered, and a head trained on both leans to the new classes. A short training
on such a set sets it right: of the whole network (`NetworkMethod.fit` with a shorter recipe), or, over features that
stand still, of a few weights alone (`fit_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from tpl.config import option
from tpl.engine import Recipe, Samples
from tpl.methods.parts.rehearsal import RehearsalConfig


@dataclass(frozen=True)
class BalancingConfig(RehearsalConfig):
    """Options of a method that balances its head by a short training after every task."""

    balanced_epochs: float = option(
        0.1,
        "passes that balance the head after a task, as a share of epochs (20 of 200 published)",
        minimum=0,
        group="training",
    )
    balanced_rate: float = option(0.1, "share of the learning rate at which they begin", above=0, group="training")

    def balancing(self) -> Self | None:
        """The recipe of that training; None if there is to be none."""
        epochs = math.ceil(self.balanced_epochs * self.epochs)
        return self.replace(epochs=epochs, lr=self.lr * self.balanced_rate, schedule="cosine") if epochs else None


def balanced(new: Samples, old: Samples, generator: torch.Generator) -> Samples:
    """All of `old`, and of every class of `new` as many, drawn by lot, as the largest old class has.

    A class with fewer gives all it has. Labels are numbers among all classes; pixels come to the labels' device.
    """
    quota = int(old.labels.bincount().max())
    labels = new.labels.cpu()
    order = torch.randperm(len(labels), generator=generator)
    chosen = torch.cat([order[labels[order] == c][:quota] for c in labels.unique().tolist()])
    pixels = new.pixels[chosen.to(new.pixels.device)].to(old.pixels.device)
    return Samples(torch.cat([old.pixels, pixels]), torch.cat([old.labels, new.labels[chosen.to(new.labels.device)]]))


def fit_rows(
    recipe: Recipe,
    parameters: Sequence[Tensor],
    count: int,
    loss: Callable[[Tensor], Tensor],
    generator: torch.Generator,
) -> None:
    """Train a few weights on what is computed already: `loss` is that of some of `count` rows, given by number."""
    optimiser = recipe.optimiser(parameters)
    for epoch in range(recipe.epochs):
        optimiser.scale_rate(recipe.rate_at(epoch / recipe.epochs))
        for rows in torch.randperm(count, generator=generator).to(parameters[0].device).split(recipe.batch_size):
            optimiser.zero_grad(set_to_none=True)
            loss(rows).backward()
            optimiser.step()
