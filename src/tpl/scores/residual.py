"""Residual: length of a feature outside the subspace that the task's features span."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from tpl.scores.head import HeadScore


class Residual(HeadScore):
    """S(x) = -|| (z - u) N ||, the part of ViM that does not look at the logits.

    u = -pinv(W) b is where the head gives zero logits, N the eigenvectors of the second moment of z - u beyond the
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
