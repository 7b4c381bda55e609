"""LogitNorm, MC dropout and outlier exposure against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from toy_tasks import CPU, random

from tpl.engine import IGNORED
from tpl.methods.bank.techniques import OE, LogitNorm, MCDropout

G = random(0)
Z = torch.randn(5, 4, generator=G)
WEIGHT, BIAS = torch.randn(3, 4, generator=G), torch.randn(3, generator=G)
LABELS = torch.tensor([2, 0, IGNORED, 1, 1])


def softmax(logits: np.ndarray) -> np.ndarray:
    odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return odds / odds.sum(axis=-1, keepdims=True)


def entropy(logits: np.ndarray, labels: torch.Tensor) -> float:
    """The mean of -log p over rows with a class."""
    rows = [i for i, y in enumerate(labels.tolist()) if 0 <= y < 3]
    return float(np.mean([-math.log(softmax(logits)[i, labels[i]]) for i in rows]))


def logits_of(z: torch.Tensor) -> np.ndarray:
    return z.double().numpy() @ WEIGHT.double().numpy().T + BIAS.double().numpy()


def test_logitnorm_is_cross_entropy_of_logits_of_length_25() -> None:
    logits = logits_of(Z)
    expected = entropy(25 * logits / np.linalg.norm(logits, axis=1, keepdims=True), LABELS) / 25
    found = float(LogitNorm(3, 4, 5, CPU).loss(Z, WEIGHT, BIAS, LABELS, torch.zeros(0)))
    assert found == pytest.approx(expected, rel=1e-5)  # a small difference of large logits, in float32


def test_logitnorm_gains_nothing_from_longer_logits() -> None:
    weight, bias = WEIGHT.clone().requires_grad_(), BIAS.clone().requires_grad_()
    loss = LogitNorm(3, 4, 5, CPU).loss(Z, weight, bias, LABELS, torch.zeros(0))
    grads = torch.autograd.grad(loss, [weight, bias])
    along = sum(float((g * p.detach()).sum()) for g, p in zip(grads, (weight, bias), strict=True))
    assert along == pytest.approx(0, abs=1e-4)  # the derivative by a factor on all of the head
    assert sum(float(g.norm()) for g in grads) > 0.1 / 25


def test_logitnorm_stands_logits_of_nothing_but_zeros() -> None:
    weight = torch.zeros(3, 4, requires_grad=True)
    loss = LogitNorm(3, 4, 5, CPU).loss(Z, weight, torch.zeros(3), LABELS, torch.zeros(0))
    assert float(loss.detach()) == pytest.approx(math.log(3) / 25)
    assert bool(torch.autograd.grad(loss, weight)[0].isfinite().all())


def test_dropout_drops_what_the_draws_say() -> None:
    technique = MCDropout(3, 4, 6, CPU)
    assert technique.numbers == 24
    draws = torch.rand(24, generator=random(1))
    kept = 2 * Z * (draws[:20].view(5, 4) >= 0.5)
    assert 0 < int((kept == 0).sum()) < 20
    expected = entropy(logits_of(kept), LABELS)
    assert float(technique.loss(Z, WEIGHT, BIAS, LABELS, draws)) == pytest.approx(expected)


def test_mc_dropout_answers_with_the_mean_of_its_passes() -> None:
    masks = MCDropout.masks(4)
    passes = [softmax(logits_of(Z.double() * mask)) for mask in masks]
    assert len(passes) == 5
    answers = MCDropout.logits(Z, WEIGHT, BIAS)
    np.testing.assert_allclose(answers.exp(), np.mean(passes, axis=0))
    np.testing.assert_allclose(answers.softmax(dim=1), np.mean(passes, axis=0))


def test_mc_dropouts_masks_are_always_the_same() -> None:
    masks = MCDropout.masks(384)
    assert torch.equal(masks, MCDropout.masks(384))
    assert set(masks.unique().tolist()) == {0.0, 2.0}
    assert float(masks.mean()) == pytest.approx(1, abs=0.1)
    assert len({tuple(mask.tolist()) for mask in masks}) == 5


def test_outlier_exposure_asks_outliers_for_the_uniform_distribution() -> None:
    labels = torch.tensor([2, 0, IGNORED, 3, 3])
    logits = logits_of(Z)
    to_uniform = [-np.log(softmax(logits)[i]).mean() for i in (3, 4)]
    expected = entropy(logits, labels) + 0.5 * float(np.mean(to_uniform))
    assert float(OE(3, 4, 5, CPU).loss(Z, WEIGHT, BIAS, labels, torch.zeros(0))) == pytest.approx(expected)


def test_outlier_exposures_gradient_is_softmax_minus_uniform() -> None:
    labels = torch.tensor([2, 0, IGNORED, 3, 3])
    z = Z.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(OE(3, 4, 5, CPU).loss(z, WEIGHT, BIAS, labels, torch.zeros(0)), z)
    expected = 0.5 / 2 * (softmax(logits_of(Z)) - 1 / 3) @ WEIGHT.double().numpy()
    np.testing.assert_allclose(gradient[3:], expected[3:], atol=1e-6)
    assert torch.equal(gradient[2], torch.zeros(4))


def test_outlier_exposure_without_outliers_is_plain_cross_entropy() -> None:
    loss = OE(3, 4, 5, CPU).loss(Z, WEIGHT, BIAS, LABELS, torch.zeros(0))
    assert float(loss) == pytest.approx(entropy(logits_of(Z), LABELS))
