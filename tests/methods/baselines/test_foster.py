"""FOSTER: effective numbers, its losses by hand, and a compression that keeps what both extractors say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.engine import IGNORED, Samples, no_callback
from tpl.methods.foster import (
    FOSTER,
    Boosting,
    FOSTERConfig,
    balanced_distillation,
    effective_weights,
    expanded,
)
from tpl.stream import Stream

OPTIONS = {"latent": 8, "epochs": 2, "batch_size": 16, "lr": 0.05, "memory": 12}


def foster(**options: object) -> tuple[Learner, FOSTER]:
    learner = Learner("foster", SMALL_VIT, device="cpu", **(OPTIONS | options))
    assert isinstance(learner.method, FOSTER)
    return learner, learner.method


def test_effective_weights_by_hand() -> None:
    # b = 1/2: n = 1 counts 1, n = 2 counts 1.5, n = 3 counts 1.75; their inverses, scaled to mean 1.
    inverse = torch.tensor([1, 1 / 1.5, 1 / 1.75])
    torch.testing.assert_close(effective_weights(torch.tensor([1, 2, 3]), 0.5), inverse / inverse.mean())
    torch.testing.assert_close(effective_weights(torch.tensor([1, 9]), 0.0), torch.ones(2))

    torch.testing.assert_close(effective_weights(torch.tensor([0, 1]), 0.5), torch.ones(2))  # none counts as one


def test_few_stored_images_make_an_old_class_weigh_more() -> None:
    """20 stored images against 500 new ones, in a task of 10 classes after 90: 1.79 times, as published."""
    nothing, config = torch.zeros(0), FOSTERConfig()
    new = Samples(nothing, torch.arange(90, 100).repeat_interleave(500))
    old = Samples(nothing, torch.arange(90).repeat_interleave(20))
    weights = effective_weights(config.times_shown(new, old, 100), config.boosting_beta)
    assert float(weights[0] / weights[99]) == pytest.approx(1.79, abs=0.01)
    balanced = config.replace(replay_batches="balanced")
    weights = effective_weights(balanced.times_shown(new, old, 100), config.boosting_beta)
    # An epoch then shows each stored image 2.8 times.
    assert float(weights[0] / weights[99]) == pytest.approx(1.11, abs=0.01)


def test_balanced_distillation_by_hand() -> None:
    teacher, student = torch.tensor([[2.0, 0.0, -2.0]]), torch.tensor([[1.0, 0.5, 0.0]])
    weights, temperature = torch.tensor([0.5, 1.0, 1.5]), 2.0
    p = (teacher / temperature).exp()[0] * weights
    p = p / p.sum()
    q = (student / temperature).exp()[0]
    by_hand = -4 * (p * (q / q.sum()).log()).sum()
    torch.testing.assert_close(balanced_distillation(student, teacher, weights, temperature)[0], by_hand)


def test_a_temperature_does_not_slow_the_compression_down() -> None:
    """Logits that are near each other: the pull towards the teacher is that of plain cross-entropy, whatever T is."""
    teacher, student = torch.tensor([[0.1, 0.0, -0.1]]), torch.zeros(1, 3)
    pulls = []
    for temperature in (1.0, 2.0, 4.0):
        moving = student.clone().requires_grad_()
        balanced_distillation(moving, teacher, torch.ones(3), temperature).sum().backward()  # type: ignore[no-untyped-call]
        assert moving.grad is not None
        pulls.append(float(moving.grad.norm()))
    assert pulls == pytest.approx([pulls[0]] * 3, rel=0.05)


@pytest.fixture(scope="module")
def boosted(small_stream: Stream) -> tuple[FOSTER, Boosting, Tensor]:
    """A boosting objective before its training, on a network that knows one task."""
    learner, method = foster(epochs=1)
    learner.learn(small_stream[0])
    network = expanded(method.network, method.config, torch.Generator().manual_seed(0))
    network.grow(2, torch.Generator().manual_seed(1))
    with torch.no_grad():
        network.adapters.up_weight += 0.02 * torch.randn(
            network.adapters.up_weight.shape, generator=torch.Generator().manual_seed(3)
        )
    weights = torch.tensor([1.5, 1.5, 0.5, 0.5])
    objective = Boosting(network, method.network.copy(), weights, method.config, torch.Generator().manual_seed(2))
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(4))
    return method, objective, images


def test_the_boosting_loss_by_hand(boosted: tuple[FOSTER, Boosting, Tensor]) -> None:
    method, objective, images = boosted
    network, nothing = objective.network, torch.zeros(())
    rows, classes = [0, 1, 2], [1, 2, 3]
    loss = objective.losses(images, torch.tensor([[*classes, IGNORED]]), nothing, nothing)
    with torch.no_grad():
        old, logits = method.network(images)[rows], network(images)[rows]
        alone = network.newest_features(images)[rows] @ objective.head.weight.T
        balanced = -(logits / objective.weights).log_softmax(1)[rows, classes].mean()
        own = -alone.log_softmax(1)[rows, classes].mean()
        keep = -((old / 2).softmax(1) * (logits[:, :2] / 2).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(loss[0], balanced + own + keep)


def test_boosting_moves_the_new_extractor_and_nothing_old(boosted: tuple[FOSTER, Boosting, Tensor]) -> None:
    method, objective, images = boosted
    still = [*method.network.parameters(), *objective.old.parameters()]
    for parameter in still:
        parameter.grad = None
    loss = objective.losses(images, torch.tensor([[0, 1, 2, 3]]), torch.zeros(()), torch.zeros(()))
    loss.sum().backward()
    assert objective.network.adapters.up_weight.grad is not None
    assert all(p.grad is None for p in still)


def test_the_compressed_network_answers_as_the_two_that_taught_it(
    small_stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FOSTERConfig, "compression_beta", 0.0)
    learner, method = foster(epochs=4, compression=2.0)
    learner.learn(small_stream[0])
    task = small_stream[1]
    pixels = torch.cat([method.preprocess.batch(small_stream[t].test)[::2] for t in (0, 1)])
    samples = method.samples(task, no_callback)
    before = {k: v.clone() for k, v in method.network.state_dict().items()}
    teacher = method.boosted(task, samples, method.old_samples(), no_callback)
    assert all(torch.equal(before[k], v) for k, v in method.network.state_dict().items())  # boosting is beside it
    new = method.grow(task, samples)
    with torch.no_grad():
        told = teacher(method.normalise(pixels)).softmax(dim=1)

        def distance() -> float:
            said = method.network(method.normalise(pixels)).softmax(dim=1)
            return float((said - told).abs().sum(dim=1).mean())

        untaught = distance()
    method.compress(teacher, new, method.old_samples(), no_callback)
    with torch.no_grad():
        said = method.network(method.normalise(pixels)).argmax(dim=1)
        assert (said == told.argmax(dim=1)).float().mean() > 0.8
        assert distance() < 0.5 * untaught
