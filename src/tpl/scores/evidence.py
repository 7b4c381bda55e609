"""How much does each kind of evidence count? Fisher's discriminant between own and foreign images, from sums alone.

While a task is learned, the models of all earlier tasks see its images too: to them these are foreign. What they say of
them, beside what the new model says, tells how well each kind of evidence (logits, distances) tells own images from
foreign ones. Without replay every other task is as foreign to a model as the next, earlier or later, so this holds for
the tasks that a model could never meet. Two small matrices of sums are all that is kept of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

TINY = 1e-9  # of the mean variance, added to every one: evidence that never varies has no say


class Evidence:
    """Sums over own and foreign images, and the weights that follow from them."""

    def __init__(self, kinds: int) -> None:
        self.own_ = torch.zeros(kinds + 1, kinds + 1, dtype=torch.float64)
        self.foreign_ = torch.zeros_like(self.own_)

    def take(self, own: Tensor, foreign: Tensor) -> Self:
        """Take up evidence `[n, kinds]` on own and on foreign images."""
        self.own_ = self.own_ + _sums(own).cpu()
        self.foreign_ = self.foreign_ + _sums(foreign).cpu()
        return self

    def weights(self, kinds: Sequence[int]) -> Tensor:
        """What some kinds of evidence count, `[len(kinds)]`, none below 0 and 1 together.

        w = S^-1 (m_own - m_foreign), S the mean of both covariances. Evidence that would count against a task is left
        out and the others are weighed anew; before any foreign image was seen all count alike.
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
        """Take up what `state` gave."""
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
