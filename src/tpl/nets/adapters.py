"""Adapters: the small trainable bottlenecks inside the frozen encoder.

Adapter(x) = x + m_up * (W_up relu(m_down * (W_down x + b_down)) + b_up)

The inner residual is never masked, so an adapter with closed masks is exactly the identity. All
adapters of a network live in four stacked tensors: one optimiser step, one gate and one file entry
serve them all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AdapterWeights(NamedTuple):
    """One adapter's slice of the stack."""

    down_weight: Tensor
    down_bias: Tensor
    up_weight: Tensor
    up_bias: Tensor


class AdapterMasks(NamedTuple):
    """One adapter's masks, for the hidden units and for the outputs."""

    down: Tensor
    up: Tensor


class Adapters(nn.Module):
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

    def layers(self) -> list[AdapterWeights]:
        """The stack as one set of weights per adapter, in the order of the forward pass."""
        stacked = (self.down_weight, self.down_bias, self.up_weight, self.up_bias)
        return [AdapterWeights(*parts) for parts in zip(*(s.unbind(0) for s in stacked), strict=True)]

    def split_masks(self, masks: Tensor) -> list[AdapterMasks]:
        """Flat masks `[units]`, or one row per image `[n, units]`, as one pair per adapter.

        Order: adapter by adapter, hidden units before outputs. Per-image masks gain a token axis.
        """
        per_adapter = masks.view(*masks.shape[:-1], self.count, self.latent + self.dim)
        if masks.dim() > 1:
            per_adapter = per_adapter.unsqueeze(-2)
        axis = 0 if masks.dim() == 1 else 1
        return [AdapterMasks(*m.split((self.latent, self.dim), dim=-1)) for m in per_adapter.unbind(axis)]

    def gates(self, used: Tensor) -> dict[str, Tensor]:
        """How far each weight may still move, 1 = free and 0 = frozen, given the units in use.

        A weight is protected when the unit it feeds *and* the unit it reads are in use; the input of
        the first layer is the residual stream, which is always in use.
        """
        down, up = used.view(self.count, self.latent + self.dim).split((self.latent, self.dim), dim=-1)
        return {
            "down_weight": (1 - down).unsqueeze(-1).expand_as(self.down_weight),
            "down_bias": 1 - down,
            "up_weight": 1 - torch.minimum(up.unsqueeze(-1), down.unsqueeze(-2)),
            "up_bias": 1 - up,
        }


def adapt(x: Tensor, weights: AdapterWeights, masks: AdapterMasks | None) -> Tensor:
    """One adapter applied to `x`, `[n, tokens, dim]`; `masks=None` leaves every unit open."""
    hidden = F.relu(F.linear(x, weights.down_weight, weights.down_bias))
    if masks is not None:
        hidden = hidden * masks.down
    out = F.linear(hidden, weights.up_weight, weights.up_bias)
    if masks is not None:
        out = out * masks.up
    return x + out
