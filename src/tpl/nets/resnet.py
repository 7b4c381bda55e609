"""A ResNet-18 for 32-pixel images that is trained from scratch, under masks.

There is no frozen trunk: all kernels are shared by the tasks and trained under a protection. Masks act behind the stem,
inside every block and behind every block's sum:

    x_0 = m_0 * relu(N(K_0 x)),    h = m_1 * relu(N(K_1 x)),    x' = m_2 * relu(N(K_2 h) + S(x))

S is the identity, or a norm of a 1 x 1 convolution where the size changes. m_2 closes a channel of the sum whatever
either side says, so a channel that is closed in a task is zero for all that reads it, the next shortcut included. Every
norm N is a batch norm of the task's own. A kernel's entry stands still once the unit it feeds and the unit it reads
are in use by one of the finished tasks' masks; all kernels lie in one flat tensor: one gate, one step of the optimiser.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.errors import TplError
from tpl.nets.base import Encoder, Trainable, Weights
from tpl.nets.compact import DATA_CONFIG

NAME = "resnet18"
WIDTH = 64
STAGES = (2, 2, 2, 2)  # blocks; every stage but the first halves the picture and doubles the channels
EPSILON = 1e-5


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

    def per_channel(self, masks: Tensor) -> tuple[list[Tensor], Tensor]:
        """Masks `[units]` by group, and for every channel of the norms."""
        groups = masks.split(self.groups)
        return list(groups), torch.cat([groups[conv.feeds] for conv in self.convs])


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


class ResNetEncoder(Encoder):
    """The architecture alone: kernels, norms and masks are passed in.

    A task's norms are `[4, channels]`: scales, shifts, and the means and variances that answers go by.
    """

    pretrained = False
    batch_norms = True

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layout = Layout(width)
        self.name = NAME if width == WIDTH else f"{NAME}:{width}"
        # No weights come with it, so what there is to tell apart is what it computes.
        self.fingerprint = hashlib.sha256(f"{NAME} {self.layout.convs} {EPSILON}".encode()).hexdigest()
        self.sha256, self.weights = self.fingerprint, None
        self.data_config = dict(DATA_CONFIG)
        self.dim = self.layout.groups[-1]

    def new_adapters(self, latent: int, generator: torch.Generator | None = None) -> Kernels:
        """Fresh kernels; there are no adapters, and `latent` says nothing."""
        return Kernels(self.layout, generator)

    def new_norms(self) -> Tensor:
        """Norms that only standardise."""
        ones, zeros = torch.ones(self.layout.channels), torch.zeros(self.layout.channels)
        return torch.stack([ones, zeros, zeros, ones])

    def forward(
        self,
        images: Tensor,
        norms: Tensor,
        weights: Iterable[Tensor],
        dtype: torch.dtype = torch.float32,
        learning: bool = False,
        notice: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Features `[n, dim]`, float32, of one network; `notice` is told what goes into every norm."""
        flat, *masks = weights
        layout, affine = self.layout, norms[:2]
        opened: list[Tensor] | None = None
        if masks:
            opened, per_channel = layout.per_channel(masks[0])
            affine = affine * per_channel  # relu(m y) = m relu(y): masks are not negative
        sizes = [conv.out for conv in layout.convs]
        affines, statistics = affine.split(sizes, dim=1), norms[2:].detach().split(sizes, dim=1)
        kernels = layout.kernels(flat.to(dtype))

        def through(number: int, x: Tensor) -> Tensor:
            conv = layout.convs[number]
            y = F.conv2d(x, kernels[number], stride=conv.stride, padding=conv.size // 2)
            if notice is not None:
                notice(y)
            scale, shift = affines[number]
            mean, variance = (None, None) if learning else statistics[number]
            return F.batch_norm(y, mean, variance, scale, shift, learning, eps=EPSILON)

        x = F.relu(through(0, images.to(dtype)))
        for number, block in enumerate(layout.blocks):
            y = through(block.second, F.relu(through(block.first, x)))
            if block.shortcut is not None:
                x = through(block.shortcut, x)
            elif opened is not None:
                x = x * opened[2 * number + 2].to(dtype).view(-1, 1, 1)
            x = F.relu(y + x)
        return x.float().mean(dim=(2, 3))

    @torch.no_grad()
    def settled(self, norms: Tensor, weights: Weights, batches: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
        """The norms with statistics of these batches, under the weights and the mask that the task is left with.

        Not a running mean of training: there the mask was half open for a part of every epoch.
        """
        total, count = norms.new_zeros(2, self.layout.channels, dtype=torch.float64), 0
        for images in batches:
            seen: list[Tensor] = []

            def note(y: Tensor, seen: list[Tensor] = seen) -> None:
                y = y.double()
                seen.append(torch.stack([y.mean(dim=(0, 2, 3)), y.square().mean(dim=(0, 2, 3))]))

            self(images, norms, weights, dtype=dtype, learning=True, notice=note)
            total, count = total + torch.cat(seen, dim=1), count + 1
        mean, square = total / count
        return torch.cat([norms[:2], torch.stack([mean, (square - mean.square()).clamp_min(0)]).to(norms.dtype)])


def is_resnet(name: str) -> bool:
    """Whether a name means this network, of the usual width or of another."""
    return name.split(":")[0] == NAME


def create_resnet(name: str) -> ResNetEncoder:
    """The network that `resnet18` or `resnet18:WIDTH` means."""
    width = str(WIDTH) if name == NAME else name.removeprefix(f"{NAME}:")
    if not (width.isascii() and width.isdigit() and int(width)):
        raise TplError(f"'{name}' has no width; write {NAME} for {WIDTH} channels, or {NAME}:128 for twice as many.")
    return ResNetEncoder(int(width))
