"""Rehearsal: one network, trained on every task together with a memory of old images.

`RehearsalMethod` has a memory with equally many images of every class. `Reservoir` is another memory: a uniform sample
of all images seen. `replay_batches` says how new and remembered images share the steps. In their shuffled union, new
images outnumber remembered ones, and a head trained on both prefers the new classes. A short training on a
class-balanced set corrects that: of the whole network (`NetworkMethod.fit` with a shorter recipe), or, over frozen
features, of a few weights alone (`fit_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from tpl.config import option
from tpl.engine import Batches, Callback, Compute, Recipe, RotationClasses, Samples
from tpl.memory import FEATURE_POLICIES, POLICIES, Memory, encode
from tpl.methods.parts.network import NetworkConfig, NetworkMethod
from tpl.nets import Encoder
from tpl.stream import ImageSet, Preprocess, Task

UNION, BALANCED = "union", "balanced"  # values of `replay_batches`


@dataclass(frozen=True)
class ExemplarConfig(NetworkConfig):
    """Options of a method with one network and a memory; a step has as many remembered images as new ones."""

    memory: int = option(2000, "images kept for replay, all classes together", minimum=0, group="memory")
    memory_policy: str = option(
        "random",
        "which images of a class are kept; herding: those whose mean feature stays closest to the class's",
        (*POLICIES, *FEATURE_POLICIES),
        group="memory",
    )


@dataclass(frozen=True)
class RehearsalConfig(ExemplarConfig):
    """Options of a method that trains one network on new and remembered images."""

    replay_batches: str = option(
        UNION,
        "union: new and remembered images are shuffled together, each is shown once an epoch (as published); balanced: "
        "as many remembered images come on top of the new ones of every step",
        (UNION, BALANCED),
        group="memory",
    )

    def batches(
        self,
        new: Samples,
        replay: Samples | None,
        generator: torch.Generator,
        numbers: int = 0,
        whole: bool = False,
        rotations: RotationClasses | None = None,
    ) -> Batches:
        """The batches of this recipe: of the union, or of new and of remembered images."""
        if replay is not None and self.replay_batches == UNION:
            new, replay = union(new, replay), None
        return super().batches(new, replay, generator, numbers, whole, rotations)

    def times_shown(self, new: Samples, old: Samples | None, classes: int) -> Tensor:
        """How often an epoch shows each class, `[classes]`: what a method that weighs classes by frequency counts."""
        shown = new.labels.bincount(minlength=classes).double()
        if old is not None:
            each = 1.0 if self.replay_batches == UNION else len(new) / len(old)
            shown += each * old.labels.bincount(minlength=classes)
        return shown


def union(new: Samples, old: Samples) -> Samples:
    """All samples of both, where the new ones are stored; labels are numbers among all classes."""
    return Samples(torch.cat([new.pixels, old.pixels.to(new.pixels.device)]), torch.cat([new.labels, old.labels]))


class RehearsalMethod(NetworkMethod):
    """One growing head, and a memory with equally many images of every class; the first task has new images alone."""

    config_class: ClassVar[type[ExemplarConfig]] = RehearsalConfig
    config: ExemplarConfig
    memory: Memory

    def __init__(self, encoder: Encoder, config: ExemplarConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.memory = Memory(config.memory, config.memory_policy, seed)

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Grow the head, train on new and remembered images, then store some of the new ones."""
        self.fit(self.grow(task, samples), callback, replay=self.old_samples())
        self.remember(task, samples)

    def old_samples(self) -> Samples | None:
        """The memory's images, labelled by their class numbers; None while it is empty."""
        if not len(self.memory):
            return None
        device = self.compute.device
        return Samples(self.memory.pixels(self.preprocess, device), self.memory.labels.to(device))

    def remember(self, task: Task, samples: Samples) -> None:
        """Store some images of a task that was just trained; `samples` are its images as the encoder takes them."""
        features = self.features(samples.pixels) if self.memory.ranks_by_features else None
        self.memory.add(task.train, len(task.classes), self.preprocess, self.compute.device, features)

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Drop the class's row of the head, and its images."""
        super().remove_class(task, own, number)
        self.memory.remove(number)


