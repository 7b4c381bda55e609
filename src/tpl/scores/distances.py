"""Distances in feature space: to class means, by Mahalanobis's metric, and to the nearest stored features.

Class means and their common covariance come from exact sums over samples that need not be stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.scores.base import Score

ENOUGH = 5  # samples per dimension from which the plain covariance is trusted by `shrinkage="auto"`
RIDGE = 1e-6  # of the mean variance, added where the covariance is singular
NEAREST = 1e-3  # of the feature size: a smaller squared distance counts as this one
TILE = 128  # rows and columns of a symmetric matrix that are copied at a time
BLOCK = 4096  # rows compared at a time, so that no n x n intermediate appears


# Statistics of classes


class ClassStatistics(NamedTuple):
    """Counts and means of classes, and the scatter of features around their own class's mean, float64.

    Two groups of samples join exactly (Chan, Golub and LeVeque, 1979): the statistics are those of all samples at once,
    whatever order they come in.
    """

    counts: Tensor  # [classes]
    seen: Tensor  # number of samples in the scatter, including those of removed classes
    means: Tensor  # [classes, dim]
    scatter: Tensor  # [dim, dim], summed squared deviations

    @classmethod
    def empty(cls, dim: int, device: torch.device) -> ClassStatistics:
        """Statistics without samples or classes."""
        zeros = torch.zeros(dim, dim, dtype=torch.float64, device=device)
        return cls(zeros[:0, 0], zeros.sum(), zeros[:0], zeros)

    def add(self, z: Tensor, y: Tensor) -> ClassStatistics:
        """The statistics with more samples added; labels may include new classes."""
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

    def joined(self, other: ClassStatistics) -> ClassStatistics:
        """The statistics of these and of other classes, which follow."""
        other = ClassStatistics(*(part.to(self.means) for part in other))
        counts, means = torch.cat([self.counts, other.counts]), torch.cat([self.means, other.means])
        return ClassStatistics(counts, self.seen + other.seen, means, self.scatter + other.scatter)

    def without(self, c: int) -> ClassStatistics:
        """The statistics without one class; the scatter, which is pooled over classes, stays."""
        return self._replace(counts=without_row(self.counts, c), means=without_row(self.means, c))

    def estimator(self, shrinkage: str | float) -> str:
        """The estimate that `covariance` takes: none, oas, or the share of the identity."""
        if shrinkage == "auto":
            return "oas" if int(self.seen) < ENOUGH * len(self.scatter) else "none"
        return str(shrinkage)

    def covariance(self, shrinkage: str | float) -> Tensor:
        """The pooled within-class covariance, divided by n.

        "none" leaves it as it is; "oas" shrinks it towards a multiple of the identity by the oracle approximating
        estimate; "auto" is "none" with at least five samples per dimension, else "oas"; a number a gives
        (1 - a) Sigma + a I.
        """
        n, d = int(self.seen), len(self.scatter)
        covariance = self.spread() / n
        if isinstance(shrinkage, float):
            return (1 - shrinkage) * covariance + shrinkage * torch.eye(d).to(covariance)
        return _shrunk(covariance, n) if self.estimator(shrinkage) == "oas" else covariance

    def spread(self) -> Tensor:
        """The scatter, or a substitute for it where it is zero.

        With one sample per class nothing deviates from the class means: then the scatter of the means is used, and
        with one sample in all, the size of that sample.
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
    """Number of samples and mean per class; the mean of a class without samples is zero."""
    one_hot = F.one_hot(y, classes).double()
    counts = one_hot.sum(dim=0)
    return counts, (one_hot.T @ z) / counts.clamp_min(1).unsqueeze(1)


def without_row(rows: Tensor, number: int) -> Tensor:
    """The rows without one of them."""
    return torch.cat([rows[:number], rows[number + 1 :]])


def mirror(product: Tensor) -> Tensor:
    """Copy the upper triangle of a product X^T X to the lower one, in place. Returns the matrix.

    On some CPUs such a product is symmetric only up to rounding, and the upper triangle is what storage keeps. In
    tiles, as the columns of a large matrix do not stay in a CPU's cache.
    """
    for start in range(0, len(product), TILE):
        end = start + TILE
        product[end:, start:end] = product[start:end, end:].mT
        corner = product[start:end, start:end]
        corner.copy_(corner.triu() + corner.triu(1).mT)
    return product


