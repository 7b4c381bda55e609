"""The training loop: batches of new and replayed images, one objective, one gated optimiser."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tpl.config import Config, option
from tpl.engine.events import Event, Listener
from tpl.engine.optim import GatedSGD
from tpl.errors import TplError

SHORTEST_CYCLE = 8  # steps in which a mask can still be annealed


@dataclass(frozen=True)
class Recipe(Config):
    """How long and how fast one task is trained."""

    epochs: int = option(20, "passes over a task's training images", minimum=1)
    batch_size: int = option(64, "new images a step; as many replayed ones come on top", minimum=1)
    lr: float = option(0.005, "learning rate, constant", above=0)
    momentum: float = option(0.9, "momentum of SGD", minimum=0)
    weight_decay: float = option(0.0, "weight decay of SGD: 0 by the paper's text, 5e-4 in the public code", minimum=0)
    nesterov: bool = option(False, "Nesterov momentum: false by the paper's text, true in the public code")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not 0 < self.momentum < 1:
            raise TplError(f"Nesterov needs a momentum between 0 and 1; got {self.momentum}.")


class Objective(Protocol):
    """What a method wants of the loop.

    `progress` is how far through the epoch a step is, from 0 up to but not including 1 (see `cycle_length`). It lives
    on the device, and an objective must not branch on its value: on a GPU a step is recorded once and replayed.
    """

    def loss(self, images: Tensor, labels: Tensor, progress: Tensor) -> Tensor:
        """The loss of one batch of normalised images."""

    def after_backward(self, progress: Tensor) -> None:
        """Called with gradients in place, before the optimiser's step."""

    def after_step(self) -> None:
        """Called when the parameters have moved."""


@dataclass(frozen=True)
class Samples:
    """Images as uint8 pixels `[n, 3, size, size]` and their labels, both on the device."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


class Batches:
    """Shuffled batches of new samples, each joined by as many replayed ones.

    Replay draws from its own endless row of permutations, so the ratio stays 1:1 whatever the sizes.
    """

    def __init__(self, new: Samples, replay: Samples | None, batch_size: int, generator: torch.Generator) -> None:
        self.new, self.replay = new, replay if replay is not None and len(replay) else None
        self.batch_size, self.generator = batch_size, generator
        self._replay_order = torch.zeros(0, dtype=torch.long)

    @property
    def steps(self) -> int:
        """Steps an epoch."""
        return math.ceil(len(self.new) / self.batch_size)

    def epoch(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass over the new samples: rows of `new` and of `replay` (none without replay), on the device."""
        device = self.new.pixels.device
        order = torch.randperm(len(self.new), generator=self.generator).to(device)
        old = (self._next_replay(len(order)) if self.replay is not None else order[:0]).to(device)
        pairs = order.split(self.batch_size), old.split(self.batch_size) if len(old) else (old,) * self.steps
        yield from zip(*pairs, strict=True)

    def gather(self, rows: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels and labels of one batch."""
        pixels, labels = self.new.pixels[rows], self.new.labels[rows]
        if self.replay is not None:
            pixels = torch.cat([pixels, self.replay.pixels[old]])
            labels = torch.cat([labels, self.replay.labels[old]])
        return pixels, labels

    def _next_replay(self, count: int) -> Tensor:
        assert self.replay is not None
        while len(self._replay_order) < count:
            fresh = torch.randperm(len(self.replay), generator=self.generator)
            self._replay_order = torch.cat([self._replay_order, fresh])
        rows, self._replay_order = self._replay_order[:count], self._replay_order[count:]
        return rows


class Step:
    """One training step, from row numbers to moved parameters; adds its loss to `total`."""

    def __init__(
        self, objective: Objective, optimiser: GatedSGD, batches: Batches, normalise: Callable[[Tensor], Tensor]
    ) -> None:
        self.objective, self.optimiser, self.batches, self.normalise = objective, optimiser, batches, normalise
        self.total = torch.zeros((), device=batches.new.pixels.device)

    def __call__(self, rows: Tensor, old: Tensor, progress: Tensor) -> None:
        """Forward, backward, update."""
        pixels, labels = self.batches.gather(rows, old)
        self.optimiser.zero_grad(set_to_none=True)
        loss = self.objective.loss(self.normalise(pixels), labels, progress)
        loss.backward()
        self.objective.after_backward(progress)
        self.optimiser.step()
        self.objective.after_step()
        self.total += loss.detach()


class RecordedStep:
    """The same step, recorded as a CUDA graph after a few plain ones and replayed from then on.

    A small network at a small batch is bound by launching kernels; a replay launches them all at once.
    Batches of another size, such as an epoch's last, take the plain step.
    """

    WARM_UP = 3  # plain steps that allocate momentum and let libraries choose their kernels

    def __init__(self, step: Step) -> None:
        self.step = step
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done = 0
        self.inputs: tuple[Tensor, ...] = ()
        self.side = torch.cuda.Stream()

    def __call__(self, rows: Tensor, old: Tensor, progress: Tensor) -> None:
        """Replay the recording where it fits."""
        inputs = (rows, old, progress)
        full = len(rows) == self.step.batches.batch_size
        if full and self.graph is None and self.done >= self.WARM_UP:
            self._record(inputs)
        if full and self.graph is not None:
            for static, value in zip(self.inputs, inputs, strict=True):
                static.copy_(value)
            self.graph.replay()
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.step(*inputs)
        torch.cuda.current_stream().wait_stream(self.side)
        self.done += full

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        self.inputs = tuple(value.clone() for value in inputs)
        self.step.optimiser.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(*self.inputs)
        self.graph = graph


def cycle_length(steps: int, epochs: int) -> int:
    """Steps in which `progress` runs from 0 to 1: an epoch, or several where epochs are very short.

    A handful of images makes one step an epoch. Annealing inside such an epoch would never leave its start.
    """
    whole_epochs = min(math.ceil(SHORTEST_CYCLE / steps), epochs)
    return steps * whole_epochs


def train(
    objective: Objective,
    optimiser: GatedSGD,
    batches: Batches,
    epochs: int,
    normalise: Callable[[Tensor], Tensor],
    listen: Listener,
) -> None:
    """Train for `epochs` epochs at a constant rate, as the paper does.

    The loss is read once an epoch: nothing inside an epoch waits for the device.
    """
    plain = Step(objective, optimiser, batches, normalise)
    device = batches.new.pixels.device
    step = RecordedStep(plain) if device.type == "cuda" else plain
    cycle = cycle_length(batches.steps, epochs)
    progress = (torch.arange(cycle, device=device, dtype=torch.float32) / cycle).unbind()
    for epoch in range(epochs):
        plain.total.zero_()
        for number, (rows, old) in enumerate(batches.epoch(), start=epoch * batches.steps):
            step(rows, old, progress[number % cycle])
        mean = float(plain.total) / batches.steps
        if not math.isfinite(mean):
            raise TplError(
                f"The loss became {mean} in epoch {epoch + 1}: the learning rate is too high for this data. "
                "Lower it with --lr; nothing of this task was stored."
            )
        listen(Event("epoch", {"epoch": epoch + 1, "epochs": epochs, "loss": mean}))
