"""DER: what its auxiliary classifier is asked, how the main one is balanced, that old extractors keep their bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.engine import IGNORED, Samples
from tpl.methods.der import DER, AuxiliaryLoss, DERConfig, aligned, auxiliary_labels
from tpl.stream import Stream

OPTIONS = {"latent": 8, "epochs": 1, "batch_size": 16, "lr": 0.05, "memory": 12}


def der(**options: object) -> tuple[Learner, DER]:
    learner = Learner("der", SMALL_VIT, device="cpu", **(OPTIONS | options))
    assert isinstance(learner.method, DER)
    return learner, learner.method


def test_all_old_classes_are_one_and_new_ones_are_numbered_after_it() -> None:
    labels = torch.tensor([0, 3, 4, 6, IGNORED])
    assert auxiliary_labels(labels, known=4).tolist() == [0, 0, 1, 3, IGNORED]


def test_alignment_by_hand() -> None:
    weight = torch.tensor([[3.0, 4.0], [0.0, 1.0], [6.0, 8.0], [0.0, 20.0]])  # lengths 5, 1 | 10, 20
    by_hand = [[3.0, 4.0], [0.0, 1.0], [1.2, 1.6], [0.0, 4.0]]  # times 3 / 15
    torch.testing.assert_close(aligned(weight, known=2), torch.tensor(by_hand))


def test_the_loss_is_both_entropies_and_rows_that_fill_up_do_not_count(small_stream: Stream) -> None:
    learner, method = der(auxiliary_weight=0.5)
    learner.learn(small_stream[0])
    network = method.network
    network.expand(torch.Generator().manual_seed(0))
    network.grow(2, torch.Generator().manual_seed(1))
    objective = AuxiliaryLoss(network, 2, 0.5, torch.Generator().manual_seed(2))
    images, nothing = torch.randn(4, 3, 32, 32), torch.zeros(())
    labels = torch.tensor([[0, 3, 2, IGNORED]])
    z = network.features(images)[:3]
    logits, newest = network.logits(z), z[:, network.dim :] @ objective.head.weight.T
    by_hand = -logits.log_softmax(1)[[0, 1, 2], [0, 3, 2]].mean()
    by_hand = by_hand + 0.5 * -newest.log_softmax(1)[[0, 1, 2], [0, 2, 1]].mean()
    torch.testing.assert_close(objective.losses(images, labels, nothing, nothing)[0], by_hand)


@pytest.mark.parametrize("classifier", ["retrained", "aligned", "trained"])
def test_old_extractors_keep_every_bit_and_the_classifier_reads_all(small_stream: Stream, classifier: str) -> None:
    learner, method = der(classifier=classifier, weight_decay=0.01)
    learner.learn(small_stream[0])
    first = method.network.extractors[0].copy().state()
    pixels = method.preprocess.batch(small_stream[0].test)
    dim, seen = method.encoder.dim, method.features(pixels)
    learner.learn(small_stream[1])
    assert len(method.network.extractors) == 2
    assert all(torch.equal(first[k], v) for k, v in method.network.extractors[0].state().items())
    both = method.features(pixels)
    assert torch.equal(both[:, :dim], seen)
    assert not torch.allclose(both[:, dim:], seen)
    lengths = method.network.head_weight.norm(dim=1)
    assert torch.isclose(lengths[:2].mean(), lengths[2:].mean()) == (classifier == "aligned")
    answer = F.linear(both, method.network.head_weight, method.network.head_bias).log_softmax(dim=1)
    torch.testing.assert_close(method.log_probabilities(pixels).float(), answer, atol=1e-5, rtol=1e-5)


def test_the_classifier_is_retrained_on_what_the_memory_and_the_task_have_alike(
    small_stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, method = der()
    learner.learn(small_stream[0])
    seen: list[Samples] = []
    retrained = method.retrained
    monkeypatch.setattr(method, "retrained", lambda samples: seen.append(samples) or retrained(samples))
    learner.learn(small_stream[1])
    (samples,) = seen
    quota = 6  # 12 remembered images of two classes, and as many of each new one
    assert samples.labels.bincount().tolist() == 4 * [quota]


def test_one_step_of_retraining_by_hand(small_stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """W' = W - rate * (softmax(W u) - onehot) u^T / n, u = z / mean length; answers then read z itself."""
    monkeypatch.setattr(DERConfig, "retrained_lr", 0.5)
    learner, method = der(retrained_epochs=1, batch_size=64, momentum=0.0)
    learner.learn(small_stream[0])
    samples = method.old_samples()
    assert samples is not None
    z = method.features(samples.pixels)
    before = torch.empty(2, z.shape[1])
    before.uniform_(-(z.shape[1] ** -0.5), z.shape[1] ** -0.5, generator=method.generator("classifier"))
    length = z.norm(dim=1).mean()
    wrong = (z / length @ before.T).softmax(dim=1) - F.one_hot(samples.labels, 2)
    after = before - 0.5 * wrong.T @ (z / length) / len(z)
    weight, bias = method.retrained(samples)
    torch.testing.assert_close(weight * length, after, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(bias, -0.5 * wrong.mean(dim=0), atol=1e-6, rtol=1e-4)


def test_retraining_forgets_what_the_classifier_was(small_stream: Stream) -> None:
    learner, method = der()
    learner.learn(small_stream[0])
    samples = method.old_samples()
    assert samples is not None
    once = method.retrained(samples)
    with torch.no_grad():
        method.network.head_weight.mul_(-3)
    assert all(torch.equal(a, b) for a, b in zip(once, method.retrained(samples), strict=True))
