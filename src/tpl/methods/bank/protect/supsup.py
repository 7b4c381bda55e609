"""SupSup: random adapters that nobody trains, and a supermask over them for every task (Wortsman et al., NeurIPS 2020).

A task trains one score a weight; it uses the weights with the largest scores of each matrix (edge-popup, Ramanujan et
al., CVPR 2020). Nothing is shared, so nothing is ever full and nothing can be forgotten; a task costs one bit a weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpl.errors import TplError
from tpl.methods.bank.protect.base import Masked, Protection
from tpl.nets import Adapters, AdapterStack, Trainable, Weights

SPREAD = 0.01  # of the first scores: at the rates the adapters are trained with, ranks then change within an epoch


class SupSup(Protection):
    """A task owns a score for every weight of the adapters; biases stay zero."""

    name = "supsup"
    summary = "random weights that nobody trains, a supermask of its own for every task"
    trains_adapters = False

    def prepare(self, adapters: Trainable) -> None:
        """Signed Kaiming constants, scaled for the share of weights in use: masks alone must do the work."""
        adapters = _checked(adapters)
        with torch.no_grad():
            for weight in (adapters.down_weight, adapters.up_weight):
                fan_in = weight.shape[-1] * self.config.supermask
                weight.copy_(torch.where(weight < 0, -1.0, 1.0) * (2 / fan_in) ** 0.5)
            # The branch is added to a pre-trained network: at first it should say little.
            adapters.up_weight.mul_(0.1)

    def initial(self, adapters: Trainable, generator: torch.Generator) -> Tensor:
        """Scores by chance: a random half of the weights."""
        return SPREAD * torch.randn(2 * _checked(adapters).down_weight.numel(), generator=generator)

    def masked(self, weights: Weights, own: Tensor, progress: Tensor) -> Masked:
        """The adapters under the best-scored weights; the gradient passes straight through to the scores."""
        stack = AdapterStack(*weights)
        mask = self._open(stack, own)
        through = mask + (own - own.detach())  # in this order the mask keeps its bits
        return Masked(_under(stack, through), mask)

    def kept(self, weights: Weights, own: Tensor) -> Tensor:
        """The supermask, eight weights to a byte."""
        return _packed(self._open(AdapterStack(*weights), own) > 0)

    def finished(self, weights: Weights, kept: Tensor) -> AdapterStack:
        """The adapters under the task's supermask."""
        stack = AdapterStack(*weights)
        count = 2 * stack.down_weight.numel()
        return _under(stack, _unpacked(kept)[:count].to(stack.down_weight.dtype))

    def _open(self, weights: AdapterStack, own: Tensor) -> Tensor:
        """1 for the best-scored share of each adapter's two matrices."""
        count = weights.down_weight.shape[-3]
        rows = own.detach().unflatten(-1, (2 * count, -1))
        closed = min(round(rows.shape[-1] * (1 - self.config.supermask)), rows.shape[-1] - 1)  # one is always open
        floor = rows.sort(dim=-1).values[..., closed : closed + 1]
        opened: Tensor = (rows >= floor).to(own.dtype)
        return opened.flatten(-2)


def _checked(adapters: Trainable) -> Adapters:
    """Supermasks are laid over adapters: a whole network of random weights would have nothing to begin from."""
    if not isinstance(adapters, Adapters):
        raise TplError("protect=supsup needs adapters in a pre-trained encoder; this one has none. Use protect=hat.")
    return adapters


def _under(weights: AdapterStack, mask: Tensor) -> AdapterStack:
    """The weights times a flat mask over both matrices of every adapter, down before up."""
    down, up = mask.unflatten(-1, (2, -1)).unbind(-2)
    return weights._replace(
        down_weight=weights.down_weight * down.reshape(weights.down_weight.shape),
        up_weight=weights.up_weight * up.reshape(weights.up_weight.shape),
    )


def _packed(bits: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8))
    places = 2 ** torch.arange(8, device=bits.device, dtype=torch.uint8)
    return (padded.view(-1, 8) * places).sum(dim=1, dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Tensor:
    places = 2 ** torch.arange(8, device=packed.device, dtype=torch.uint8)
    return ((packed.unsqueeze(1) & places) > 0).flatten()
