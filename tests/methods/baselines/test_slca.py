"""SLCA: a trunk that learns slowly, and a head aligned on the classes' Gaussians alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.methods.slca import SLCA, Gaussians, Head, SLCAConfig, aligned, normalised
from tpl.stream import Stream

OPTIONS: dict[str, Any] = {"epochs": 1, "batch_size": 16, "lr": 0.01, "latent": 4}


def new(**options: Any) -> tuple[Learner, SLCA]:
    learner = Learner("slca", SMALL_VIT, device="cpu", **OPTIONS | options)
    assert isinstance(learner.method, SLCA)
    return learner, learner.method


@pytest.mark.parametrize("train", ["trunk", "adapters"])
def test_all_but_the_head_learn_slowly(train: str, small_stream: Stream) -> None:
    """Half the rate of the trunk: half the way after one step, while the head goes as far as before."""
    ways = []
    for rate in (1e-3, 5e-4):
        learner, method = new(train=train, trunk_rate=rate, batch_size=32, weight_decay=0.0)
        before = [p.detach().clone() for p in (*method.network.adapters.parameters(), method.network.norms)]
        learner.learn(small_stream[0], held_out=0)
        after = [*method.network.adapters.parameters(), method.network.norms]
        ways.append([*(b.detach() - a for a, b in zip(before, after, strict=True)), method.trained_head.weight])
    assert len(small_stream[0].train) == 32  # one step
    *slow, head = zip(*ways, strict=True)
    for far, near in slow:
        assert float(far.norm()) > 0
        torch.testing.assert_close(near, far / 2, rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(*head)


def test_the_trunks_own_weights_are_trained_and_stored(small_stream: Stream) -> None:
    learner, method = new()
    pixels = learner.prepare(small_stream[0].train)
    torch.testing.assert_close(method.features(pixels), method.encoder_features(pixels), rtol=1e-4, atol=1e-4)
    start = method.network.adapters.flat.detach().clone()  # type: ignore[attr-defined]
    learner.learn(small_stream[0], held_out=0)
    moved = method.network.adapters.flat.detach() != start  # type: ignore[attr-defined]
    assert float(moved.double().mean()) > 0.9
    trunk = sum(p.numel() for p in learner.method.encoder.origin[0].parameters())  # type: ignore[operator, union-attr]
    dim = method.encoder.dim
    assert method.parameters() == trunk + 2 * (2 * dim + 2) + 2 * dim + 2 * dim * (dim + 1) // 2  # no second trunk


def test_the_alignment_uses_the_gaussians_only(small_stream: Stream) -> None:
    """Training does not depend on them; the aligned head does, and on nothing else but the trained one."""
    heads = []
    for shift in (0.0, 3.0):
        learner, method = new()
        learner.learn(small_stream[0], held_out=0)
        assert torch.equal(method.aligned_weight, method.trained_head.weight)  # nothing to align with
        method.means = method.means + shift
        learner.learn(small_stream[1], held_out=0)
        heads.append((method.trained_head.weight, method.aligned_weight))
        again = aligned(
            method.trained_head,
            Gaussians(method.means, method.roots),
            [2, 2],
            method.config,
            method.generator("alignment", task=1),
        )
        assert torch.equal(again.weight, method.aligned_weight)
    assert torch.equal(heads[0][0], heads[1][0])
    assert not torch.allclose(heads[0][1], heads[1][1], atol=1e-3)


def test_an_aligned_head_tells_old_classes_from_new_ones() -> None:
    g = torch.Generator().manual_seed(0)
    means, dim = 3 * torch.eye(4, 6, dtype=torch.float64), 6
    z = means.repeat_interleave(200, 0) + 0.5 * torch.randn(800, dim, generator=g)
    y = torch.arange(4).repeat_interleave(200)
    gaussians = Gaussians.of(z, y, 4)
    head = Head(torch.zeros(4, dim), torch.tensor([0.0, 0.0, 9.0, 9.0]))  # everything is new
    assert float((F.linear(z.float(), *head).argmax(dim=1) == y).double().mean()) <= 0.25
    for logit_norm in (0.0, 0.1):
        config = SLCAConfig(lr=0.5, align_epochs=20, logit_norm=logit_norm, oldest_mean=1.0)
        found = aligned(head, gaussians, [2, 2], config, torch.Generator().manual_seed(1))
        assert float((F.linear(z.float(), *found).argmax(dim=1) == y).double().mean()) > 0.95
    assert torch.equal(head.bias, torch.tensor([0.0, 0.0, 9.0, 9.0]))  # a copy was aligned


def test_draws_have_the_samples_mean_and_covariance() -> None:
    g = torch.Generator().manual_seed(0)
    z = torch.randn(500, 3, generator=g) @ torch.tensor([[2.0, 0, 0], [1, 1, 0], [0, 0, 0.1]]) + 5
    drawn, labels = Gaussians.of(z, torch.zeros(500, dtype=torch.long), 1).draw(40_000, torch.ones(1), g)
    assert drawn.dtype == torch.float32 and not bool(labels.any())
    torch.testing.assert_close(drawn.mean(dim=0), z.mean(dim=0), rtol=0, atol=0.1)
    torch.testing.assert_close(drawn.T.cov(), z.T.cov(), rtol=0, atol=0.2)


def test_one_image_of_a_class_is_a_gaussian_too() -> None:
    drawn, _ = Gaussians.of(torch.ones(1, 3), torch.tensor([0]), 1).draw(100, torch.ones(1), torch.Generator())
    assert 0.5 < float(drawn.std()) / 1e-2 < 2


def test_normalised_logits_by_hand() -> None:
    logits = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 2.0]])
    expected = torch.stack([logits[0] / (0.5 * 2.5), logits[1] / (0.5 * 1.0)])
    torch.testing.assert_close(normalised(logits, [2, 1], 0.5), expected)
    assert normalised(logits, [2, 1], 0.0) is logits


def test_a_class_can_go(small_stream: Stream) -> None:
    learner, method = new()
    for task in small_stream[:2]:
        learner.learn(task, held_out=0)
    before = method.log_probabilities(learner.prepare(small_stream[0].train))[:, [0, 2, 3]].log_softmax(dim=1)
    learner.remove(small_stream[0].classes[1])
    after = method.log_probabilities(learner.prepare(small_stream[0].train))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    learner.learn(small_stream[2], held_out=0)
    assert len(method.means) == len(method.roots) == len(learner.classes_) == 5
