"""kNN: distance from a feature to the k-th nearest of a set of features, on the unit sphere."""

from __future__ import annotations

from itertools import count
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.scores.base import Score, in_blocks

BLOCK = 4096  # rows compared at a time, so that no n x n intermediate appears


class NearestNeighbours(Score):
    """S(x) = -d_k(z), the k-th nearest neighbour's distance in a bank of unit features.

    `distance="l2"` is the paper's Euclidean norm, "squared" the public code's. `k` is clipped to the
    size of the bank; with an empty bank the distance is 0 for every image.
    """

    name = "knn"
    summary = "distance to the k-th nearest stored feature"
    paper = "Sun et al., Deep nearest neighbors, ICML 2022"

    bank_: Tensor

    def __init__(self, k: int = 5, distance: str = "l2") -> None:
        self.k, self.distance = k, distance

    def fit_features(self, z: Tensor, logits: Tensor, y: Tensor, others: Tensor | None = None) -> Self:
        """Use the task's own features as the bank."""
        return self.remember(z)

    def use_memory(self, own: Tensor) -> Self:
        """Use the features of the task's stored images as the bank, in place of its training data's."""
        return self.remember(own)

    def remember(self, bank: Tensor) -> Self:
        """Use any features as the bank, e.g. those of other tasks' replay samples."""
        self.bank_ = F.normalize(bank.double(), dim=1)
        return self

    def distances(self, z: Tensor, skip: Tensor | None = None) -> Tensor:
        """d_k per row, `[n]`. `skip[i]`, where not negative, is a row of the bank that is left out for row i.

        A sample that is itself in the bank would otherwise find itself at distance zero.
        """
        if len(self.bank_) == 0:
            return z.new_zeros(z.shape[0], dtype=torch.float64)  # not len(z): that would fix it in a traced graph
        z = F.normalize(z.double(), dim=1)
        k = min(self.k, len(self.bank_))
        parts = []
        for start, block in zip(count(0, BLOCK), in_blocks(z, BLOCK), strict=False):
            squared = (2 - 2 * block @ self.bank_.T).clamp_min(0)
            if skip is not None:
                rows = torch.nonzero(skip[start : start + BLOCK] >= 0).squeeze(1)
                # With a bank of one, the sample itself is all there is.
                squared[rows, skip[start + rows]] = torch.inf if len(self.bank_) > 1 else 0.0
            nearest = squared.topk(k, dim=1, largest=False).values
            parts.append(torch.where(nearest.isfinite(), nearest, 0).amax(dim=1))
        squared = torch.cat(parts)
        return squared if self.distance == "squared" else squared.sqrt()

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """-d_k."""
        return -self.distances(z)
