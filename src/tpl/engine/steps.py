"""One training step: plain, or recorded once on a GPU and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tpl.engine.batches import DRAWS, Feed, Inputs
from tpl.engine.optim import GatedSGD
from tpl.engine.recording import recorded


class Objective(Protocol):
    """What a method wants of the loop.

    `progress` is how far through the epoch a step is, from 0 up to but not including 1 (see `cycle_length`). It lives
    on the device, and an objective must not branch on its value: on a GPU a step is recorded once and replayed.
    """

    def losses(self, images: Tensor, labels: Tensor, progress: Tensor, draws: Tensor) -> Tensor:
        """The loss of every network, `[networks]`, on its part of a batch of normalised images.

        `labels` is `[networks, batch]`; rows labelled `IGNORED` do not count. `draws` are the step's random numbers,
        `[networks, numbers]`.
        """

    def after_backward(self, progress: Tensor) -> None:
        """Called with gradients in place, before the optimiser's step."""

    def after_step(self) -> None:
        """Called when the parameters have moved."""


class Step:
    """One training step, from row numbers to moved parameters; adds its losses to `total`."""

    def __init__(
        self, objective: Objective, optimiser: GatedSGD, feed: Feed, normalise: Callable[[Tensor], Tensor]
    ) -> None:
        self.objective, self.optimiser, self.feed, self.normalise = objective, optimiser, feed, normalise
        self.total = torch.zeros(len(feed.networks), device=feed.device)

    def __call__(self, progress: Tensor, inputs: Inputs) -> None:
        """Forward, backward, update."""
        pixels, labels = self.batch(inputs)
        self.optimiser.zero_grad(set_to_none=True)
        draws = inputs[DRAWS][:, : self.feed.numbers]  # the rest was for the feed itself
        losses = self.objective.losses(self.normalise(pixels), labels, progress, draws)
        losses = self.backward(losses)
        self.objective.after_backward(progress)
        self.optimiser.step()
        self.objective.after_step()
        self.total += losses

    def batch(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Pixels and labels to learn from."""
        return self.feed.gather(*inputs)

    def backward(self, losses: Tensor) -> Tensor:
        """Put the gradients in place; gives the losses as numbers."""
        losses.sum().backward()  # the networks share no parameter: each gets its own gradient
        return losses.detach()


class RecordedStep:
    """The same step, recorded as a CUDA graph after a few plain ones and replayed from then on.

    A small network at a small batch is bound by launching kernels; a replay launches them all at once. Every step must
    have the same shapes: the feed fills its batches up.
    """

    WARM_UP = 3  # plain steps that allocate momentum and let libraries choose their kernels

    def __init__(self, step: Step) -> None:
        self.step = step
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done = 0
        self.static: Inputs = ()
        self.side = torch.cuda.Stream()

    def __call__(self, progress: Tensor, inputs: Inputs) -> None:
        """A plain step first, then replays of the recording."""
        if self.graph is None and self.done >= self.WARM_UP:
            self._record(progress, inputs)
        if self.graph is not None:
            for static, value in zip(self.static, (progress, *inputs), strict=True):
                static.copy_(value)
            self.graph.replay()
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.step(progress, inputs)
        torch.cuda.current_stream().wait_stream(self.side)
        self.done += 1

    def _record(self, progress: Tensor, inputs: Inputs) -> None:
        self.static = tuple(value.clone() for value in (progress, *inputs))
        self.step.optimiser.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with recorded(graph):
            self.step(self.static[0], self.static[1:])
        self.graph = graph
