"""VOS: what is kept, where virtual outliers lie, and what the uncertainty loss moves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from toy_tasks import CPU, SmallVOS, random

from tpl.engine import IGNORED
from tpl.methods.bank.techniques import VOS


def test_queues_keep_the_latest_features_of_every_class() -> None:
    technique = SmallVOS(3, 2, 30, CPU)
    kept: list[list[list[float]]] = [[], [], []]
    g = random(0)
    for size in (5, 30, 1, 30, 17):
        z, labels = torch.randn(size, 2, generator=g), torch.randint(-1, 3, (size,), generator=g)
        labels[labels < 0] = IGNORED
        if size == 17:
            labels[:] = 1
        if size == 30:
            labels[5:] = 0  # more rows of a class than its queue holds
        technique.keep(z, labels)
        for row, label in zip(z.tolist(), labels.tolist(), strict=True):
            if label != IGNORED:
                kept[label].append(row)
    assert technique.counts.tolist() == [len(rows) for rows in kept]
    for label, rows in enumerate(kept):
        queue = technique.queue[20 * label : 20 * (label + 1)].tolist()
        assert sorted(row for row in queue if any(row)) == sorted(rows[-20:])


def gaussian_technique(own: int, dim: int, rows: int) -> tuple[VOS, np.ndarray, np.ndarray]:
    """A technique with full queues, their means and the shared covariance."""
    technique = type("LongVOS", (VOS,), {"queue_size": rows})(own, dim, rows, CPU)
    g = random(0)
    shape = torch.randn(dim, dim, generator=g) / math.sqrt(dim)
    for label in range(own):
        z = torch.randn(rows, dim, generator=g) @ shape + 3 * torch.randn(dim, generator=g)
        technique.keep(z, torch.full((rows,), label))
    features = technique.queue[:-1].double().numpy().reshape(own, rows, dim)
    means = features.mean(axis=1)
    deviations = (features - means[:, None]).reshape(-1, dim)
    return technique, means, deviations.T @ deviations / len(deviations) + 1e-4 * np.eye(dim)


def test_virtual_outliers_have_the_classes_means_and_the_stretched_shared_covariance() -> None:
    technique, means, covariance = gaussian_technique(own=2, dim=3, rows=15)
    draws = torch.rand(8_000, technique.numbers, generator=random(1))
    points = torch.stack([technique.virtual(d) for d in draws]).double().numpy()
    error = technique.stretch * np.sqrt(np.diag(covariance).max() / len(points))  # of a mean
    np.testing.assert_allclose(points.mean(axis=0), means, atol=4 * error)
    for label in range(2):
        seen = np.cov(points[:, label].T) / technique.stretch**2
        np.testing.assert_allclose(seen, covariance, atol=0.05 * np.abs(covariance).max())
    between = np.cov(points[:, 0].T, points[:, 1].T)[:3, 3:]
    assert np.abs(between).max() < 0.5 * np.abs(covariance).max() * technique.stretch**2


def test_virtual_outliers_are_about_as_unlikely_as_the_least_likely_of_ten_thousand() -> None:
    technique, means, covariance = gaussian_technique(own=2, dim=64, rows=100)
    factor, inverse = np.linalg.cholesky(covariance), np.linalg.inv(covariance)

    def norm(deviation: np.ndarray) -> np.ndarray:
        return np.sqrt(np.einsum("ij,jk,ik->i", deviation, inverse, deviation))

    points = np.random.default_rng(0).standard_normal((10_000, 64)) @ factor.T
    farthest, typical = norm(points).max(), np.median(norm(points))
    draws = torch.rand(50, technique.numbers, generator=random(1))
    virtual = np.mean([norm(technique.virtual(d).double().numpy() - means) for d in draws])
    assert farthest / typical > 1.25
    assert virtual == pytest.approx(farthest, rel=0.05)


def toy() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = random(5)
    z, weight, bias = torch.randn(6, 4, generator=g), torch.randn(3, 4, generator=g), torch.randn(3, generator=g)
    return z, weight, bias, torch.tensor([0, 1, 2, 0, IGNORED, 1])


def test_until_every_queue_is_full_the_loss_is_cross_entropy() -> None:
    technique = SmallVOS(3, 4, 6, CPU)
    z, weight, bias, labels = toy()
    draws = torch.rand(technique.numbers, generator=random(0))
    technique.keep(torch.randn(39, 4, generator=random(1)), torch.arange(39) % 2)
    technique.keep(torch.randn(18, 4, generator=random(2)), torch.full((18,), 2))
    plain = float(F.cross_entropy(F.linear(z, weight, bias), labels, ignore_index=IGNORED))
    losses = [technique.loss(z, weight, bias, labels, draws).item() for _ in range(3)]  # one row of class 2 a step
    assert losses[0] == pytest.approx(plain)
    assert all(loss > plain + 0.001 for loss in losses[1:])


def test_the_loss_is_that_of_the_definition() -> None:
    technique = SmallVOS(3, 4, 6, CPU)
    z, weight, bias, labels = toy()
    technique.keep(torch.randn(60, 4, generator=random(1)), torch.arange(60) % 3)
    draws = torch.rand(technique.numbers, generator=random(0))
    with torch.no_grad():
        technique.scale.fill_(0.8)
        technique.offset.fill_(-0.3)
    loss = technique.loss(z, weight, bias, labels, draws).item()
    odds = np.exp((z @ weight.T + bias).double().numpy())
    virtual = np.exp((technique.virtual(draws) @ weight.T + bias).double().numpy())
    rows = [0, 1, 2, 3, 5]
    entropy = np.mean([-np.log(odds[i, labels[i]] / odds[i].sum()) for i in rows])
    real = 1 / (1 + np.exp(-(0.8 * np.log(odds[rows].sum(axis=1)) - 0.3)))
    fake = 1 / (1 + np.exp(-(0.8 * np.log(virtual.sum(axis=1)) - 0.3)))
    assert loss == pytest.approx(entropy - 0.1 * (np.log(real).mean() + np.log(1 - fake).mean()), rel=1e-5)


def test_the_uncertainty_loss_reaches_features_head_and_regression() -> None:
    """It raises real features' logsumexp; cross-entropy alone would be indifferent to it."""
    technique = SmallVOS(3, 4, 6, CPU)
    z, weight, bias, labels = toy()
    technique.keep(torch.randn(60, 4, generator=random(1)), torch.arange(60) % 3)
    leaves = [t.requires_grad_() for t in (z, weight, bias)]
    draws = torch.rand(technique.numbers, generator=random(0))
    loss = technique.loss(*leaves, labels, draws)
    plain = F.cross_entropy(F.linear(z, weight, bias), labels, ignore_index=IGNORED)
    energy = F.linear(z, weight, bias).logsumexp(dim=1)
    real = F.softplus(-energy)[labels != IGNORED].mean()
    virtual = F.softplus(F.linear(technique.virtual(draws), weight, bias).logsumexp(dim=1)).mean()
    for part, expected in zip(
        torch.autograd.grad(loss - plain, leaves, retain_graph=True),
        torch.autograd.grad(0.1 * (real + virtual), leaves),
        strict=True,
    ):
        assert float(part.norm()) > 1e-3
        torch.testing.assert_close(part, expected)
    assert all(float(g.abs()) > 0 for g in torch.autograd.grad(loss, technique.parameters()))


