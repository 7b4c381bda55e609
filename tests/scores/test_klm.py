"""KL matching against scipy's relative entropy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch import Tensor

from tpl.scores import KLMatching


def normal(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fitted(logits: Tensor) -> KLMatching:
    return KLMatching().fit_features(logits, logits, torch.zeros(len(logits)))


@pytest.mark.parametrize("classes", [2, 5])
def test_is_the_relative_entropy_that_scipy_finds(classes: int) -> None:
    logits, queries = normal(60, classes), normal(20, classes, seed=1)
    p, q = (scipy.special.softmax(x.numpy(), axis=1) for x in (logits, queries))
    templates = [p[p.argmax(axis=1) == c].mean(axis=0) for c in range(classes)]
    expected = [-min(scipy.stats.entropy(row, d) for d in templates) for row in q]
    np.testing.assert_allclose(fitted(logits).score_features(queries, queries).numpy(), expected, atol=1e-9)


def test_a_class_that_is_never_predicted_expects_certainty() -> None:
    logits = normal(60, 3)
    logits[:, 2] = -20
    score = fitted(logits)
    np.testing.assert_allclose(score.templates_[2].numpy(), [1e-12, 1e-12, 1.0])
    queries = torch.tensor([[-20.0, -20.0, 20.0], [0.0, 0.0, 5.0]])
    certain, doubtful = score.score_features(queries, queries).tolist()
    assert certain == pytest.approx(0, abs=1e-9)
    assert doubtful < -0.01


def test_agrees_with_pytorch_ood() -> None:
    detector = pytest.importorskip("pytorch_ood.detector")
    logits, queries = normal(60, 4), normal(20, 4, seed=1)
    theirs = detector.KLMatching(None).fit_logits(logits).predict_logits(queries)
    torch.testing.assert_close(fitted(logits).score_features(queries, queries), -theirs, rtol=1e-6, atol=1e-9)
