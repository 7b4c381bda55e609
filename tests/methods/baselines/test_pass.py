"""PASS: rotations and their labels, noise around prototypes, and the three terms of the loss by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.methods.pass_ import PASS, PassLoss, noisy, rotated, rotated_labels, spread
from tpl.stream import Stream

OPTIONS = {
    "latent": 8,
    "epochs": 1,
    "batch_size": 16,
    "lr": 0.01,
    "temperature": 0.5,
    "prototype_weight": 2.0,
    "distill_weight": 0.2,
}


@pytest.fixture(scope="module")
def learned(small_stream: Stream) -> Learner:
    learner = Learner("pass", SMALL_VIT, device="cpu", **OPTIONS)
    for task in small_stream[:2]:
        learner.method.learn(task)
    return learner


def test_rotations_and_labels() -> None:
    images = torch.arange(2 * 3 * 4 * 4).view(2, 3, 4, 4)
    turned, labels = rotated(images), rotated_labels(torch.tensor([5, -100]))
    for row in range(8):
        image, turns = row % 2, row // 2
        expected = np.rot90(images[image].numpy(), turns, axes=(1, 2)).copy()
        assert torch.equal(turned[row], torch.from_numpy(expected))
        assert labels[row] == (4 * 5 + turns if image == 0 else -100)


def test_prototype_noise_is_normal_with_the_radius_and_all_classes_are_drawn() -> None:
    prototypes = torch.tensor([[0.0] * 6, [10.0] * 6, [20.0] * 6])
    draws = torch.rand(3000 * 7, generator=torch.Generator().manual_seed(0))
    rows, numbers = noisy(prototypes, torch.tensor(0.5), draws, 3000)
    noise = (rows - prototypes[numbers]) / 0.5
    assert torch.bincount(numbers).min() > 900
    probabilities = torch.linspace(0.05, 0.95, 7)
    normal = torch.distributions.Normal(0.0, 1.0).icdf(probabilities)
    torch.testing.assert_close(noise.flatten().quantile(probabilities), normal, rtol=0, atol=0.04)
    extreme, last = noisy(
        prototypes, torch.tensor(1.0), torch.tensor([1 - 2.0**-24] + [0.0] * 3 + [1 - 2.0**-24] * 3), 1
    )
    assert bool(extreme.isfinite().all()) and last.tolist() == [2]


def test_the_radius_is_the_mean_trace_of_class_covariances() -> None:
    z = torch.randn(30, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.tensor([0] * 12 + [1] * 17 + [2])
    z[y == 1] *= 3
    means = torch.stack([z[y == c].mean(dim=0) for c in range(3)])
    traces = [np.trace(np.cov(z[y == c].numpy().T)) / 5 for c in range(2)] + [0.0]  # one image: nothing to tell
    found = spread(z - means[y], y, torch.bincount(y).double())
    assert float(found) == pytest.approx(np.sqrt(np.mean(traces)))


def test_the_loss_by_hand(learned: Learner) -> None:
    method = learned.method
    assert isinstance(method, PASS)
    g = torch.Generator().manual_seed(0)
    teacher, network = method.network.copy(), method.network.copy().requires_grad_()
    network.grow(4, torch.Generator().manual_seed(1))  # a fifth class
    with torch.no_grad():
        teacher.norms += 0.05 * torch.randn(teacher.norms.shape, generator=g)
    objective = PassLoss(network, teacher, method)
    images, draws = torch.randn(3, 3, 32, 32, generator=g), torch.rand(1, objective.numbers, generator=g)
    labels = torch.tensor([[4, 4, -100]])
    loss = objective.losses(images, labels, torch.zeros(()), draws)

    with torch.no_grad():
        entropy, apart, length = [], 0.0, 0.0
        for k in range(4):
            views = torch.rot90(images[:2], k, (2, 3))
            z = network.features(views)
            entropy.append(-(network.logits(z) / 0.5).log_softmax(dim=1)[:, 16 + k])
            before = teacher.features(views)
            apart += float((z - before).square().sum())
            length += float(before.square().sum())
        old, numbers = noisy(method.prototypes.float(), method.radius.float(), draws[0], 16)
        recalled = F.nll_loss((network.logits(old) / 0.5).log_softmax(dim=1), 4 * numbers)
    expected = torch.cat(entropy).mean() + 2 * recalled + 0.2 * (apart / length) ** 0.5
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert numbers.unique().numel() > 1 and apart > 0

    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in teacher.parameters())
    assert all(p.grad is not None for p in network.parameters())


def test_the_pull_does_not_depend_on_the_features_scale(learned: Learner) -> None:
    """Features eight times as long: measured by the distance itself, the pull would be eight times as strong."""
    method = learned.method
    assert isinstance(method, PASS)
    g = torch.Generator().manual_seed(0)
    images, labels, pulls = torch.randn(3, 3, 32, 32, generator=g), torch.tensor([[2, 3, 3]]), []
    for scale in (1.0, 8.0):
        network, teacher = method.network.copy(), method.network.copy()
        with torch.no_grad():
            network.adapters.up_bias += torch.randn(
                network.adapters.up_bias.shape, generator=torch.Generator().manual_seed(2)
            )
            for part in (network, teacher):
                part.norms[-1] *= scale  # the last norm: what follows it is the head
        losses = []
        for weight in (0.0, 1.0):
            objective = PassLoss(network, teacher, method)
            objective.config = method.config.replace(distill_weight=weight)
            draws = torch.rand(1, objective.numbers, generator=torch.Generator().manual_seed(1))
            losses.append(float(objective.losses(images, labels, torch.zeros(()), draws)))
        pulls.append(losses[1] - losses[0])
    assert pulls[0] > 0.01
    assert pulls[1] == pytest.approx(pulls[0], rel=1e-2)


def test_a_network_that_has_not_moved_is_not_pulled(learned: Learner) -> None:
    """The norm has no slope at zero; it must not give NaN there."""
    method = learned.method
    assert isinstance(method, PASS)
    objective = PassLoss(method.network, method.network.copy(), method)
    method.network.zero_grad()
    images, draws = torch.randn(2, 3, 32, 32), torch.rand(1, objective.numbers)
    objective.losses(images, torch.tensor([[2, 3]]), torch.zeros(()), draws).sum().backward()  # type: ignore[no-untyped-call]
    assert all(bool(p.grad.isfinite().all()) for p in method.network.parameters() if p.grad is not None)


def test_prototypes_are_class_means_and_stay(learned: Learner, small_stream: Stream) -> None:
    method = learned.method
    assert isinstance(method, PASS)
    pixels, labels = learned.prepare(small_stream[1].train), np.asarray(small_stream[1].train.labels)
    z = method.features(pixels).double()
    expected = torch.stack([z[labels == c].mean(dim=0) for c in (0, 1)])
    torch.testing.assert_close(method.prototypes[2:], expected)
    old, radius = method.prototypes.clone(), method.radius.clone()
    assert radius > 0
    again = Learner("pass", SMALL_VIT, device="cpu", **OPTIONS).method
    assert isinstance(again, PASS)
    again.learn(small_stream[0])
    assert torch.equal(old[:2], again.prototypes) and torch.equal(radius, again.radius)  # the second task moved neither


def test_answers_come_from_upright_classes(learned: Learner, small_stream: Stream) -> None:
    method = learned.method
    assert isinstance(method, PASS)
    pixels = learned.prepare(small_stream[0].train)[::12]
    network = method.network
    assert len(network.head_bias) == 16
    with torch.no_grad():
        logits = network(method.normalise(pixels))
    expected = (logits[:, [0, 4, 8, 12]].double() / 0.5).log_softmax(dim=1)
    torch.testing.assert_close(method.log_probabilities(pixels), expected, rtol=1e-3, atol=1e-3)


def test_a_class_can_go(small_stream: Stream) -> None:
    learner = Learner("pass", SMALL_VIT, device="cpu", **OPTIONS)
    learner.learn(small_stream[0]).learn(small_stream[1])
    method = learner.method
    assert isinstance(method, PASS)
    rows, prototypes = method.network.head_weight.detach().clone(), method.prototypes.clone()
    learner.remove("class 1")
    kept = [0, 1, 2, 3, *range(8, 16)]
    assert torch.equal(method.network.head_weight, rows[kept])
    assert torch.equal(method.prototypes, prototypes[[0, 2, 3]])
