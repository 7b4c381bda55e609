"""HAT: units that a finished task uses are frozen for all later ones (Serra et al., ICML 2018)."""

from __future__ import annotations

import torch
from torch import Tensor

from tpl.methods.bank.protect.base import Masked, Protection
from tpl.nets import Trainable, Weights, hat


class Hat(Protection):
    """A task owns an embedding with one entry a unit; its mask is annealed inside every epoch (Eq. 2)."""

    name = "hat"
    summary = "weights between units that a finished task uses stand still"

    def initial(self, adapters: Trainable, generator: torch.Generator) -> Tensor:
        """N(0, 1): half of the units are on."""
        return torch.randn(adapters.units, generator=generator)

    def masked(self, weights: Weights, own: Tensor, progress: Tensor) -> Masked:
        """The adapters under the mask at the scale that belongs to this point of the epoch."""
        s_max = self.config.s_max
        scale = hat.scale_at(progress, s_max)
        if self.config.mask_gradient == "analytic":
            mask: Tensor = hat.AnalyticMask.apply(own, scale, s_max)  # type: ignore[no-untyped-call]
        else:
            mask = hat.soft_mask(own, scale)
        return Masked(weights.fold(mask), mask)

    def penalty(self, mask: Tensor, used: Tensor | None) -> Tensor:
        """HAT's regulariser: the share of free capacity asked for."""
        return self.config.sparsity * hat.regulariser(mask, used)

    def gates(self, weights: Weights, used: Tensor) -> Weights:
        """Closed where both units of a weight are in use."""
        return weights.gates(used)

    def after_backward(self, own: Tensor, progress: Tensor) -> None:
        """Free the embedding's gradient from the annealed scale."""
        if self.config.mask_gradient == "autograd" and own.grad is not None:
            s_max = self.config.s_max
            own.grad = hat.compensate(own.grad, own.detach(), hat.scale_at(progress, s_max), s_max)

    def after_step(self, own: Tensor) -> None:
        """Keep the embedding where its sigmoid still has a slope."""
        with torch.no_grad():
            own.clamp_(-hat.EMBEDDING_BOUND, hat.EMBEDDING_BOUND)

    def finished(self, weights: Weights, kept: Tensor) -> Weights:
        """The adapters under the task's last mask."""
        return weights.fold(self.claim(kept))

    def claim(self, kept: Tensor) -> Tensor:
        """The task's mask."""
        return hat.task_mask(kept, self.config.s_max, self.config.masks)

    @property
    def final(self) -> bool:
        """Binary masks protect to the last bit; soft ones let weights move a little."""
        return self.config.masks == "binary"

    def capacity(self, adapters: Trainable, used: Tensor | None) -> dict[str, float]:
        """Units that some task holds, and weights that none can move any more."""
        if used is None:
            return super().capacity(adapters, used)
        return {"units": hat.capacity_used(used), "frozen": hat.frozen_share(adapters.gates(used))}
