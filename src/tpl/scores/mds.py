"""MDS: squared Mahalanobis distance to the nearest class centre, as a detector uses it."""

from __future__ import annotations

from torch import Tensor

from tpl.scores.mahalanobis import Mahalanobis


class MahalanobisDistance(Mahalanobis):
    """S(x) = -min_c (z - mu_c)^T Sigma^-1 (z - mu_c).

    Statistics and options are those of TPL's MD, and so is the order of samples within a task; between tasks an
    inverse tells near samples apart best, a distance far ones.
    """

    name = "mds"
    summary = "squared Mahalanobis distance to the nearest class mean"
    paper = "Lee et al., Mahalanobis, NeurIPS 2018"

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """-min_c d_c^2."""
        return -self.distances(z).amin(dim=1)
