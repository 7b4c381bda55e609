"""Residual against a singular value decomposition by numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpl.scores import Residual

Array = NDArray[np.float64]


def data(n: int, d: int = 8, seed: int = 0) -> Tensor:
    """Features whose directions vary differently."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=g) * torch.linspace(3, 0.1, d) + 0.5


def head(classes: int = 3, d: int = 8) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(9)
    return torch.randn(classes, d, generator=g), torch.randn(classes, generator=g)


def by_svd(z: Tensor, queries: Tensor, dim: int) -> Array:
    """What is left of a query after its projection onto the leading right singular vectors is taken away."""
    weight, bias = (part.double().numpy() for part in head(d=z.shape[1]))
    origin = np.linalg.lstsq(weight, -bias, rcond=None)[0]  # the smallest z with zero logits
    leading = np.linalg.svd(z.double().numpy() - origin)[2][:dim].T
    centred = queries.double().numpy() - origin
    return np.asarray(np.linalg.norm(centred - centred @ leading @ leading.T, axis=1))


@pytest.mark.parametrize(("d", "dim", "expected_dim"), [(8, None, 4), (7, None, 3), (8, 6, 6), (8, 512, 7)])
def test_is_what_a_projection_leaves(d: int, dim: int | None, expected_dim: int) -> None:
    z, queries = data(60, d), data(25, d, seed=1)
    score = Residual(dim).use_head(*head(d=d)).fit_features(z, z, torch.zeros(60))
    np.testing.assert_allclose(
        score.score_features(queries, queries).numpy(), -by_svd(z, queries, expected_dim), rtol=1e-6
    )


def test_features_within_the_subspace_leave_nothing() -> None:
    z = data(60)
    z[:, 4:] = 0
    weight, bias = head()
    score = Residual().use_head(weight, torch.zeros_like(bias)).fit_features(z, z, torch.zeros(60))
    np.testing.assert_allclose(score.score_features(z, z).numpy(), 0, atol=1e-6)
    out = z + torch.eye(8)[6]
    np.testing.assert_allclose(score.score_features(out, out).numpy(), -1, rtol=1e-6)


def test_the_origin_has_zero_logits() -> None:
    z, (weight, bias) = data(60), head()
    score = Residual().use_head(weight, bias).fit_features(z, z, torch.zeros(60))
    np.testing.assert_allclose((weight.double() @ score.origin_ + bias.double()).numpy(), 0, atol=1e-12)
