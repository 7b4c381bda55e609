"""MDS against scipy's distance with scikit-learn's covariance."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.spatial.distance
import torch
from sklearn.covariance import EmpiricalCovariance
from torch import Tensor

from tpl.scores import Mahalanobis, MahalanobisDistance


def data(n: int = 300, d: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    mixing = torch.randn(d, d, generator=g)
    y = torch.arange(n) % 3
    return torch.randn(n, d, generator=g) @ mixing + 4 * torch.eye(d)[y], y


def test_is_the_squared_distance_that_scipy_finds() -> None:
    z, y = data()
    queries = data(40, seed=1)[0]
    features, labels = z.double().numpy(), y.numpy()
    means = np.stack([features[labels == c].mean(axis=0) for c in range(3)])
    precision = EmpiricalCovariance(assume_centered=True).fit(features - means[labels]).precision_
    distances = scipy.spatial.distance.cdist(queries.double().numpy(), means, "mahalanobis", VI=precision)
    found = MahalanobisDistance().fit_features(z, z, y).score_features(queries, queries)
    np.testing.assert_allclose(found.numpy(), -(distances.min(axis=1) ** 2), rtol=1e-8)


def test_agrees_with_pytorch_ood() -> None:
    """There it is half the distance, and the covariance is not divided by n."""
    detector = pytest.importorskip("pytorch_ood.detector")
    z, y = data()
    queries = data(40, seed=1)[0]
    theirs = detector.Mahalanobis(None).fit_features(z, y).predict_features(queries)
    found = MahalanobisDistance().fit_features(z, z, y).score_features(queries, queries)
    torch.testing.assert_close(found.float(), -2 * 300 * theirs, rtol=1e-3, atol=1e-3)


def test_orders_samples_as_md_does() -> None:
    z, y = data()
    md, mds = (score().fit_features(z, z, y).score_features(z, z) for score in (Mahalanobis, MahalanobisDistance))
    torch.testing.assert_close(-1 / mds, md)
