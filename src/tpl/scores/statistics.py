"""Means of classes and one pooled scatter around them: exact sums over samples that need not be kept."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ENOUGH = 5  # samples per dimension from which the plain covariance is trusted by `shrinkage="auto"`


class ClassStatistics(NamedTuple):
    """Counts and means of classes, and the scatter of features around their own class's mean, float64.

    Two groups of samples join exactly (Chan, Golub and LeVeque, 1979): the statistics are those of all samples at once,
    whatever order they come in.
    """

    counts: Tensor  # [classes]
    seen: Tensor  # samples behind the scatter, those of classes since removed included
    means: Tensor  # [classes, dim]
    scatter: Tensor  # [dim, dim], summed squared deviations

    @classmethod
    def empty(cls, dim: int, device: torch.device) -> ClassStatistics:
        """Of no sample and no class."""
        zeros = torch.zeros(dim, dim, dtype=torch.float64, device=device)
        return cls(zeros[:0, 0], zeros.sum(), zeros[:0], zeros)

    def add(self, z: Tensor, y: Tensor) -> ClassStatistics:
        """With more samples; labels may name classes that are not here yet."""
        z, classes = z.double(), max(int(y.max()) + 1 if len(y) else 0, len(self.counts))
        missing = classes - len(self.counts)
        old_counts, old_means = F.pad(self.counts, (0, missing)), F.pad(self.means, (0, 0, 0, missing))
        counts, means = class_means(z, y, classes)
        both, deviations, apart = old_counts + counts, z - means[y], means - old_means
        # A class with no sample on one side has weight 0 here: its mean there does not matter.
        between = (apart.T * (old_counts * counts / both.clamp_min(1))) @ apart
        return ClassStatistics(
            both,
            self.seen + len(y),
            old_means + apart * (counts / both.clamp_min(1)).unsqueeze(1),
            self.scatter + deviations.T @ deviations + between,
        )

    def without(self, c: int) -> ClassStatistics:
        """Without one class; its part of the scatter belongs to no single class and stays."""
        return self._replace(counts=without_row(self.counts, c), means=without_row(self.means, c))

    def covariance(self, shrinkage: str | float) -> Tensor:
        """The pooled within-class covariance, divided by n.

        "none" leaves it as it is; "oas" shrinks it towards a multiple of the identity by the oracle approximating
        estimate; "auto" takes "none" with at least five samples per dimension, else "oas"; a number a gives
        (1 - a) Sigma + a I.
        """
        n, d = int(self.seen), len(self.scatter)
        covariance = self._spread() / n
        if isinstance(shrinkage, float):
            return (1 - shrinkage) * covariance + shrinkage * torch.eye(d).to(covariance)
        if shrinkage == "oas" or (shrinkage == "auto" and n < ENOUGH * d):
            return _shrunk(covariance, n)
        return covariance

    def _spread(self) -> Tensor:
        """A scatter that a covariance can be made of.

        With one sample a class nothing deviates from its own centre; then the spread of the centres stands in, and
        with one sample in all, its own size.
        """
        if bool(self.scatter.any()):
            return self.scatter
        n, means = self.counts.sum(), self.means
        deviations = means - (self.counts @ means) / n
        if bool(deviations.any()):
            return (deviations.T * self.counts) @ deviations
        size = means.square().mean().clamp_min(1e-24)
        alike: Tensor = n * size * torch.eye(means.shape[1], dtype=means.dtype, device=means.device)
        return alike


def class_means(z: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Samples and mean per class; the mean of a class without samples is zero."""
    one_hot = F.one_hot(y, classes).double()
    counts = one_hot.sum(dim=0)
    return counts, (one_hot.T @ z) / counts.clamp_min(1).unsqueeze(1)


def without_row(rows: Tensor, number: int) -> Tensor:
    """All rows but one."""
    return torch.cat([rows[:number], rows[number + 1 :]])


def packed(symmetric: Tensor) -> Tensor:
    """The upper triangle in a row: half the space."""
    rows, columns = torch.triu_indices(*symmetric.shape, device=symmetric.device)
    return symmetric[rows, columns]


def unpacked(triangle: Tensor, size: int) -> Tensor:
    """The symmetric matrix whose upper triangle is given."""
    rows, columns = torch.triu_indices(size, size, device=triangle.device)
    whole = triangle.new_zeros(size, size)
    whole[rows, columns] = triangle
    whole[columns, rows] = triangle
    return whole


def _shrunk(covariance: Tensor, n: int) -> Tensor:
    """The oracle approximating shrinkage estimate (Chen et al., 2010), from the covariance alone."""
    d = len(covariance)
    alpha, mu = covariance.square().mean(), covariance.trace() / d
    apart = (n + 1) * (alpha - mu.square() / d)
    share = torch.where(apart > 0, (alpha + mu.square()) / apart.clamp_min(1e-300), 1.0).clamp_max(1.0)
    return (1 - share) * covariance + share * mu * torch.eye(d, dtype=covariance.dtype, device=covariance.device)
