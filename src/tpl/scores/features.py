"""OOD scores from a task's features, some of them with the weights of its head."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from tpl.scores.base import Score, positive_mean
from tpl.scores.distances import Mahalanobis

SMALLEST_RESIDUAL = 1e-6  # of the features' mean length: a smaller mean residual counts as this one


class MahalanobisDistance(Mahalanobis):
    """MDS: S(x) = -min_c (z - mu_c)^T Sigma^-1 (z - mu_c).

    Statistics and options are those of TPL's MD, and so is the ranking of samples within a task. Between tasks the
    inverse distance separates near samples best, the distance far ones.
    """

    name = "mds"
    summary = "squared Mahalanobis distance to the nearest class mean"
    paper = "Lee et al., Mahalanobis, NeurIPS 2018"

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """-min_c d_c^2."""
        return -self.distances(z).amin(dim=1)


class HeadScore(Score):
    """A score that uses the task's head, f = W z + b."""

    weight: Tensor
    bias: Tensor

    def use_head(self, weight: Tensor, bias: Tensor) -> Self:
        """Keep a float64 copy of W `[c, d]` and b `[c]`; without an underscore they are not part of `state`."""
        self.weight = weight.detach().to(torch.float64, copy=True)
        self.bias = bias.detach().to(torch.float64, copy=True)
        return self


class ReAct(HeadScore):
    """S(x) = log sum_c exp (W min(z, t) + b)_c, t the 90th percentile of all activations in the task's training data.

    Negative values are not clipped, though a transformer has them.
    """

    name = "react"
    summary = "free energy with large activations clipped"
    paper = "Sun et al., ReAct, NeurIPS 2021"

    threshold_: Tensor

    def __init__(self, percentile: float = 90.0) -> None:
        self.percentile = percentile

    def fit_features(self, z: Tensor, logits: Tensor, y: Tensor, others: Tensor | None = None) -> Self:
        """The percentile over all samples and dimensions."""
        self.threshold_ = percentile(z, self.percentile)
        return self

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """logsumexp_c of the clipped features' logits."""
        return torch.logsumexp(z.double().minimum(self.threshold_) @ self.weight.T + self.bias, dim=1)


def percentile(values: Tensor, percent: float) -> Tensor:
    """A percentile with linear interpolation, of any number of values (`torch.quantile` is limited to 16 million)."""
    ordered = values.flatten().sort().values
    place = percent / 100 * (len(ordered) - 1)
    below = int(place)
    low, high = ordered[below].double(), ordered[min(below + 1, len(ordered) - 1)].double()
    return torch.lerp(low, high, place - below)


class Residual(HeadScore):
    """S(x) = -|| (z - u) N ||, the part of ViM that does not use the logits.

    u = -pinv(W) b is the point with zero logits, N the eigenvectors of the second moment of z - u beyond the
    `dim` largest. By default `dim` is half the feature size; at least one direction is always left.
    """

    name = "residual"
    summary = "length outside the principal subspace of the features"
    paper = "Wang et al., ViM, CVPR 2022"

    origin_: Tensor
    null_: Tensor

    def __init__(self, dim: int | None = None) -> None:
        self.dim = dim

    def fit_features(self, z: Tensor, logits: Tensor, y: Tensor, others: Tensor | None = None) -> Self:
        """u `[d]` and N `[d, d - dim]`."""
        self.origin_ = -torch.linalg.pinv(self.weight) @ self.bias
        centred = z.double() - self.origin_
        size = z.shape[1]
        dim = size // 2 if self.dim is None else min(self.dim, size - 1)
        vectors = torch.linalg.eigh(centred.T @ centred / len(z)).eigenvectors  # ascending eigenvalues
        self.null_ = vectors[:, : size - dim].contiguous()
        return self

    def residuals(self, z: Tensor) -> Tensor:
        """|| (z - u) N || per row."""
        length: Tensor = torch.linalg.vector_norm((z.double() - self.origin_) @ self.null_, dim=1)
        return length

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """-|| (z - u) N ||."""
        return -self.residuals(z)


class VirtualLogit(Residual):
    """S(x) = log sum_c exp f_c - alpha || (z - u) N ||, alpha = mean max_c f_c / mean residual on the training data.

    Where the largest logits are negative on average, their mean magnitude is used: a negative alpha would reward the
    residual. Fewer training samples than `dim` leave no residual; alpha is bounded then.
    """

    name = "vim"
    summary = "free energy less a virtual logit from the residual"
    paper = "Wang et al., ViM, CVPR 2022"

    alpha_: Tensor

    def fit_features(self, z: Tensor, logits: Tensor, y: Tensor, others: Tensor | None = None) -> Self:
        """u, N and alpha."""
        super().fit_features(z, logits, y, others)
        length = torch.linalg.vector_norm(z.double() - self.origin_, dim=1).mean()
        residual = self.residuals(z).mean().maximum(SMALLEST_RESIDUAL * length).clamp_min(1e-12)
        self.alpha_ = positive_mean(logits.double().amax(dim=1)) / residual
        return self

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """logsumexp_c f_c - alpha || (z - u) N ||."""
        return torch.logsumexp(logits.double(), dim=1) - self.alpha_ * self.residuals(z)
