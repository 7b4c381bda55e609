"""Weights of several scores in one: Fisher's discriminant between a task's own images and others, from sums alone.

While a task is learned, its images are also shown to the models of all earlier tasks, to which they are foreign. Their
scores, beside those of the new model, show how well each kind of evidence (logits, distances) separates own images from
foreign ones. Without replay a model has seen no other task's images, earlier or later, so the weights also hold for
tasks that a model was never compared with. Two small matrices of sums are all that is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

TINY = 1e-9  # of the mean variance, added to every variance, so that constant evidence gets no weight


class Evidence:
    """Sums over own and foreign images, and the weights that follow from them."""

    def __init__(self, kinds: int) -> None:
        self.own_ = torch.zeros(kinds + 1, kinds + 1, dtype=torch.float64)
        self.foreign_ = torch.zeros_like(self.own_)

    def take(self, own: Tensor, foreign: Tensor) -> Self:
        """Add evidence `[n, kinds]` on own and on foreign images."""
        self.own_ = self.own_ + _sums(own).cpu()
        self.foreign_ = self.foreign_ + _sums(foreign).cpu()
        return self

    def weights(self, kinds: Sequence[int]) -> Tensor:
        """The weights of some kinds of evidence, `[len(kinds)]`, none below 0, with sum 1.

        w = S^-1 (m_own - m_foreign), S the mean of both covariances. Evidence with a negative weight is left
        out and the others are weighed again; before any foreign image was seen all weights are equal.
        """
        used = list(range(len(kinds)))
        while self.own_[0, 0] > 0 and self.foreign_[0, 0] > 0 and used:
            (own, own_spread), (foreign, foreign_spread) = (
                _moments(sums, [kinds[i] for i in used]) for sums in (self.own_, self.foreign_)
            )
            spread = (own_spread + foreign_spread) / 2
            spread = spread + TINY * spread.diagonal().mean().clamp_min(1e-12) * torch.eye(len(used)).to(spread)
            found = torch.linalg.solve(spread, own - foreign)
            if bool((found > 0).all()):
                weights = torch.zeros(len(kinds), dtype=torch.float64)
                weights[used] = found / found.sum()
                return weights
            used = [i for i, weight in zip(used, found.tolist(), strict=True) if weight > 0]
        return torch.full((len(kinds),), 1 / max(len(kinds), 1), dtype=torch.float64)

    def state(self) -> dict[str, Tensor]:
        """The sums."""
        return {"own_": self.own_, "foreign_": self.foreign_}

    def load_state(self, state: dict[str, Tensor]) -> Self:
        """Restore what `state` returned."""
        self.own_, self.foreign_ = state["own_"].cpu(), state["foreign_"].cpu()
        return self


def _sums(rows: Tensor) -> Tensor:
    """Count, sums and products of rows, in one matrix."""
    whole = torch.cat([torch.ones_like(rows[:, :1]), rows], dim=1).double()
    return whole.T @ whole


def _moments(sums: Tensor, kinds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Mean and covariance of some kinds."""
    places = torch.tensor(kinds) + 1
    mean = sums[0, places] / sums[0, 0]
    return mean, sums[places][:, places] / sums[0, 0] - torch.outer(mean, mean)