# Class-balanced training


@dataclass(frozen=True)
class BalancingConfig(RehearsalConfig):
    """Options of a method that balances its head by a short training after every task."""

    balanced_epochs: float = option(
        0.1,
        "passes that balance the head after a task, as a share of epochs (20 of 200 published)",
        minimum=0,
        group="training",
    )
    balanced_rate: ClassVar[float] = 0.1  # share of the learning rate at which they begin

    def balancing(self) -> Self | None:
        """The recipe of the balanced training; None where it has no epochs."""
        epochs = math.ceil(self.balanced_epochs * self.epochs)
        return self.replace(epochs=epochs, lr=self.lr * self.balanced_rate, schedule="cosine") if epochs else None


def balanced(new: Samples, old: Samples, generator: torch.Generator) -> Samples:
    """All of `old`, and a random choice of every class of `new`, as many as the largest old class has.

    A class with fewer images gives all it has. Labels are numbers among all classes; pixels move to the device of the
    old ones.
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
    """Train a few weights on precomputed features: `loss` takes the numbers of some of the `count` rows."""
    optimiser = recipe.optimiser(parameters)
    for epoch in range(recipe.epochs):
        optimiser.scale_rate(recipe.rate_at(epoch / recipe.epochs))
        for rows in torch.randperm(count, generator=generator).to(parameters[0].device).split(recipe.batch_size):
            optimiser.zero_grad(set_to_none=True)
            loss(rows).backward()
            optimiser.step()


# Reservoir sampling


@dataclass(frozen=True)
class Admission:
    """The reservoir's choice: rows of the memory that stay, and of the new images that enter, in their new order."""

    kept: Tensor
    entering: Tensor
    keys: Tensor  # of both, the kept ones first


@dataclass
class Reservoir(Memory):
    """A uniform sample of all images seen, whatever their classes: the `budget` images with the smallest random keys.

    Reservoir sampling keeps every image of a stream with the same probability, budget / seen. With random keys the
    sample is the same, and the choice depends on no count of the past and on nothing that is learned: it is known
    before a task is trained, and a smaller budget keeps a subset of a larger one's images.

    Images enter through `admit` and `take`; `add` and `redraw` are for memories with equal shares, and know no keys.
    Keys, and other tensors that belong to an image, are part of the method's state: one row an image, in the order of
    `labels`. Their names start with `memory.`, so that they do not count as parameters.
    """

    keys: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    def admit(self, labels: Tensor, generator: torch.Generator) -> Admission:
        """Choose among new images, labelled within their task; nothing is stored yet."""
        labels = labels.cpu()
        drawn = torch.rand(len(labels), dtype=torch.float64, generator=generator)
        keys = torch.cat([self.keys, drawn])
        stays = torch.zeros(len(keys), dtype=torch.bool)
        stays[keys.argsort()[: self.budget]] = True
        kept, entering = (torch.nonzero(part).squeeze(1) for part in stays.split([len(self.keys), len(labels)]))
        entering = entering[labels[entering].argsort(stable=True)]  # class by class, the order of the memory
        return Admission(kept, entering, torch.cat([self.keys[kept], drawn[entering]]))

    def take(self, admission: Admission, images: ImageSet, classes: int, preprocess: Preprocess) -> None:
        """Store the admitted images of a task with `classes` new classes."""
        labels = np.asarray(images.labels)
        fresh: list[list[bytes]] = [[] for _ in range(classes)]
        for i in admission.entering.tolist():
            fresh[labels[i]].append(encode(preprocess.shrink(images.load(i))))
        stayed: list[list[bytes]] = [[] for _ in self.exemplars]
        flat = [image for images_ in self.exemplars for image in images_]
        owners = self.labels.tolist()
        for row in admission.kept.tolist():
            stayed[owners[row]].append(flat[row])
        self.restore([*stayed, *fresh])
        self.keys = admission.keys

    def remove(self, c: int) -> Tensor:
        """Drop a class and its images; later classes move up. Returns which rows stayed."""
        stayed = super().remove(c)
        self.keys = self.keys[stayed]
        return stayed
