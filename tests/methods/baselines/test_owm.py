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


def test_a_batch_of_positions_is_the_rule_applied_to_one_after_the_other() -> None:
    """k = P r, P <- P - k k^T / (alpha + r^T k), and what it stands for, the inverse of all outer products."""
    inputs = random(5, 2, 7, 3)  # 5 batches, 2 layers, 7 positions, 3 inputs
    found = identity(2, size=4)
    for batch in inputs:
        found = update_projector(found, batch, alpha=0.01)
    for layer in range(2):
        by_rule, total = identity(size=4), identity(size=4)
        for r in torch.nn.functional.pad(inputs[:, layer].flatten(0, 1), (0, 1), value=1.0):
            k = by_rule @ r
            by_rule -= torch.outer(k, k) / (0.01 + r @ k)
            total += torch.outer(r, r) / 0.01
        torch.testing.assert_close(found[layer], by_rule)
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
        for number, r in enumerate(shared + spread / 64**0.5 * random(79, dim, seed=task), start=1):
            projector = update_projector(projector, r.unsqueeze(0), OWMConfig().alpha_head ** (number / 79))
    new, old = random(50, dim, seed=10), torch.cat([shared, torch.ones(1, dtype=torch.float64)])
    left = float((new @ projector[:-1]).norm() / new.norm())
    assert 0.01 < left < 0.2
    assert float((old @ projector).norm() / old.norm()) < left / 10  # and what all images share is blocked for good


def test_inputs_are_those_of_the_encoders_own_pass(learned: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    method = learned.method
    assert isinstance(method, OWM)
    pixels = (random(8, 3, 32, 32) * 60 + 120).clamp(0, 255).to(torch.uint8)
    found = method.inputs(pixels)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def spy(x: torch.Tensor, weights: AdapterStack, *rest: Any) -> torch.Tensor:
        hidden = torch.relu(x @ weights.down_weight.T + weights.down_bias)
        seen.append((x.mean(dim=0), hidden.mean(dim=0)))  # over the images, token by token
        return adapt(x, weights, *rest)

    monkeypatch.setattr("tpl.nets.blocks.adapt", spy)
    with torch.no_grad():
        features = method.network.features(method.normalise(pixels))
    assert len(seen) == 2 * len(method.encoder.vit.blocks) == 4
    for name, place in (("down", 0), ("up", 1)):
        expected = torch.stack([pair[place] for pair in seen])
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["head"], features.mean(dim=0, keepdim=True), rtol=1e-4, atol=1e-5)


def test_alpha_falls_from_one_to_its_final_value_over_a_tasks_batches(
    learned: Learner, small_stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = learned.method
    assert isinstance(method, OWM)
    alphas: dict[str, list[float]] = {"head": [], "adapters": []}

    def spy(projector: torch.Tensor, inputs: torch.Tensor, alpha: float) -> torch.Tensor:
        alphas["head" if projector.dim() == 2 else "adapters"].append(alpha)
        return projector

    monkeypatch.setattr("tpl.methods.owm.update_projector", spy)
    monkeypatch.setattr(method, "config", method.config.replace(alpha_head=16.0, alpha=1e-4, batch_size=8))
    method.block(learned.prepare(small_stream[1].train)[:32])  # four batches
    assert alphas["head"] == pytest.approx([2, 4, 8, 16])
    assert alphas["adapters"][::2] == alphas["adapters"][1::2] == pytest.approx([0.1, 0.01, 1e-3, 1e-4])


def test_a_step_leaves_alone_what_layers_say_of_old_inputs_at_every_token(
    learned: Learner, small_stream: Stream
) -> None:
    method = learned.method
    assert isinstance(method, OWM)
    old = method.inputs(learned.prepare(small_stream[0].train))
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
        inputs = torch.nn.functional.pad(old[name].double(), (0, 1), value=1.0).mT
        assert (projected @ inputs).norm() < 0.02 * (plain[name] @ inputs).norm(), name
        assert projected.norm() > 1e-3 * plain[name].norm(), name  # and yet there is room to learn


def joined(weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    assert weight is not None and bias is not None
    return torch.cat([weight, bias.unsqueeze(-1)], dim=-1).double()


def test_new_classes_start_without_a_preference(small_stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    method = Learner("owm", SMALL_VIT, device="cpu", **OPTIONS).method
    assert isinstance(method, OWM)
    heads: list[torch.Tensor] = []
    monkeypatch.setattr(method, "fit", lambda *_: heads.append(method.network.head_weight.detach().clone()))
    method.learn(small_stream[0])
    with torch.no_grad():
        method.network.head_weight += 1
    method.learn(small_stream[1])
    assert not heads[0].any()
    assert bool((heads[1][:2] == 1).all()) and not heads[1][2:].any()


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
