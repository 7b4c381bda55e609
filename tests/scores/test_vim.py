"""ViM against numpy's eigenvectors."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import torch
from torch import Tensor

from tpl.scores import Residual, VirtualLogit


def data(n: int, d: int = 8, seed: int = 0) -> Tensor:
    """Features whose directions vary differently."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=g) * torch.linspace(3, 0.1, d) + 0.5


G = torch.Generator().manual_seed(9)
WEIGHT, BIAS = torch.randn(3, 8, generator=G), torch.randn(3, generator=G)


def logits_of(z: Tensor) -> Tensor:
    return z @ WEIGHT.T + BIAS


def fitted(z: Tensor, logits: Tensor) -> VirtualLogit:
    return VirtualLogit().use_head(WEIGHT, BIAS).fit_features(z, logits, torch.zeros(len(z)))


def test_is_what_numpy_finds() -> None:
    z, queries = data(60).double().numpy(), data(25, seed=1).double().numpy()
    weight, bias = WEIGHT.double().numpy(), BIAS.double().numpy()
    origin = -np.linalg.pinv(weight) @ bias
    values, vectors = np.linalg.eig((z - origin).T @ (z - origin))
    null = vectors[:, np.argsort(values)[:4]]
    residual = np.linalg.norm((z - origin) @ null, axis=1)
    alpha = (z @ weight.T + bias).max(axis=1).mean() / residual.mean()
    virtual = alpha * np.linalg.norm((queries - origin) @ null, axis=1)
    expected = scipy.special.logsumexp(queries @ weight.T + bias, axis=1) - virtual
    features, asked = torch.from_numpy(z), torch.from_numpy(queries)
    score = fitted(features, features @ WEIGHT.double().T + BIAS.double())
    found = score.score_features(asked, asked @ WEIGHT.double().T + BIAS.double())
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)


def test_agrees_with_pytorch_ood() -> None:
    detector = pytest.importorskip("pytorch_ood.detector")
    z, queries = data(60), data(25, seed=1)
    theirs = detector.ViM(None, d=4, w=WEIGHT, b=BIAS).fit_features(z, torch.zeros(60)).predict_features(queries)
    found = fitted(z, logits_of(z)).score_features(queries, logits_of(queries))
    torch.testing.assert_close(found.float(), -theirs, rtol=1e-3, atol=1e-3)


def test_negative_logits_do_not_reward_the_residual() -> None:
    z = data(60)
    score = fitted(z, logits_of(z) - 100)
    assert float(score.alpha_) > 0
    off = score.null_[:, 0].float()
    assert bool((score.score_features(z + 50 * off, logits_of(z)) < score.score_features(z, logits_of(z))).all())


@pytest.mark.parametrize("n", [1, 3])
def test_fewer_samples_than_the_subspace_has_dimensions(n: int) -> None:
    """The training data leave no residual; what leaves one is far out, by a finite amount."""
    z = data(n)
    score = fitted(z, logits_of(z))
    own, other = (score.score_features(x, logits_of(x)) for x in (z, data(9, seed=1)))
    assert float(own.min()) > float(other.max())
    assert bool(other.isfinite().all())
    assert float(score.alpha_) < 1e8


def test_without_the_energy_it_is_the_residual() -> None:
    z = data(60)
    score = fitted(z, logits_of(z))
    plain = Residual().use_head(WEIGHT, BIAS).fit_features(z, z, torch.zeros(60))
    part = score.score_features(z, logits_of(z)) - logits_of(z).double().logsumexp(dim=1)
    torch.testing.assert_close(part, score.alpha_ * plain.score_features(z, z))