def packed(symmetric: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix as a vector: half the space."""
    if symmetric.device.type != "cpu":
        rows, columns = torch.triu_indices(*symmetric.shape, device=symmetric.device)
        return symmetric[rows, columns]
    rows = symmetric.numpy()  # row by row: four times as fast as with a mask of the triangle
    return torch.from_numpy(np.concatenate([row[i:] for i, row in enumerate(rows)]))


def unpacked(triangle: Tensor, size: int) -> Tensor:
    """The symmetric matrix whose upper triangle is given."""
    if len(triangle) != size * (size + 1) // 2:
        raise ValueError(f"a triangle of {len(triangle)} numbers does not fit a matrix of {size} rows.")
    whole = triangle.new_empty(size, size)
    if triangle.device.type != "cpu":
        rows, columns = torch.triu_indices(size, size, device=triangle.device)
        whole[rows, columns] = triangle
    else:
        values, start = triangle.numpy(), 0
        for i, row in enumerate(whole.numpy()):
            row[i:] = values[start : start + size - i]
            start += size - i
    return mirror(whole)


def _shrunk(covariance: Tensor, n: int) -> Tensor:
    """The oracle approximating shrinkage estimate (Chen et al., 2010), from the covariance alone."""
    d, share, mu = len(covariance), oas_share(covariance, n), covariance.trace() / len(covariance)
    return (1 - share) * covariance + share * mu * torch.eye(d, dtype=covariance.dtype, device=covariance.device)


def oas_share(covariance: Tensor, n: int) -> Tensor:
    """The share of the identity, times the mean variance, in the oracle approximating shrinkage of n samples."""
    d = len(covariance)
    alpha, mu = covariance.square().mean(), covariance.trace() / d
    apart = (n + 1) * (alpha - mu.square() / d)
    return torch.where(apart > 0, (alpha + mu.square()) / apart.clamp_min(1e-300), 1.0).clamp_max(1.0)


# Mahalanobis distance


class Mahalanobis(Score):
    """S(x) = 1 / min_c (z - mu_c)^T Sigma^-1 (z - mu_c), one covariance for all classes of the task.

    `shrinkage` is that of `ClassStatistics.covariance`: "none" is the paper's, a number is ROW's.
    """

    name = "md"
    summary = "inverse squared Mahalanobis distance to the nearest class mean"

    means_: Tensor
    whitening_: Tensor
    # `ClassStatistics`, for later merges; of the scatter, the upper triangle.
    counts_: Tensor
    pooled_: Tensor
    scatter_: Tensor

    def __init__(self, shrinkage: str | float = "auto") -> None:
        self.shrinkage = shrinkage

    def fit_features(self, z: Tensor, logits: Tensor, y: Tensor, others: Tensor | None = None) -> Self:
        """Class means and the inverse root of the pooled within-class covariance (divided by n)."""
        y = y.unique(return_inverse=True)[1]  # a class without samples has no mean
        return self._take(ClassStatistics.empty(z.shape[1], z.device).add(z, y))

    def merge(self, z: Tensor, y: Tensor) -> Self:
        """Add more samples: the same statistics as if all had come at once."""
        return self._take(self.statistics.add(z, y))

    def forget(self, c: int) -> Self:
        """Remove the mean of one class; the covariance, which is pooled over classes, stays."""
        self.means_ = without_row(self.means_, c)
        if self.mergeable:
            self.counts_ = without_row(self.counts_, c)
        return self

    @property
    def mergeable(self) -> bool:
        """Whether samples can be added; models of early versions did not store the scatter."""
        return hasattr(self, "scatter_")

    @property
    def estimator(self) -> str:
        """How the covariance was estimated; models of early versions stored too little to tell for "auto"."""
        return self.statistics.estimator(self.shrinkage) if self.mergeable else str(self.shrinkage)

    @property
    def statistics(self) -> ClassStatistics:
        """The statistics that the score is computed from."""
        return ClassStatistics(self.counts_, self.pooled_, self.means_, unpacked(self.scatter_, self.means_.shape[1]))

    def _take(self, statistics: ClassStatistics) -> Self:
        self.counts_, self.pooled_, self.means_, scatter = statistics
        self.scatter_ = packed(scatter)
        self.whitening_ = inverse_root(statistics.covariance(self.shrinkage))
        return self

    def distances(self, z: Tensor) -> Tensor:
        """Squared Mahalanobis distances to every class mean, `[n, c]`."""
        white, centres = z.double() @ self.whitening_, self.means_ @ self.whitening_
        # Differences, not the expanded square: exact for features close to a mean.
        if torch.compiler.is_compiling():  # ONNX has no counterpart of cdist
            return (white.unsqueeze(1) - centres).square().sum(dim=2)
        return torch.cdist(white, centres, compute_mode="donot_use_mm_for_euclid_dist").square()

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """1 / min_c d_c^2, bounded where a feature equals a mean."""
        return 1 / self.distances(z).amin(dim=1).clamp_min(NEAREST * z.shape[1])


def inverse_root(covariance: Tensor) -> Tensor:
    """W with W W^T = Sigma^-1, by eigenvectors; a tiny ridge makes a singular Sigma invertible.

    (A pseudo-inverse would ignore a sample's deviation where the training data did not vary.)
    """
    values, vectors = torch.linalg.eigh(covariance)
    mean_variance = values.mean().clamp_min(torch.finfo(torch.float64).tiny)
    if bool(values[0] <= RIDGE * mean_variance):
        values = values.clamp_min(0) + RIDGE * mean_variance
    root: Tensor = vectors * values.clamp_min(1e-24).rsqrt()
    return root.contiguous()  # the memory layout that loading restores: the same bits after it


# Nearest neighbours


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
        parts = []  # the k-th largest cosine of every row
        for start, block in zip(count(0, BLOCK), in_blocks(z, BLOCK), strict=False):
            cosines = block @ self.bank_.T
            if skip is None:
                parts.append(cosines.topk(k, dim=1).values[:, -1])
                continue
            place = skip[start : start + BLOCK].unsqueeze(1)
            itself = -torch.inf if len(self.bank_) > 1 else 1.0  # with a bank of one, it is all there is
            kept = cosines.gather(1, place.clamp_min(0)).masked_fill(place >= 0, itself)
            nearest = cosines.scatter_(1, place.clamp_min(0), kept).topk(k, dim=1).values
            parts.append(nearest.masked_fill(nearest.isneginf(), torch.inf).amin(dim=1))
        squared = (2 - 2 * (parts[0] if len(parts) == 1 else torch.cat(parts))).clamp_min(0)
        return squared if self.distance == "squared" else squared.sqrt()

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """-d_k."""
        return -self.distances(z)


def in_blocks(rows: Tensor, size: int) -> Sequence[Tensor]:
    """Rows in blocks of bounded size; in one block while a graph is traced, as its number of rows is dynamic."""
    return [rows] if torch.compiler.is_compiling() else rows.split(size)
