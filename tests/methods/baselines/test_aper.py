"""APER: what the first task trains, that nothing moves later, and prototypes worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.methods.aper import APER
from tpl.methods.parts.cosine import CosineCrossEntropy
from tpl.stream import Stream

OPTIONS = {"latent": 8, "epochs": 1, "batch_size": 16, "lr": 0.05}


@pytest.fixture(scope="module")
def stages(small_stream: Stream) -> list[dict[str, torch.Tensor]]:
    """All that was learned, after every task."""
    found = []
    learner = Learner("aper", SMALL_VIT, device="cpu", **OPTIONS)
    for task in small_stream:
        learner.method.learn(task)
        found.append({k: v.clone() for k, v in learner.method.state().shared.items()})
    return found


def by_hand(method: APER, pixels: torch.Tensor) -> torch.Tensor:
    """Both embeddings by two plain passes."""
    images = method.preprocess.normaliser(torch.device("cpu"))(pixels)
    with torch.no_grad():
        return torch.cat([method.encoder.plain(images), method.network.features(images)], dim=1).double()


def test_the_first_task_adapts_and_nothing_moves_afterwards(stages: list[dict[str, torch.Tensor]]) -> None:
    fresh = Learner("aper", SMALL_VIT, device="cpu", **OPTIONS).method
    assert isinstance(fresh, APER)
    names = ["norms", *(f"adapters.{name}" for name, _ in fresh.network.adapters.named_parameters())]
    before = fresh.state().shared
    for name in [*names, "scale"]:
        assert not torch.equal(before[name], stages[0][name]), name
        assert torch.equal(stages[0][name], stages[2][name]), name
    assert torch.equal(stages[0]["sums"], stages[2]["sums"][:2])  # nor do old prototypes
    assert stages[2]["head_weight"].shape == (0, fresh.encoder.dim)


def test_prototypes_and_answers_by_hand(small_stream: Stream) -> None:
    learner = Learner("aper", SMALL_VIT, device="cpu", **OPTIONS)
    method = learner.method
    assert isinstance(method, APER)
    means = []
    for task in small_stream[:2]:
        method.learn(task)
        z = by_hand(method, learner.prepare(task.train))
        means += [z[np.asarray(task.train.labels) == c].mean(dim=0) for c in (0, 1)]
    torch.testing.assert_close(method.prototypes, torch.stack(means), rtol=1e-4, atol=1e-4)
    test = small_stream[1].test
    assert test is not None
    pixels = learner.prepare(test)
    angle = F.cosine_similarity(by_hand(method, pixels).unsqueeze(1), torch.stack(means).unsqueeze(0), dim=2)
    expected = torch.log_softmax(method.scale * angle, dim=1)
    torch.testing.assert_close(method.log_probabilities(pixels), expected, rtol=1e-4, atol=1e-4)


def test_the_heads_length_does_not_count_and_filling_rows_neither() -> None:
    method = Learner("aper", SMALL_VIT, device="cpu", **OPTIONS).method
    assert isinstance(method, APER)
    method.network.grow(3, torch.Generator().manual_seed(0))
    objective = CosineCrossEntropy(method.network, torch.tensor(4.0))
    images, labels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1)), torch.tensor([[2, 0, -100]])
    nothing = torch.zeros(())
    loss = objective.losses(images, labels, nothing, nothing)
    z, w = method.network.features(images), method.network.head_weight
    logits = torch.stack([4 * torch.dot(z[i], w[c]) / z[i].norm() / w[c].norm() for i in (0, 1) for c in range(3)])
    by_rule = -logits.view(2, 3).log_softmax(dim=1)[[0, 1], [2, 0]].mean()
    torch.testing.assert_close(loss[0], by_rule)
    method.network.head_weight.data *= 7
    torch.testing.assert_close(objective.losses(images, labels, nothing, nothing), loss)


def test_more_images_move_a_prototype_and_a_class_can_go(small_stream: Stream) -> None:
    learner = Learner("aper", SMALL_VIT, device="cpu", **OPTIONS)
    method = learner.method
    assert isinstance(method, APER)
    first, second = small_stream[:2]
    learner.learn(first, held_out=0).learn(second, held_out=0)
    images = [second.train.load(i) for i in range(3)]
    z = method.features(learner.prepare(second.train.select(np.arange(3))))
    expected = (16 * method.prototypes[2] + z.sum(dim=0)) / 19
    learner.update(images, [second.classes[0]] * 3, held_out=0)
    torch.testing.assert_close(method.prototypes[2], expected)
    learner.remove(first.classes[1])
    assert len(method.prototypes) == 3
    torch.testing.assert_close(method.prototypes[1], expected)
