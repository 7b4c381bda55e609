"""A ResNet-18 for 32-pixel images that is trained from scratch, under masks.

There is no frozen trunk: all kernels are shared by the tasks and trained under a protection. Masks act behind the stem,
inside every block and behind every block's sum:

    x_0 = m_0 * relu(N(K_0 x)),    h = m_1 * relu(N(K_1 x)),    x' = m_2 * relu(N(K_2 h) + S(x))

S is the identity, or a norm of a 1 x 1 convolution where the size changes. m_2 masks the sum, so a channel
that is closed in a task is zero for all layers that read it, including the next shortcut. Every norm N is a batch norm
of the task's own.

All kernels are one flat tensor: one gate, one step of the optimiser. A kernel's entry is frozen once the unit it feeds
and the unit it reads are used by a finished task.
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
from tpl.nets.compiling import Compiled
from tpl.pretraining import RESNET

NAME = RESNET
WIDTH = 64
MAX_WIDTH = 256  # 180 million weights
EPSILON = 1e-5
ALIGNED = 8  # channels that a GPU's matrix units take at a time
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
        """The kernels together with a mask: it acts behind the norms, so it cannot be multiplied into the kernels."""
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

    A task's norms are `[4, channels]`: scales, shifts, and the means and variances that predictions use.
    """

    pretrained = False
    batch_norms = True

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layout = Layout(width)
        self.name = NAME if width == WIDTH else f"{NAME}:{width}"
        # It comes without weights: the architecture alone identifies it.
        self.fingerprint = hashlib.sha256(f"{NAME} {self.layout.convs} {EPSILON}".encode()).hexdigest()
        self.sha256, self.weights = self.fingerprint, None
        self.data_config = dict(DATA_CONFIG)
        self.dim = self.layout.groups[-1]
        self.run: Callable[..., Tensor] = network

    def new_adapters(self, latent: int, generator: torch.Generator | None = None, below: int = 0) -> Kernels:
        """Fresh kernels; there are no adapters, and `latent` is not used."""
        return Kernels(self.layout, generator)

    def new_norms(self, below: int = 0) -> Tensor:
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
        watch: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Features `[n, dim]`, float32, of one network; `watch` is called with the input of every norm."""
        # Predictions are too few to compile for, and a callback is no part of a compiled graph.
        run = self.run if learning and watch is None else network
        return run(self.layout, images, norms, tuple(weights), dtype, learning, watch)

    def fuse(self) -> None:
        """Compile training steps: norm, mask, sum and ReLU can become one kernel; takes a while at every batch size."""
        self.run, self.fused = Compiled(network), True

    @torch.no_grad()
    def reestimated_norms(
        self, norms: Tensor, weights: Weights, batches: Iterable[Tensor], dtype: torch.dtype
    ) -> Tensor:
        """The norms with statistics of these batches, under the task's final weights and mask.

        Not a running mean of training, during which the mask is half open for a part of every epoch.
        """
        total, count = norms.new_zeros(2, self.layout.channels, dtype=torch.float64), 0
        for images in batches:
            moments: list[Tensor] = []

            def note(y: Tensor, moments: list[Tensor] = moments) -> None:
                y = y.double()
                moments.append(torch.stack([y.mean(dim=(0, 2, 3)), y.square().mean(dim=(0, 2, 3))]))

            self(images, norms, weights, dtype=dtype, learning=True, watch=note)
            total, count = total + torch.cat(moments, dim=1), count + 1
        mean, square = total / count
        return torch.cat([norms[:2], torch.stack([mean, (square - mean.square()).clamp_min(0)]).to(norms.dtype)])


def network(
    layout: Layout,
    images: Tensor,
    norms: Tensor,
    weights: tuple[Tensor, ...],
    dtype: torch.dtype,
    learning: bool,
    watch: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """The forward pass, with as few passes over the activations as possible, in one memory format throughout."""
    flat, *masks = weights
    affine, opened = norms[:2], None
    if masks:
        per_channel, shortcuts = layout.per_channel(masks[0])
        affine = affine * per_channel  # relu(m y) = m relu(y): masks are not negative
        opened = iter(shortcuts.to(dtype).split(layout.identities))
    sizes = [conv.out for conv in layout.convs]
    scales, shifts, means, variances = (row.split(sizes) for row in (*affine, *norms[2:].detach()))
    images, kernels = images.to(dtype), layout.kernels(flat.to(dtype))
    if on_gpu := channels_come_last(images):
        images, kernels = _channels_last(images, kernels)

    def through(number: int, x: Tensor) -> Tensor:
        conv = layout.convs[number]
        y = F.conv2d(x, kernels[number], stride=conv.stride, padding=conv.size // 2)
        if watch is not None:
            watch(y)
        mean, variance = (None, None) if learning else (means[number], variances[number])
        return F.batch_norm(y, mean, variance, scales[number], shifts[number], learning, eps=EPSILON)

    # A norm needs what went into it, not what came out: that may be written over.
    x = through(0, images).relu_()
    for block in layout.blocks:
        y = through(block.second, through(block.first, x).relu_())
        if block.shortcut is not None:
            y += through(block.shortcut, x)
        elif opened is not None:
            mask = next(opened).view(-1, 1, 1)
            y = y.addcmul_(x, mask) if on_gpu else y.add_(x * mask)  # one pass; on a CPU its rounding differs
        else:
            y += x
        x = y.relu_()
    return x.float().mean(dim=(2, 3))


def channels_come_last(images: Tensor) -> bool:
    """Whether convolutions are fastest with a pixel's channels side by side: on a GPU, for its matrix units."""
    return images.is_cuda


def _channels_last(images: Tensor, kernels: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Images and kernels in the order that all later activations then have, too.

    In half precision, red, green and blue get black channels beside them: a stem that reads three is slow.
    """
    if images.dtype != torch.float32:
        missing = -images.shape[1] % ALIGNED
        images = F.pad(images, (0, 0, 0, 0, 0, missing))
        kernels = [F.pad(kernels[0], (0, 0, 0, 0, 0, missing)), *kernels[1:]]
    images, *kernels = (part.contiguous(memory_format=torch.channels_last) for part in (images, *kernels))
    return images, kernels


def is_resnet(name: str) -> bool:
    """Whether a name means this network, of the usual width or of another."""
    return name.split(":")[0] == NAME


def create_resnet(name: str) -> ResNetEncoder:
    """The network that `resnet18` or `resnet18:WIDTH` means."""
    width = str(WIDTH) if name == NAME else name.removeprefix(f"{NAME}:")
    if not (width.isascii() and width.isdigit() and int(width)):
        raise TplError(f"'{name}' has no width; write {NAME} for {WIDTH} channels, or {NAME}:128 for twice as many.")
    if len(width) > 4 or int(width) > MAX_WIDTH:
        raise TplError(f"'{name}' is too wide; at most {NAME}:{MAX_WIDTH}.")
    return ResNetEncoder(int(width))
