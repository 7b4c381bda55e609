"""Adapters: the small trainable bottlenecks inside the frozen encoder.

Adapter(x) = x + m_up * (W_up relu(m_down * (W_down x + b_down)) + b_up)

The inner residual is never masked, so an adapter with closed masks is exactly the identity. All
adapters of a network live in four stacked tensors: one optimiser step, one gate and one file entry
serve them all. Masks are not negative, so one that holds for a whole batch can be multiplied into
the weights (`fold`): thousands of numbers instead of the millions of activations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.nets.base import Trainable


class AdapterMasks(NamedTuple):
    """Masks for the hidden units and for the outputs of an adapter, or of a stack of them."""

    down: Tensor
    up: Tensor


class AdapterStack(NamedTuple):
    """The weights of all adapters, `[count, ...]`, or of several networks at once, `[networks, count, ...]`."""

    down_weight: Tensor
    down_bias: Tensor
    up_weight: Tensor
    up_bias: Tensor

    def split(self, masks: Tensor) -> AdapterMasks:
        """Flat masks `[..., units]` as `[..., count, latent]` and `[..., count, dim]`.

        Order: adapter by adapter, hidden units before outputs.
        """
        count, dim, latent = self.up_weight.shape[-3:]
        return AdapterMasks(*masks.unflatten(-1, (count, latent + dim)).split((latent, dim), dim=-1))

    def fold(self, masks: Tensor) -> AdapterStack:
        """The weights of the masked adapters; `masks` is `[units]`, or `[networks, units]` for a stack of several."""
        down, up = self.split(masks)
        return AdapterStack(
            self.down_weight * down.unsqueeze(-1),
            self.down_bias * down,
            self.up_weight * up.unsqueeze(-1),
            self.up_bias * up,
        )

    def gates(self, used: Tensor) -> AdapterStack:
        """How far each weight may still move, 1 = free and 0 = frozen, given the units in use."""
        return gates(self, used)

    def to(self, dtype: torch.dtype) -> AdapterStack:
        """The weights in another precision."""
        return AdapterStack(*(tensor.to(dtype) for tensor in self))

    def layers(self) -> list[AdapterStack]:
        """One set of weights per adapter, in the order of the forward pass."""
        axis = self.down_bias.dim() - 2
        return [AdapterStack(*parts) for parts in zip(*(tensor.unbind(axis) for tensor in self), strict=True)]


class Adapters(Trainable):
    """A stack of `count` adapters of one width; two for every transformer block."""

    def __init__(self, count: int, dim: int, latent: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.count, self.dim, self.latent = count, dim, latent
        self.down_weight = nn.Parameter(torch.empty(count, latent, dim))
        self.down_bias = nn.Parameter(torch.zeros(count, latent))
        self.up_weight = nn.Parameter(torch.empty(count, dim, latent))
        self.up_bias = nn.Parameter(torch.zeros(count, dim))
        # The generic ViT initialisation, which is also what the public codes end up with.
        for weight in (self.down_weight, self.up_weight):
            nn.init.trunc_normal_(weight, std=0.02, generator=generator)

    @property
    def units(self) -> int:
        """How many maskable units there are: hidden units and outputs of every adapter."""
        return self.count * (self.latent + self.dim)

    @property
    def weights(self) -> AdapterStack:
        """The parameters as a stack, every unit open."""
        return AdapterStack(self.down_weight, self.down_bias, self.up_weight, self.up_bias)

    def stack(self, *tensors: Tensor) -> AdapterStack:
        """Other tensors in the place of the parameters."""
        return AdapterStack(*tensors)


def gates(weights: AdapterStack, used: Tensor) -> AdapterStack:
    """How far each weight may still move, 1 = free and 0 = frozen, given the units in use.

    A weight is protected when the unit it feeds *and* the unit it reads are in use; the input of the first layer is
    the residual stream, which is always in use.
    """
    down, up = weights.split(used)
    return AdapterStack(
        (1 - down).unsqueeze(-1).expand_as(weights.down_weight),
        1 - down,
        1 - torch.minimum(up.unsqueeze(-1), down.unsqueeze(-2)),
        1 - up,
    )


def adapt(x: Tensor, weights: AdapterStack, masks: AdapterMasks | None = None) -> Tensor:
    """One adapter applied to `x`, `[n, tokens, dim]`; `masks`, one row an image, act on the activations."""
    hidden = F.relu(linear(x, weights.down_weight, weights.down_bias))
    if masks is not None:
        hidden = hidden * masks.down.unsqueeze(1)
    out = linear(hidden, weights.up_weight, weights.up_bias)
    if masks is not None:
        out = out * masks.up.unsqueeze(1)
    return x + out


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear layer; weights `[networks, out, in]` each serve an equal part of the batch, in order."""
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    parts = x.reshape(len(weight), -1, x.shape[-1])
    # Not baddbmm, which writes the bias out to the size of the result first.
    return (parts @ weight.mT + bias.unsqueeze(1)).reshape(*x.shape[:-1], -1)
