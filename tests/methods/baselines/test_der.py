"""DER: what its auxiliary classifier is asked, how weights are aligned, and that old extractors keep every bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.engine import IGNORED
from tpl.methods.der import DER, AuxiliaryLoss, aligned, auxiliary_labels
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
    learner, method = der(auxiliary=0.5)
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


@pytest.mark.parametrize("align", [True, False])
def test_old_extractors_keep_every_bit_and_new_rows_are_as_long_as_old_ones(small_stream: Stream, align: bool) -> None:
    learner, method = der(align=align, weight_decay=0.01)
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
    assert torch.isclose(lengths[:2].mean(), lengths[2:].mean()) == align
    answer = F.linear(both, method.network.head_weight, method.network.head_bias).log_softmax(dim=1)
    torch.testing.assert_close(method.log_probabilities(pixels).float(), answer, atol=1e-5, rtol=1e-5)
