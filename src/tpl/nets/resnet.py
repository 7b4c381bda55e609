"""A ResNet-18 for 32-pixel images that is trained from scratch, under masks.

There is no frozen trunk: all kernels are shared by the tasks and trained under a protection. Masks act behind the stem,
inside every block and behind every block's sum:

    x_0 = m_0 * relu(N(K_0 x)),    h = m_1 * relu(N(K_1 x)),    x' = m_2 * relu(N(K_2 h) + S(x))

S is the identity, or a norm of a 1 x 1 convolution where the size changes. m_2 closes a channel of the sum whatever
either side says, so a channel that is closed in a task is zero for all that reads it, the next shortcut included. Every
norm N is a batch norm of the task's own. The kernels, and what holds them still, are in `resnet_kernels`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.errors import TplError
from tpl.nets.base import Encoder, Weights
from tpl.nets.compact import DATA_CONFIG
from tpl.nets.resnet_kernels import Kernels, Layout

NAME = "resnet18"
WIDTH = 64
EPSILON = 1e-5
ALIGNED = 8  # channels that a GPU's matrix units take at a time
SHAPES = 16  # batch sizes that a process may compile the network for


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
        self.through = network

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
        # Answers are too few to compile for, and a caller that takes notice is no part of a graph.
        through = self.through if learning and notice is None else network
        return through(self.layout, images, norms, tuple(weights), dtype, learning, notice)

    def fuse(self) -> None:
        """Compile training steps: norm, mask, sum and ReLU can become one kernel; takes a while at every batch size."""
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
        self.through, self.fused = torch.compile(network, dynamic=False), True

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


def network(
    layout: Layout,
    images: Tensor,
    norms: Tensor,
    weights: tuple[Tensor, ...],
    dtype: torch.dtype,
    learning: bool,
    notice: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """The forward pass: as few passes over the activations as there can be, in one memory format from end to end."""
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
        if notice is not None:
            notice(y)
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
    """Whether convolutions are fastest with a pixel's channels side by side: on a GPU, whose matrix units want that."""
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
    return ResNetEncoder(int(width))
