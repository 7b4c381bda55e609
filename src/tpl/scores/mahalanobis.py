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
    approximating estimate; "auto" takes "none" with at least five samples per dimension, else "oas".
    """

    name = "md"
    summary = "inverse squared Mahalanobis distance to the nearest class mean"

    means_: Tensor
    whitening_: Tensor

    def __init__(self, shrinkage: str = "auto") -> None:
        self.shrinkage = shrinkage

    def fit_features(self, z: Tensor, logits: Tensor, y: Tensor, others: Tensor | None = None) -> Self:
        """Class means and the inverse root of the pooled within-class covariance (divided by n)."""
        z = z.double()
        present, y = y.unique(return_inverse=True)  # a class without samples has no centre
        one_hot = torch.nn.functional.one_hot(y, len(present)).double()
        self.means_ = (one_hot.T @ z) / one_hot.sum(dim=0).unsqueeze(1)
        self.whitening_ = inverse_root(self._covariance(_spread(z, self.means_[y])))
        return self

    def distances(self, z: Tensor) -> Tensor:
        """Squared Mahalanobis distances to every class mean, `[n, c]`."""
        white, centres = z.double() @ self.whitening_, self.means_ @ self.whitening_
        # Differences, not the expanded square: exact for features close to a centre.
        return torch.cdist(white, centres, compute_mode="donot_use_mm_for_euclid_dist").square()

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """1 / min_c d_c^2, bounded where a feature sits on a centre."""
        return 1 / self.distances(z).amin(dim=1).clamp_min(NEAREST * z.shape[1])

    def _covariance(self, centred: Tensor) -> Tensor:
        n, d = centred.shape
        if self.shrinkage == "oas" or (self.shrinkage == "auto" and n < ENOUGH * d):
            from sklearn.covariance import oas  # slow to import, and not always needed

            covariance, _ = oas(centred.cpu().numpy(), assume_centered=True)
            return torch.from_numpy(covariance).to(centred)
        return centred.T @ centred / n


def _spread(z: Tensor, centres: Tensor) -> Tensor:
    """Deviations that a covariance can be made of.

    With one image a class nothing deviates from its own centre; then the spread of all images stands in, and
    with one image in all, its own size.
    """
    for deviations in (z - centres, z - z.mean(dim=0)):
        if bool(deviations.any()):
            return deviations
    size = z.square().mean().sqrt().clamp_min(1e-12)
    alike: Tensor = size * z.shape[1] ** 0.5 * torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
    return alike


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
