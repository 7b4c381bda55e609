"""OWM: the projector is the inverse it stands for, and what layers said of old inputs stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.errors import TplError
from tpl.methods.owm import OWM, OWMConfig, ProjectedCrossEntropy, layers_of, update_projector
from tpl.nets.blocks import AdapterStack, adapt
from tpl.stream import Stream

OPTIONS = {"latent": 8, "epochs": 1, "batch_size": 16, "lr": 0.02}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def identity(*stack: int, size: int) -> torch.Tensor:
    return torch.eye(size, dtype=torch.float64).expand(*stack, -1, -1).clone()


@pytest.fixture(scope="module")
def learned(small_stream: Stream) -> Learner:
    """A learner with one task behind it, and little tolerance for its inputs."""
    learner = Learner("owm", SMALL_VIT, device="cpu", alpha=1e-6, alpha_head=1e-6, **OPTIONS)
    learner.method.learn(small_stream[0])
    return learner


def test_one_by_one_is_the_inverse_of_all() -> None:
    inputs = random(5, 2, 3)  # 5 batches, 2 layers with 3 inputs
    found = update_projector(identity(2, size=4), inputs, alpha=0.01)
    for layer in range(2):
        total = torch.eye(4, dtype=torch.float64)
        for i in range(5):
            r = torch.cat([inputs[i, layer], torch.ones(1, dtype=torch.float64)])
            total += torch.outer(r, r) / 0.01 ** ((i + 1) / 5)  # the last batch has all of alpha
        torch.testing.assert_close(found[layer], torch.linalg.inv(total))
    assert torch.equal(found, found.mT)


def test_old_inputs_keep_their_outputs_and_others_may_change() -> None:
    old, other = random(4, 12), random(3, 12, seed=1)
    projector = update_projector(update_projector(identity(size=13), old[:2], 1e-9), old[2:], 1e-9)
    step = random(6, 13, seed=2) @ projector  # any gradient of weights and bias

    def change(x: torch.Tensor) -> float:
        return float((x @ step[:, :-1].T + step[:, -1]).norm())

    assert change(old) < 1e-3 * change(other)
    assert change(other) > 1


def test_a_head_over_long_features_can_still_learn_the_tenth_task() -> None:
    """Features as far apart as ViT-tiny's, 79 batches of 64 a task; at alpha 0.1 less than half a per cent is left."""
    dim, spread, shared = 96, 3.0, 2.0 * random(96, seed=9)
    projector = identity(size=dim + 1)
    for task in range(9):
        means = shared + spread / 64**0.5 * random(79, dim, seed=task)
        projector = update_projector(projector, means, OWMConfig().alpha_head)
    new, old = random(50, dim, seed=10), torch.cat([shared, torch.ones(1, dtype=torch.float64)])
    left = float((new @ projector[:-1]).norm() / new.norm())
    assert 0.01 < left < 0.2
    assert float((old @ projector).norm() / old.norm()) < left / 10  # and what all images share is blocked for good


def test_inputs_are_those_of_the_encoders_own_pass(learned: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    method = learned.method
    assert isinstance(method, OWM)
    pixels = (random(8, 3, 32, 32) * 60 + 120).clamp(0, 255).to(torch.uint8)
    found = method.mean_inputs(pixels)  # fewer than a batch: one mean
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def spy(x: torch.Tensor, weights: AdapterStack, *rest: Any) -> torch.Tensor:
        hidden = torch.relu(x @ weights.down_weight.T + weights.down_bias)
        seen.append((x.mean(dim=(0, 1)), hidden.mean(dim=(0, 1))))
        return adapt(x, weights, *rest)

    monkeypatch.setattr("tpl.nets.blocks.adapt", spy)
    with torch.no_grad():
        features = method.network.features(method.normalise(pixels))
    assert len(seen) == 2 * len(method.encoder.vit.blocks) == 4
    for name, place in (("down", 0), ("up", 1)):
        expected = torch.stack([pair[place] for pair in seen]).double()
        torch.testing.assert_close(found[name][0], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["head"][0], features.mean(dim=0).double(), rtol=1e-4, atol=1e-5)


def test_a_step_leaves_old_mean_inputs_alone(learned: Learner, small_stream: Stream) -> None:
    method = learned.method
    assert isinstance(method, OWM)
    old = method.mean_inputs(learned.prepare(small_stream[0].train))
    images = method.normalise(learned.prepare(small_stream[1].train)[::4])
    labels, nothing = torch.tensor([[0, 1] * 4]), torch.zeros(())
    objective = ProjectedCrossEntropy(method.network, method.projectors, clip=1e9)
    method.network.zero_grad()
    objective.losses(images, labels, nothing, nothing).sum().backward()  # type: ignore[no-untyped-call]
    layers = layers_of(method.network)
    plain = {name: joined(layer.weight.grad, layer.bias.grad) for name, layer in layers.items()}
    objective.after_backward(nothing)
    for name, layer in layers.items():
        projected = joined(layer.weight.grad, layer.bias.grad)
        torch.testing.assert_close(projected, plain[name] @ method.projectors[name], rtol=1e-3, atol=1e-5)
        inputs = torch.cat([old[name], torch.ones_like(old[name][..., :1])], dim=-1).mean(dim=0).unsqueeze(-1)
        assert (projected @ inputs).norm() < 0.02 * (plain[name] @ inputs).norm(), name
        assert projected.norm() > 0.01 * plain[name].norm(), name  # and yet there is room to learn


def joined(weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    assert weight is not None and bias is not None
    return torch.cat([weight, bias.unsqueeze(-1)], dim=-1).double()


def test_gradients_are_clipped_together_after_the_projection(learned: Learner) -> None:
    method = learned.method
    assert isinstance(method, OWM)
    objective = ProjectedCrossEntropy(method.network, method.projectors, clip=1e-3)
    for p in method.network.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    objective.after_backward(torch.zeros(()))
    total = sum(float(p.grad.square().sum()) for p in method.network.parameters() if p.grad is not None) ** 0.5
    assert total == pytest.approx(1e-3, rel=1e-2)


def test_projectors_close_and_norms_stay(learned: Learner, small_stream: Stream) -> None:
    method = learned.method
    assert isinstance(method, OWM)
    assert torch.equal(method.network.norms, method.encoder.new_norms())
    before = {name: p.clone() for name, p in method.projectors.items()}
    method.learn(small_stream[1])
    for name, p in method.projectors.items():
        assert torch.equal(p, p.mT)
        # What is blocked stays blocked: P falls, as a matrix.
        assert float(torch.linalg.eigvalsh(before[name] - p).min()) > -1e-9
        assert float(p.diagonal(dim1=-2, dim2=-1).sum()) < float(before[name].diagonal(dim1=-2, dim2=-1).sum())


def test_weight_decay_is_refused() -> None:
    with pytest.raises(TplError, match="past the projector"):
        Learner("owm", SMALL_VIT, device="cpu", weight_decay=1e-4)
