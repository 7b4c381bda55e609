"""The kernels of a ResNet-18 for 32-pixel images: which there are, how they lie in one tensor, what holds them still.

A kernel's entry stands still once the unit it feeds and the unit it reads are in use by one of the finished tasks'
masks; all kernels lie in one flat tensor: one gate, one step of the optimiser.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tpl.nets.base import Trainable

STAGES = (2, 2, 2, 2)  # blocks; every stage but the first halves the picture and doubles the channels


class Conv(NamedTuple):
    """One convolution, and which groups of units it reads (None: the image) and feeds."""

    out: int
    into: int
    size: int
    stride: int
    reads: int | None
    feeds: int


class Block(NamedTuple):
    """The numbers of a block's convolutions; without a third, its shortcut is the identity."""

    first: int
    second: int
    shortcut: int | None


@dataclass(frozen=True)
class Layout:
    """Which convolutions a ResNet of some width has, in the order of the forward pass: the stem is the first."""

    width: int

    @cached_property
    def _built(self) -> tuple[list[Conv], list[Block], list[int]]:
        convs, blocks, groups = [Conv(self.width, 3, 3, 1, None, 0)], [], [self.width]
        for stage, count in enumerate(STAGES):
            for number in range(count):
                before, out, stride = groups[-1], self.width << stage, 2 if stage and not number else 1
                entry = len(groups) - 1
                groups += [out, out]
                block = Block(len(convs), len(convs) + 1, len(convs) + 2 if before != out else None)
                convs.append(Conv(out, before, 3, stride, entry, entry + 1))
                convs.append(Conv(out, out, 3, 1, entry + 1, entry + 2))
                if block.shortcut is not None:
                    convs.append(Conv(out, before, 1, stride, entry, entry + 2))
                blocks.append(block)
        return convs, blocks, groups

    @property
    def convs(self) -> list[Conv]:
        """All convolutions; each has a norm behind it."""
        return self._built[0]

    @property
    def blocks(self) -> list[Block]:
        """The residual blocks."""
        return self._built[1]

    @property
    def groups(self) -> list[int]:
        """Units a group: the stem's, then those inside and behind each block."""
        return self._built[2]

    @property
    def channels(self) -> int:
        """Channels of all norms together."""
        return sum(conv.out for conv in self.convs)

    def kernels(self, flat: Tensor) -> list[Tensor]:
        """Each convolution's kernel `[out, in, size, size]` out of one flat tensor."""
        shapes = [(conv.out, conv.into, conv.size, conv.size) for conv in self.convs]
        parts = flat.split([a * b * c * d for a, b, c, d in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    @property
    def identities(self) -> list[int]:
        """Channels of each shortcut that is the identity."""
        return [self.convs[block.second].out for block in self.blocks if block.shortcut is None]

    def per_channel(self, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Masks `[units]` for every channel of the norms, and of the shortcuts that are the identity."""
        groups = masks.split(self.groups)
        ends = [self.convs[block.second].feeds for block in self.blocks if block.shortcut is None]
        return torch.cat([groups[conv.feeds] for conv in self.convs]), torch.cat([groups[end] for end in ends])


@dataclass(frozen=True)
class KernelStack:
    """All kernels `[total]`, or of several networks `[networks, total]`, and the mask they are used under, if any."""

    layout: Layout
    kernels: Tensor
    masks: Tensor | None = None

    def __iter__(self) -> Iterator[Tensor]:
        yield self.kernels
        if self.masks is not None:
            yield self.masks

    def fold(self, masks: Tensor) -> KernelStack:
        """The same kernels beside a mask: it acts behind the norms, so no kernel can take it up."""
        return replace(self, masks=masks)

    def gates(self, used: Tensor) -> KernelStack:
        """Closed where the unit that an entry feeds and the one it reads are in use; an image always is."""
        groups = used.split(self.layout.groups, dim=-1)
        parts = []
        for conv in self.layout.convs:
            held = groups[conv.feeds].unsqueeze(-1)
            if conv.reads is not None:
                held = torch.minimum(held, groups[conv.reads].unsqueeze(-2))
            part = (1 - held).expand(*held.shape[:-1], conv.into).unsqueeze(-1)
            parts.append(part.expand(*part.shape[:-1], conv.size**2).flatten(-3))
        return replace(self, kernels=torch.cat(parts, dim=-1), masks=None)


class Kernels(Trainable):
    """The kernels of all convolutions in one parameter; there are no biases, the norms have them."""

    def __init__(self, layout: Layout, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.layout = layout
        self.kernels = nn.Parameter(torch.empty(sum(c.out * c.into * c.size**2 for c in layout.convs)))
        with torch.no_grad():
            for conv, kernel in zip(layout.convs, layout.kernels(self.kernels), strict=True):
                # He et al., 2015: the deviation that keeps the size of gradients from layer to layer.
                kernel.normal_(std=(2 / (conv.out * conv.size**2)) ** 0.5, generator=generator)

    @property
    def units(self) -> int:
        """Channels behind the stem, inside and behind every block."""
        return sum(self.layout.groups)

    @property
    def weights(self) -> KernelStack:
        """The kernels, every unit open."""
        return self.stack(self.kernels)

    def stack(self, *tensors: Tensor) -> KernelStack:
        """Other tensors in the place of the parameters."""
        return KernelStack(self.layout, *tensors)
