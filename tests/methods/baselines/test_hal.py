"""HAL: the look-ahead term by hand, and anchors that are known now and forgotten after fine-tuning."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.engine import no_callback
from tpl.methods.hal import HAL, Anchoring, HALConfig, make_anchors
from tpl.stream import Stream

NONE = torch.zeros(())


class Linear(nn.Module):
    """Logits W x of flattened images; the features are the image itself."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def features(self, images: Tensor) -> Tensor:
        return images.flatten(1)

    def logits(self, z: Tensor) -> Tensor:
        return z @ self.weight.T

    def forward(self, images: Tensor) -> Tensor:
        return self.logits(self.features(images))


def unchanged(images: Tensor) -> Tensor:
    return images.float()


def a_case(seed: int = 0) -> tuple[Linear, Tensor, Tensor, Tensor]:
    """A network, a batch with labels, and two anchors."""
    generator = torch.Generator().manual_seed(seed)
    network = Linear(torch.randn(3, 4, generator=generator))
    images = torch.randn(5, 4, 1, 1, generator=generator)
    labels = torch.randint(3, (1, 5), generator=generator)
    return network, images, labels, torch.randn(2, 4, 1, 1, generator=generator)


def gradient(network: Linear, objective: Anchoring, images: Tensor, labels: Tensor) -> Tensor:
    network.zero_grad()
    objective.losses(images, labels, NONE, NONE).sum().backward()
    objective.after_backward(NONE)
    assert network.weight.grad is not None
    return network.weight.grad


def test_the_look_ahead_term_by_hand() -> None:
    """f(a) = W a moves by -rate G a; d/dW of lambda mean (W' a - W a)^2 at W' = W - rate G is below."""
    network, images, labels, anchors = a_case()
    config = HALConfig(lr=0.2, anchor_weight=0.7)
    objective = Anchoring(cast(Any, network), anchors, unchanged, config)
    kept = network.weight.detach().clone()
    found = gradient(network, objective, images, labels)

    x, a = images.flatten(1), anchors.flatten(1)
    surplus = (x @ kept.T).softmax(dim=1) - F.one_hot(labels[0], 3)
    plain = surplus.T @ x / len(x)
    movement = -0.2 * a @ plain.T  # [anchors, classes]
    back = 0.7 * 2 * movement.T @ a / movement.numel()
    torch.testing.assert_close(found, plain + back)
    assert torch.equal(network.weight, kept)  # looking ahead leaves the weights alone


@pytest.mark.parametrize("seed", range(5))
def test_the_term_makes_a_step_move_the_anchors_less(seed: int) -> None:
    network, images, labels, anchors = a_case(seed)
    moved = []
    for weight in (0.0, 0.5):
        objective = Anchoring(cast(Any, network), anchors, unchanged, HALConfig(lr=0.2, anchor_weight=weight))
        step = -0.2 * gradient(network, objective, images, labels)
        moved.append(float((anchors.flatten(1) @ step.T).norm()))
    assert moved[1] < moved[0]


@pytest.mark.parametrize("batch_size", [2, 7])
def test_every_anchor_has_its_turn(batch_size: int) -> None:
    network, _, _, _ = a_case()
    objective = Anchoring(cast(Any, network), torch.zeros(5, 4, 1, 1), unchanged, HALConfig(batch_size=batch_size))
    turns = []
    for _ in range(5):
        turns += objective.rows.tolist()
        objective.after_step()
    assert sorted(turns) == sorted(batch_size * [0, 1, 2, 3, 4])


@pytest.mark.parametrize("gamma", [0.0, 0.1])
def test_anchors_are_what_will_be_forgotten(gamma: float) -> None:
    """Every step lowers known - forgotten + gamma distance, for each class on its own."""
    generator = torch.Generator().manual_seed(0)
    now, later = (Linear(0.05 * torch.randn(3, 12, generator=generator)) for _ in range(2))
    start, classes = 255 * torch.rand(3, 3, 2, 2, generator=generator), torch.arange(3)
    mean = 255 * torch.rand(12, generator=generator)

    def judge(pixels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            forgotten, known = (F.cross_entropy(n(pixels.float()), classes, reduction="none") for n in (later, now))
        return forgotten - known, (pixels.float().flatten(1) - mean).square().sum(dim=1)

    config = HALConfig(anchor_steps=20, anchor_mean=gamma)
    made = make_anchors(start, classes, cast(Any, now), cast(Any, later), mean, unchanged, config)
    (before, away), (after, near) = judge(start), judge(made)
    assert made.dtype == torch.uint8
    if gamma:
        assert bool((near < away).all())
    else:
        assert bool((after > before + 1).all())
    one = make_anchors(start[1:2], classes[1:2], cast(Any, now), cast(Any, later), mean, unchanged, config)
    assert int((one[0].int() - made[1].int()).abs().max()) <= 1  # no anchor depends on the others


def test_anchors_lie_where_the_tasks_images_do(small_stream: Stream) -> None:
    """Noise is far from the mean feature, compared with images; anchors, which start as noise, end among the images."""
    options: dict[str, Any] = {"latent": 8, "epochs": 1, "batch_size": 12, "lr": 0.05, "memory": 48}
    learner = Learner("hal", SMALL_VIT, device="cpu", **options)
    method = learner.method
    assert isinstance(method, HAL)
    learner.learn(small_stream[0])
    images = method.features(learner.prepare(small_stream[0].train))
    mean = images.mean(dim=0)

    def away(features: Tensor) -> float:
        return float((features - mean).square().sum(dim=1).mean())

    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8, generator=generator)
    assert away(method.features(method.anchors)) < 0.25 * away(method.features(noise))


def test_anchors_of_a_learned_stream(small_stream: Stream) -> None:
    options: dict[str, Any] = {"latent": 8, "epochs": 1, "batch_size": 12, "lr": 0.05, "memory": 48}
    learner = Learner("hal", SMALL_VIT, device="cpu", anchor_steps=10, anchor_mean=0.0, **options)
    method = learner.method
    assert isinstance(method, HAL)
    learner.learn(small_stream[0])
    first, old = method.anchors.clone(), method.old_samples()
    assert first.shape == (2, 3, 32, 32)
    assert method.memory_bytes == method.memory.bytes_used + 2 * 3 * 32 * 32  # anchors take space, too
    learner.learn(small_stream[1])
    assert torch.equal(method.anchors[:2], first)  # made once, for good

    # Fine-tuning on the first task's images, done here by hand, makes the second task's anchors worse.
    assert old is not None
    frozen = {k: v.clone() for k, v in method.network.state_dict().items()}
    labels, pixels = torch.tensor([2, 3]), method.anchors[2:]
    known = -method.log_probabilities(pixels).gather(1, labels.unsqueeze(1)).mean()
    method.fit(old, no_callback, recipe=method.config.replace(epochs=1), name="by hand")
    forgotten = -method.log_probabilities(pixels).gather(1, labels.unsqueeze(1)).mean()
    assert float(forgotten) > float(known)

    method.network.load_state_dict(frozen)
    later = method.fine_tuned(old)
    assert all(torch.equal(v, frozen[k]) for k, v in method.network.state_dict().items())  # the network itself stays
    assert not torch.equal(later.head_weight, frozen["head_weight"])
    learner.remove(small_stream[0].classes[1])
    assert torch.equal(method.anchors[0], first[0])
    assert len(method.anchors) == 3