@pytest.mark.parametrize("seed", range(2))
def test_training_parts_the_energies_of_real_and_virtual_points(seed: int) -> None:
    """Further than cross-entropy alone does."""
    g, labels = random(seed), torch.arange(20) % 2
    steps = [2 * F.one_hot(labels, 4) + 0.5 * torch.randn(20, 4, generator=g) for _ in range(300)]
    gaps = []
    for plain in (True, False):
        technique, draw = SmallVOS(2, 4, 20, CPU), random(seed)
        weight, bias = torch.zeros(2, 4, requires_grad=True), torch.zeros(2, requires_grad=True)
        optimiser = torch.optim.SGD([weight, bias, *technique.parameters()], lr=0.1)
        for z in steps:
            loss = technique.loss(z, weight, bias, labels, torch.rand(technique.numbers, generator=draw))
            optimiser.zero_grad()
            (F.cross_entropy(F.linear(z, weight, bias), labels) if plain else loss).backward()
            optimiser.step()
        virtual = torch.cat([technique.virtual(torch.rand(technique.numbers, generator=draw)) for _ in range(300)])
        real, fake = (F.linear(z, weight, bias).logsumexp(dim=1).mean().item() for z in (torch.cat(steps), virtual))
        gaps.append(real - fake)
    assert gaps[1] > gaps[0]
