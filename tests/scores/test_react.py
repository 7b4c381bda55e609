"""ReAct against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import torch
from torch import Tensor

from tpl.scores import ReAct
from tpl.scores.features import percentile


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("percent", [85.0, 90.0, 100.0])
def test_energy_of_the_clipped_features(percent: float) -> None:
    z, queries, weight, bias = normal(50, 7), 3 * normal(20, 7, seed=1), normal(4, 7, seed=2), normal(4, seed=3)
    score = ReAct(percent).use_head(weight, bias).fit_features(z, z, torch.zeros(50))
    top = np.percentile(z.double().numpy(), percent)
    clipped = np.minimum(queries.double().numpy(), top)
    expected = scipy.special.logsumexp(clipped @ weight.double().numpy().T + bias.double().numpy(), axis=1)
    np.testing.assert_allclose(score.score_features(queries, queries).numpy(), expected, rtol=1e-12)


def test_agrees_with_pytorch_ood() -> None:
    detector = pytest.importorskip("pytorch_ood.detector")
    z, queries, weight, bias = normal(50, 7), 3 * normal(20, 7, seed=1), normal(4, 7, seed=2), normal(4, seed=3)
    score = ReAct().use_head(weight, bias).fit_features(z, z, torch.zeros(50))
    theirs = detector.ReAct(None, lambda x: x @ weight.T + bias).fit_feature_maps(z, torch.zeros(50))
    torch.testing.assert_close(
        score.score_features(queries, queries).float(), -theirs.predict_feature_maps(queries), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("n", [1, 2, 10, 11])
@pytest.mark.parametrize("percent", [0.0, 33.0, 90.0, 100.0])
def test_percentile_is_that_of_numpy(n: int, percent: float) -> None:
    values = normal(n)
    assert float(percentile(values, percent)) == pytest.approx(np.percentile(values.double().numpy(), percent))


def test_percentile_of_more_values_than_torch_quantile_takes() -> None:
    values = torch.arange(2**24 + 2, dtype=torch.int32).flip(0)
    assert float(percentile(values, 50.0)) == (2**24 + 1) / 2


def test_the_head_is_noted_as_it_was() -> None:
    weight, bias = normal(3, 5).double().requires_grad_(), normal(3).double()
    z = normal(9, 5)
    score = ReAct().use_head(weight, bias).fit_features(z, z, torch.zeros(9))
    before = score.score_features(z, z)
    with torch.no_grad():
        weight.zero_()
        bias.zero_()
    assert torch.equal(score.score_features(z, z), before)
    assert not before.requires_grad
    assert list(score.state()) == ["threshold_"]
