"""Inference in blocks that bound the memory, and that never change an answer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tpl.engine.device import Compute
from tpl.engine.recording import recorded, records

BLOCK = 256
QUAD = 4  # on many CPUs, products over a number of images that is no multiple of four take other paths


class Recording:
    """A function of tensors alone: on a GPU recorded once for inputs of the same shapes and replayed, else just called.

    An answer belongs to whoever asked: the next replay does not write over it.
    """

    def __init__(self, function: Callable[..., Tensor], compute: Compute) -> None:
        self.function, self.compute = function, compute
        self.graph: torch.cuda.CUDAGraph | None = None
        self.static: list[Tensor] = []
        self.answer = torch.empty(0)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The function's value, on the compute device."""
        if not records(self.compute.device):
            return self.function(*inputs)
        if self.graph is None or [t.shape for t in self.static] != [t.shape for t in inputs]:
            self._record(inputs)
        assert self.graph is not None
        for static, value in zip(self.static, inputs, strict=True):
            static.copy_(value)
        self.graph.replay()
        return self.answer.clone()

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        self.static = [value.to(self.compute.device, copy=True) for value in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # libraries choose their kernels before anything is recorded
                self.function(*self.static)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with recorded(self.graph):
            self.answer = self.function(*self.static)


class Inference:
    """`function(images, *weights)` over any number of images, block by block.

    Libraries choose kernels by the batch's size, and kernels round differently. So on a GPU every block is filled up to
    one size: an image's answer has the same bits alone and among thousands. As all of a GPU's blocks are alike, they
    are replays of one recording; weights of the same shapes are inputs of it like the images. On a CPU blocks are
    filled up to a multiple of four, which leaves the same bits on some CPUs and the same answer up to rounding on all.
    """

    def __init__(
        self, function: Callable[..., Tensor], compute: Compute, normalise: Callable[[Tensor], Tensor]
    ) -> None:
        self.function, self.compute, self.normalise = function, compute, normalise
        self._ask = Recording(self._plain, compute)

    def __call__(self, pixels: Tensor, *weights: Tensor) -> Tensor:
        """The function's values for samples (uint8 pixels, or vectors), on the compute device."""
        size = BLOCK if records(self.compute.device) else QUAD
        parts = []
        with torch.no_grad():
            for part in pixels.split(BLOCK):
                count = len(part)
                if missing := -max(count, 1) % size + (count == 0):
                    part = torch.cat([part, part.new_zeros(missing, *part.shape[1:])])
                block = part.to(self.compute.device, non_blocking=True)
                parts.append(self._ask(block, *weights)[:count])
            return torch.cat(parts)

    def _plain(self, pixels: Tensor, *weights: Tensor) -> Tensor:
        return self.function(self.normalise(pixels), *weights)
