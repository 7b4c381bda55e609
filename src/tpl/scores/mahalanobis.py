"""MD: inverse squared Mahalanobis distance to the nearest class centre (paper, appendix on MD)."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from tpl.scores.base import Score

ENOUGH = 5  # samples per dimension from which the plain covariance is trusted by `shrinkage="auto"`
RIDGE = 1e-6  # of the mean variance, added where the covariance is singular
NEAREST = 1e-3  # of the feature size: a smaller squared distance counts as this one


class Mahalanobis(Score):
    """S(x) = 1 / min_c (z - mu_c)^T Sigma^-1 (z - mu_c), one covariance for all classes of the task.

    `shrinkage`: "none" is the paper's; "oas" shrinks towards a multiple of the identity by the oracle
    approximating estimate; "auto" takes "none" with at least five samples per dimension, else "oas"; a number a
    is ROW's (1 - a) Sigma + a I.
    """

    name = "md"
    summary = "inverse squared Mahalanobis distance to the nearest class mean"

    means_: Tensor
    whitening_: Tensor
    # What a later merge needs: images per class, images behind the scatter (those of classes since removed included),
    # and the upper triangle of the summed squared deviations from the class means.
    counts_: Tensor
    pooled_: Tensor
    scatter_: Tensor

    def __init__(self, shrinkage: str | float = "auto") -> None:
        self.shrinkage = shrinkage

    def fit_features(self, z: Tensor, logits: Tensor, y: Tensor, others: Tensor | None = None) -> Self:
        """Class means and the inverse root of the pooled within-class covariance (divided by n)."""
        z = z.double()
        y = y.unique(return_inverse=True)[1]  # a class without samples has no centre
        self.counts_, self.means_ = class_means(z, y, int(y.max()) + 1)
        deviations = z - self.means_[y]
        self.pooled_ = self.counts_.sum()
        return self._whiten(deviations.T @ deviations)

    def merge(self, z: Tensor, y: Tensor) -> Self:
        """Take up more samples of classes with a centre: the same statistics as if all had come at once.

        Means and scatter of two groups join exactly (Chan, Golub and LeVeque, 1979), so the old samples are not needed.
        """
        z = z.double()
        count, mean = class_means(z, y, len(self.means_))
        apart = torch.where(count.unsqueeze(1) > 0, mean - self.means_, 0)
        both = self.counts_ + count
        deviations = z - mean[y]
        between = (apart.T * (self.counts_ * count / both.clamp_min(1))) @ apart
        scatter = unpacked(self.scatter_, z.shape[1]) + deviations.T @ deviations + between
        self.means_ = self.means_ + apart * (count / both.clamp_min(1)).unsqueeze(1)
        self.counts_, self.pooled_ = both, self.pooled_ + len(z)
        return self._whiten(scatter)

    def forget(self, c: int) -> Self:
        """Drop the centre of one class. What is pooled over all classes stays: it belongs to no single one."""
        kept = torch.arange(len(self.means_), device=self.means_.device) != c
        self.means_ = self.means_[kept]
        if self.mergeable:
            self.counts_ = self.counts_[kept]
        return self

    @property
    def mergeable(self) -> bool:
        """Whether what a merge needs is here; models of early versions do not have it."""
        return hasattr(self, "scatter_")

    def _whiten(self, scatter: Tensor) -> Self:
        self.scatter_ = _packed(scatter)
        self.whitening_ = inverse_root(self._covariance(scatter))
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

    def _covariance(self, scatter: Tensor) -> Tensor:
        n, d = int(self.pooled_), len(scatter)
        covariance = _spread(scatter, self.means_, self.counts_) / n
        if isinstance(self.shrinkage, float):
            return (1 - self.shrinkage) * covariance + self.shrinkage * torch.eye(d).to(covariance)
        if self.shrinkage == "oas" or (self.shrinkage == "auto" and n < ENOUGH * d):
            return _shrunk(covariance, n)
        return covariance


def class_means(z: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Samples and mean per class; the mean of a class without samples is zero."""
    one_hot = torch.nn.functional.one_hot(y, classes).double()
    counts = one_hot.sum(dim=0)
    return counts, (one_hot.T @ z) / counts.clamp_min(1).unsqueeze(1)


def _spread(scatter: Tensor, means: Tensor, counts: Tensor) -> Tensor:
    """A scatter that a covariance can be made of.

    With one image a class nothing deviates from its own centre; then the spread of the centres stands in, and
    with one image in all, its own size.
    """
    if bool(scatter.any()):
        return scatter
    n = counts.sum()
    deviations = means - (counts @ means) / n
    if bool(deviations.any()):
        return (deviations.T * counts) @ deviations
    size = means.square().mean().clamp_min(1e-24)
    alike: Tensor = n * size * torch.eye(means.shape[1], dtype=means.dtype, device=means.device)
    return alike


def _shrunk(covariance: Tensor, n: int) -> Tensor:
    """The oracle approximating shrinkage estimate (Chen et al., 2010), from the covariance alone."""
    d = len(covariance)
    alpha, mu = covariance.square().mean(), covariance.trace() / d
    apart = (n + 1) * (alpha - mu.square() / d)
    share = torch.where(apart > 0, (alpha + mu.square()) / apart.clamp_min(1e-300), 1.0).clamp_max(1.0)
    return (1 - share) * covariance + share * mu * torch.eye(d, dtype=covariance.dtype, device=covariance.device)


def _packed(symmetric: Tensor) -> Tensor:
    """The upper triangle in a row: half the space."""
    rows, columns = torch.triu_indices(*symmetric.shape, device=symmetric.device)
    return symmetric[rows, columns]


def unpacked(triangle: Tensor, size: int) -> Tensor:
    """The symmetric matrix of which the upper triangle is kept."""
    rows, columns = torch.triu_indices(size, size, device=triangle.device)
    whole = triangle.new_zeros(size, size)
    whole[rows, columns] = triangle
    whole[columns, rows] = triangle
    return whole


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
