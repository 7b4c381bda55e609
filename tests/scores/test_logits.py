"""Logit scores against scipy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import torch

from tpl.scores import Energy, MaxLogit, MaxSoftmax, Score

LOGITS = torch.tensor([[1.0, -2.0, 0.5], [-3.0, -1.0, -2.0], [0.0, 0.0, 0.0], [900.0, -900.0, 0.0]])


def values(score: Score, logits: torch.Tensor) -> np.ndarray:
    found = score.fit_features(logits, logits, torch.zeros(len(logits))).score_features(logits, logits)
    assert found.dtype == torch.float64
    return found.numpy()


def test_maximum_logit() -> None:
    np.testing.assert_array_equal(values(MaxLogit(), LOGITS), [1.0, -1.0, 0.0, 900.0])


def test_maximum_softmax() -> None:
    expected = scipy.special.softmax(LOGITS.double().numpy(), axis=1).max(axis=1)
    np.testing.assert_allclose(values(MaxSoftmax(), LOGITS), expected, rtol=1e-12)


def test_energy_does_not_overflow() -> None:
    expected = scipy.special.logsumexp(LOGITS.double().numpy(), axis=1)
    np.testing.assert_allclose(values(Energy(), LOGITS), expected, rtol=1e-12)


@pytest.mark.parametrize(("score", "expected"), [(MaxLogit(), 2.5), (MaxSoftmax(), 1.0), (Energy(), 2.5)])
def test_a_task_of_one_class(score: Score, expected: float) -> None:
    np.testing.assert_allclose(values(score, torch.tensor([[2.5]])), [expected])


def test_nothing_is_stored() -> None:
    assert MaxLogit().state() == MaxSoftmax().state() == Energy().state() == {}
