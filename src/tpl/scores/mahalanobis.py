"""MD: inverse squared Mahalanobis distance to the nearest class centre (paper, appendix on MD)."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from tpl.scores.base import Score
from tpl.scores.statistics import ClassStatistics, packed, unpacked, without_row

RIDGE = 1e-6  # of the mean variance, added where the covariance is singular
NEAREST = 1e-3  # of the feature size: a smaller squared distance counts as this one


class Mahalanobis(Score):
    """S(x) = 1 / min_c (z - mu_c)^T Sigma^-1 (z - mu_c), one covariance for all classes of the task.

    `shrinkage` is that of `ClassStatistics.covariance`: "none" is the paper's, a number is ROW's.
    """

    name = "md"
    summary = "inverse squared Mahalanobis distance to the nearest class mean"

    means_: Tensor
    whitening_: Tensor
    # What a later merge needs: `ClassStatistics`, the upper triangle of the scatter.
    counts_: Tensor
    pooled_: Tensor
    scatter_: Tensor

    def __init__(self, shrinkage: str | float = "auto") -> None:
        self.shrinkage = shrinkage

    def fit_features(self, z: Tensor, logits: Tensor, y: Tensor, others: Tensor | None = None) -> Self:
        """Class means and the inverse root of the pooled within-class covariance (divided by n)."""
        y = y.unique(return_inverse=True)[1]  # a class without samples has no centre
        return self._take(ClassStatistics.empty(z.shape[1], z.device).add(z, y))

    def merge(self, z: Tensor, y: Tensor) -> Self:
        """Take up more samples of classes with a centre: the same statistics as if all had come at once."""
        return self._take(self.statistics.add(z, y))

    def forget(self, c: int) -> Self:
        """Drop the centre of one class. What is pooled over all classes stays: it belongs to no single one."""
        self.means_ = without_row(self.means_, c)
        if self.mergeable:
            self.counts_ = without_row(self.counts_, c)
        return self

    @property
    def mergeable(self) -> bool:
        """Whether what a merge needs is here; models of early versions do not have it."""
        return hasattr(self, "scatter_")

    @property
    def statistics(self) -> ClassStatistics:
        """All that the score is computed from."""
        return ClassStatistics(self.counts_, self.pooled_, self.means_, unpacked(self.scatter_, self.means_.shape[1]))

    def _take(self, statistics: ClassStatistics) -> Self:
        self.counts_, self.pooled_, self.means_, scatter = statistics
        self.scatter_ = packed(scatter)
        self.whitening_ = inverse_root(statistics.covariance(self.shrinkage))
        return self

    def distances(self, z: Tensor) -> Tensor:
        """Squared Mahalanobis distances to every class mean, `[n, c]`."""
        white, centres = z.double() @ self.whitening_, self.means_ @ self.whitening_
        # Differences, not the expanded square: exact for features close to a centre.
        if torch.compiler.is_compiling():  # ONNX has no counterpart of cdist
            return (white.unsqueeze(1) - centres).square().sum(dim=2)
        return torch.cdist(white, centres, compute_mode="donot_use_mm_for_euclid_dist").square()

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """1 / min_c d_c^2, bounded where a feature sits on a centre."""
        return 1 / self.distances(z).amin(dim=1).clamp_min(NEAREST * z.shape[1])


def inverse_root(covariance: Tensor) -> Tensor:
    """W with W W^T = Sigma^-1, by eigenvectors; a tiny ridge makes a singular Sigma invertible.

    (A pseudo-inverse would let a sample deviate for free where the training data did not vary.)
    """
    values, vectors = torch.linalg.eigh(covariance)
    mean_variance = values.mean().clamp_min(torch.finfo(torch.float64).tiny)
    if bool(values[0] <= RIDGE * mean_variance):
        values = values.clamp_min(0) + RIDGE * mean_variance
    root: Tensor = vectors * values.clamp_min(1e-24).rsqrt()
    return root.contiguous()  # rows in memory as a file will give them back: the same bits after loading
