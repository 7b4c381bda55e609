"""AFC: importances by autograd, its losses by hand, and proxies that stand where and when they should."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tpl import Learner
from tpl.engine import IGNORED, Samples
from tpl.methods.afc import (
    AFC,
    Consolidation,
    ProxyNetwork,
    centres,
    changes,
    importances,
    margin_losses,
    similarities,
)
from tpl.stream import Stream

OPTIONS = {"latent": 8, "epochs": 1, "batch_size": 16, "lr": 0.05, "memory": 12, "proxies": 3}


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@pytest.fixture(scope="module")
def learner(small_stream: Stream) -> Learner:
    """One that has learned a task of two classes."""
    learner = Learner("afc", device="cpu", **OPTIONS)
    learner.learn(small_stream[0])
    return learner


@pytest.fixture(scope="module")
def network(learner: Learner) -> ProxyNetwork:
    assert isinstance(learner.method, AFC)
    return learner.method.network.copy().requires_grad_(True)


def test_similarities_by_hand() -> None:
    features = torch.tensor([[2.0, 0.0]])
    proxies = torch.tensor([[[1.0, 0.0], [0.0, 3.0]], [[-1.0, 0.0], [-5.0, 0.0]]])  # cosines 1, 0 and -1, -1
    by_hand = torch.tensor([[math.e / (math.e + 1), -1.0]])
    torch.testing.assert_close(similarities(features, proxies), by_hand)


def test_the_margin_is_the_right_class_s_alone_and_that_class_is_left_out_of_the_sum() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.5], [9.0, 1.0, 0.5], [0.0, 1.0, 2.0]])
    labels = torch.tensor([0, 0, IGNORED])
    first = -(3.0 - 2.0) + math.log(math.exp(1.0) + math.exp(0.5))
    losses = margin_losses(logits, labels, 2.0)
    torch.testing.assert_close(losses[:2], torch.tensor([first, 0.0]))  # the second wins by more than the margin
    alone = margin_losses(torch.zeros(1, 1, requires_grad=True), torch.tensor([0]), 0.6)
    alone.sum().backward()
    assert alone.tolist() == [0.0]  # one class has nobody to win over


def test_eta_grows_where_the_right_class_leads_though_not_by_the_margin(network: ProxyNetwork) -> None:
    """With a gradient through the margin it would shrink, through zero, and every answer would turn round."""
    first, second = F.normalize(network.head_weight.detach().mean(dim=1), dim=1)
    between = (0.6 * first + 0.4 * second).unsqueeze(0)
    s = similarities(between, network.head_weight.detach())[0]
    assert 0 < float(s[0] - s[1]) < 0.6
    loss = network.margin_losses(between, torch.tensor([0]), 0.6)
    (slope,) = torch.autograd.grad(loss.sum(), network.scale)
    torch.testing.assert_close(slope, s[1] - s[0])


def test_changes_by_hand() -> None:
    now, then = torch.randn(2, 4, 3, generator=seeded(0)), torch.randn(2, 4, 3, generator=seeded(1))
    importance = torch.tensor([[0.5, 1.0, 1.5]])
    by_hand = []
    for x, y in zip(now, then, strict=True):
        total = 0.0
        for channel, weight in enumerate(importance[0].tolist()):
            a, b = x[:, channel] ** 2, y[:, channel] ** 2
            total += weight * float((a / a.norm() - b / b.norm()).norm()) / 3
        by_hand.append(total)
    torch.testing.assert_close(changes([now], [then], importance), torch.tensor(by_hand))
    same = now.clone().requires_grad_()
    changes([same], [now], importance).sum().backward()
    assert same.grad is not None and bool(same.grad.isfinite().all())  # as in a task's first step


def test_stages_are_the_outputs_of_blocks(network: ProxyNetwork) -> None:
    images = torch.randn(2, 3, 32, 32, generator=seeded(2))
    features, stages = network.staged(images)
    assert network.stage_ends == [0, 2, 3, 5]
    assert torch.equal(features, network.features(images))
    norm = network.trunk[0].vit.norm
    assert norm is not None
    scale, shift = network.norms[-1]
    last = F.layer_norm(stages[-1], stages[-1].shape[-1:], scale, shift, norm.eps)
    torch.testing.assert_close(network.trunk[0].vit.pool(last), features)


def test_importances_are_squared_gradients_of_each_image_by_autograd(network: ProxyNetwork, learner: Learner) -> None:
    pixels = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=seeded(3))
    labels, normalise = torch.tensor([0, 1, 1, 0, 1]), learner.method.normalise
    found = importances(network, [Samples(pixels[:2], labels[:2]), Samples(pixels[2:], labels[2:])], 0.6, normalise)
    by_hand = torch.zeros_like(found)
    for pixel, label in zip(pixels, labels.tolist(), strict=True):  # image by image
        features, stages = network.staged(normalise(pixel.unsqueeze(0)))
        s = network.scale * similarities(features, network.head_weight)[0]
        loss = -(s[label] - network.scale * 0.6) + s[1 - label]
        for row, slope in zip(by_hand, torch.autograd.grad(loss.clamp_min(0), stages), strict=True):
            row += slope[0].square().sum(dim=0)
    assert bool((by_hand > 0).any())
    torch.testing.assert_close(found, by_hand / by_hand.mean(dim=1, keepdim=True), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.mean(dim=1), torch.ones(4))


def test_rows_that_fill_a_compiled_trunk_s_block_up_have_no_importance(
    network: ProxyNetwork, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=seeded(6))
    samples, normalise = [Samples(pixels, torch.tensor([0, 1, 1]))], learner.method.normalise
    plain = importances(network, samples, 0.6, normalise)
    monkeypatch.setattr("tpl.methods.afc.BLOCK", 8)
    monkeypatch.setattr(network.trunk[0], "fused", True)
    torch.testing.assert_close(importances(network, samples, 0.6, normalise), plain, rtol=1e-3, atol=1e-4)


def test_the_charge_is_zero_at_first_and_grows_with_the_classes(network: ProxyNetwork) -> None:
    teacher = network.copy()
    student = network.copy().requires_grad_(True)
    student.grow(3, seeded(0))
    with torch.no_grad():
        student.head_weight[2:] = torch.randn(3, 3, student.head_weight.shape[2], generator=seeded(4))
    images, labels = torch.randn(3, 3, 32, 32, generator=seeded(5)), torch.tensor([[0, 4, IGNORED]])
    nothing = torch.zeros(())
    plain = Consolidation(student, 0.6).losses(images, labels, nothing, nothing)
    charged = Consolidation(student, 0.6, teacher, 4.0)
    assert torch.equal(charged.losses(images, labels, nothing, nothing), plain)
    with torch.no_grad():
        student.adapters.up_weight += 0.05
        change = changes(student.staged(images)[1], teacher.staged(images)[1], teacher.importance)[:2].mean()
        plain = Consolidation(student, 0.6).losses(images, labels, nothing, nothing)
        more = charged.losses(images, labels, nothing, nothing) - plain
    torch.testing.assert_close(more[0], 4 * math.sqrt(5 / 3) * change, rtol=1e-3, atol=1e-5)
    assert float(change) > 0


def test_centres_of_clear_clusters() -> None:
    points = torch.tensor([[0.0, 0.0], [0.0, 0.2], [9.0, 9.0], [9.0, 9.2]])
    found = centres(points, 2, seeded(0))
    assert sorted(found.tolist()) == [pytest.approx([0.0, 0.1]), pytest.approx([9.0, 9.1])]
    assert centres(points[:1], 3, seeded(0)).tolist() == [[0.0, 0.0]] * 3  # fewer points than centres


def test_old_proxies_stand_still_while_features_are_trained(learner: Learner, small_stream: Stream) -> None:
    method = learner.method
    assert isinstance(method, AFC)
    before, importance = method.network.head_weight.detach().clone(), method.network.importance.clone()
    method.config = method.config.replace(balanced_epochs=0.0, weight_decay=0.01)
    learner.learn(small_stream[1])
    assert torch.equal(method.network.head_weight[:2], before)
    assert method.network.head_weight[2:].any()
    assert not torch.equal(method.network.importance, importance)
    method.config = method.config.replace(balanced_epochs=1.0)
    learner.learn(small_stream[2])
    assert not torch.equal(method.network.head_weight[:2], before)  # the balanced training moves them all
