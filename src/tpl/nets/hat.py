"""HAT: hard attention to the task (Serra et al., 2018), as arithmetic on flat tensors.

Every maskable unit of the network has one entry in a task's embedding `e`. Its mask is
`sigmoid(s * e)`; the scale `s` is annealed inside every epoch so that masks are soft at first and
nearly binary at the end. Units that a finished task uses are protected from later ones by gates
(`Adapters.gates`). Everything here is float32: the compensation factor spans twenty decades.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

EMBEDDING_BOUND = 6.0  # after every step the embedding is clamped to +-6
COSH_BOUND = 50.0  # cosh(50) still fits float32


Scale = float | Tensor


def scale_at(progress: Scale, s_max: float) -> Scale:
    """The annealed scale: 1/s_max at the start of an epoch (progress 0), towards s_max at its end (1)."""
    return 1 / s_max + (s_max - 1 / s_max) * progress


def soft_mask(embedding: Tensor, scale: Scale) -> Tensor:
    """sigmoid(s * e), differentiable by autograd; pair it with `compensate`."""
    return torch.sigmoid(scale * embedding)


def binary_mask(embedding: Tensor) -> Tensor:
    """1 where the unit is on (e > 0), else 0: the limit of the soft mask for s to infinity."""
    return (embedding > 0).to(embedding.dtype)


def task_mask(embedding: Tensor, s_max: float, kind: str) -> Tensor:
    """The mask a finished task keeps: `binary`, or the paper's `soft` one at s = s_max."""
    return binary_mask(embedding) if kind == "binary" else soft_mask(embedding, s_max)


def compensate(gradient: Tensor, embedding: Tensor, scale: Scale, s_max: float) -> Tensor:
    """The embedding's gradient, freed from the annealed scale.

    g * (s_max / s) * (cosh(clip(s e)) + 1) / (cosh(e) + 1). Since d sigmoid(s e)/d e equals
    s / (2 (cosh(s e) + 1)), this is dL/dm * s_max * sigmoid'(e), whatever s is.
    """
    reach = torch.cosh((scale * embedding).clamp(-COSH_BOUND, COSH_BOUND)) + 1
    return gradient * (s_max / scale) * reach / (torch.cosh(embedding) + 1)


class AnalyticMask(torch.autograd.Function):
    """A soft mask whose backward pass is the compensated gradient itself.

    Autograd computes m (1 - m), and 1 - m rounds to zero once s * e passes 16.6, so units that are
    on stop learning early while units that are off do not. This form has no such asymmetry; it
    trains differently, hence it is an option and not the default.
    """

    @staticmethod
    def forward(ctx: Any, embedding: Tensor, scale: Scale, s_max: float) -> Tensor:
        """sigmoid(s * e)."""
        ctx.save_for_backward(embedding)
        ctx.s_max = s_max
        return torch.sigmoid(scale * embedding)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        """dL/dm * s_max * sigmoid'(e)."""
        (embedding,) = ctx.saved_tensors
        open_ = torch.sigmoid(embedding)
        return grads[0] * ctx.s_max * open_ * (1 - open_), None, None


def regulariser(mask: Tensor, used: Tensor | None) -> Tensor:
    """The share of free capacity that this mask asks for: sum m (1 - used) / sum (1 - used).

    One ratio over all units of a network, not a mean over layers; masks `[networks, units]` get one each. Zero when
    nothing is free.
    """
    if used is None:
        return mask.mean(dim=-1)
    free = 1 - used
    return (mask * free).sum(dim=-1) / free.sum(dim=-1).clamp_min(1e-12)


def capacity_used(used: Tensor) -> float:
    """The share of units that some task holds."""
    return float((used > 0.5).double().mean())


def frozen_share(gates: Iterable[Tensor]) -> float:
    """The share of the adapters' weights that later tasks can no longer move."""
    gates = list(gates)
    closed = torch.stack([(1 - gate).double().sum() for gate in gates]).sum()
    return float(closed) / sum(gate.numel() for gate in gates)
