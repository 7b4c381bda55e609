"""The training loop: a feed of batches, one objective, one gated optimiser."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpl.config import Config, option
from tpl.engine.batches import Batches, Feed, Samples, Turns
from tpl.engine.distributed import SharedStep, check_agreement, current
from tpl.engine.events import Event, Listener
from tpl.engine.optim import GatedSGD
from tpl.engine.recording import records
from tpl.engine.steps import Objective, RecordedStep, Step
from tpl.errors import TplError

SHORTEST_CYCLE = 8  # steps in which a mask can still be annealed


@dataclass(frozen=True)
class Recipe(Config):
    """How long and how fast one task is trained."""

    epochs: int = option(20, "passes over a task's training images", minimum=1, group="training")
    batch_size: int = option(64, "new images a step; as many replayed ones come on top", minimum=1, group="training")
    lr: float = option(0.005, "learning rate", above=0, group="training")
    schedule: str = option(
        "constant",
        "constant: the rate stays (paper); cosine: it falls to zero by the last step",
        ("constant", "cosine"),
        group="training",
    )
    augment: str = option(
        "none",
        "none (public code); mirror: images are turned left to right half of the time; crop: and moved by a few pixels",
        ("none", "mirror", "crop"),
        group="augmentation",
    )
    momentum: float = option(0.9, "momentum of SGD", minimum=0, group="training")
    weight_decay: float = option(
        0.0, "weight decay of SGD: 0 by the paper's text, 5e-4 in the public code", minimum=0, group="training"
    )
    nesterov: bool = option(
        False, "Nesterov momentum: false by the paper's text, true in the public code", group="training"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not 0 < self.momentum < 1:
            raise TplError(f"Nesterov needs a momentum between 0 and 1; got {self.momentum}.")

    def optimiser(self, parameters: Sequence[Tensor]) -> GatedSGD:
        """The optimiser this recipe asks for."""
        return GatedSGD(parameters, self.lr, self.momentum, self.weight_decay, self.nesterov)

    def batches(
        self,
        new: Samples,
        replay: Samples | None,
        generator: torch.Generator,
        numbers: int = 0,
        whole: bool = False,
        turns: Turns | None = None,
    ) -> Batches:
        """The batches this recipe asks for, with `numbers` random numbers a step; `whole`, or with `turns`, or both."""
        mirror, crop = self.augment == "mirror", self.augment == "crop"
        return Batches(new, replay, self.batch_size, generator, mirror, numbers, crop, whole, turns)

    def rate_at(self, done: float) -> float:
        """The share of the learning rate that is left when the share `done` of all steps is."""
        return 1.0 if self.schedule == "constant" else 0.5 + 0.5 * math.cos(math.pi * done)


def cycle_length(steps: int, epochs: int) -> int:
    """Steps in which `progress` runs from 0 to 1: an epoch, or several where epochs are very short.

    A handful of images makes one step an epoch. Annealing inside such an epoch would never leave its start.
    """
    whole_epochs = min(math.ceil(SHORTEST_CYCLE / steps), epochs)
    return steps * whole_epochs


def batches_of_images(batches: Batches, normalise: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """The normalised images of one more epoch, batch by batch, as training sees them."""
    feed = Feed([batches])
    for inputs in feed.epoch():
        yield normalise(feed.gather(*inputs)[0])


def train(
    objective: Objective,
    optimiser: GatedSGD,
    networks: Sequence[Batches],
    recipe: Recipe,
    normalise: Callable[[Tensor], Tensor],
    listeners: Sequence[Listener],
) -> None:
    """Train as long and as fast as the recipe says; a listener for each network.

    The losses are read once an epoch: nothing inside an epoch waits for the device. Where several processes work on a
    run, they share every batch (see `distributed`).
    """
    started, epochs, processes = time.perf_counter(), recipe.epochs, current()
    alike = records(networks[0].new.labels.device)
    feed = Feed(networks, full=alike)
    plain: Step = Step(objective, optimiser, feed, normalise)
    if not processes.alone:
        check_agreement(processes, networks)
        plain = SharedStep(processes, objective, optimiser, feed, normalise)
    step = RecordedStep(plain) if alike and processes.records else plain
    cycle = cycle_length(feed.steps, epochs)
    progress = (torch.arange(cycle, device=feed.device, dtype=torch.float32) / cycle).unbind()
    for epoch in range(epochs):
        plain.total.zero_()
        for number, inputs in enumerate(feed.epoch(), start=epoch * feed.steps):
            if recipe.schedule != "constant":
                optimiser.scale_rate(recipe.rate_at(number / (epochs * feed.steps)))
            step(progress[number % cycle], inputs)
        for loss, listen in zip((plain.total / feed.steps).tolist(), listeners, strict=True):
            if not math.isfinite(loss):
                raise TplError(
                    f"The loss became {loss} in epoch {epoch + 1}: the learning rate is too high for this data. "
                    "Lower it with --lr; nothing of this task was stored."
                )
            listen(Event("epoch", {"epoch": epoch + 1, "epochs": epochs, "loss": loss}))
    if isinstance(plain, SharedStep):
        plain.align()
    seconds = time.perf_counter() - started
    for listen in listeners:
        listen(Event("trained", {"images": epochs * feed.images, "networks": len(networks), "seconds": seconds}))
