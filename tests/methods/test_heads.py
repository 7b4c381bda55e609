"""Heads on features that stand still: the written-out SGD against torch's own, and the rows it is given.

On a GPU, steps are captured in blocks and replayed; a device that only looks like one checks this without it.
"""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elsewhere import Tape, elsewhere
from tpl.methods.bank import TaskModel
from tpl.methods.bank.heads import STEPS, Heads, alike, epoch_of, fit_heads, head_with_others, joined


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_heads(count: int, outputs: int, dim: int = 5, seed: int = 0) -> Heads:
    g = random(seed)
    return Heads(torch.randn(count, outputs, dim, generator=g), torch.randn(count, outputs, generator=g))


def trained_by_torch(
    head: Heads, features: Tensor, labels: Tensor, rows: Tensor, lr: float, momentum: float
) -> tuple[Tensor, Tensor]:
    """One head by torch: `rows` are `[steps, batch]`, -1 left out."""
    weight, bias = nn.Parameter(head.weight[0].clone()), nn.Parameter(head.bias[0].clone())
    optimiser = torch.optim.SGD([weight, bias], lr=lr, momentum=momentum)
    for own in rows:
        own = own[own >= 0]
        optimiser.zero_grad()
        F.cross_entropy(F.linear(features[own], weight, bias), labels[own]).backward()
        optimiser.step()
    return weight.detach(), bias.detach()


def trained_step_by_step(
    heads: Heads, features: Tensor, labels: Tensor, rows: Tensor, lr: float, momentum: float
) -> Heads:
    """`fit_heads` without blocks: every step gathers its own images and updates weights and biases apart."""
    weight, bias = heads.weight.clone(), heads.bias.clone()
    velocities = torch.zeros_like(weight), torch.zeros_like(bias)
    which = torch.arange(len(weight)).unsqueeze(1)
    for own in rows:
        z, y = features[which, own.clamp_min(0)], labels[which, own.clamp_min(0)]
        error = (z @ weight.mT + bias.unsqueeze(1)).softmax(dim=2)
        error -= F.one_hot(y, bias.shape[1])
        counted = (own >= 0).float()
        error *= (counted / counted.sum(dim=1, keepdim=True).clamp_min(1)).unsqueeze(2)
        gradients = error.mT @ z, error.sum(dim=1)
        for parameter, velocity, gradient in zip((weight, bias), velocities, gradients, strict=True):
            velocity.mul_(momentum).add_(gradient)
            parameter.sub_(velocity, alpha=lr)
    return Heads(weight, bias)


class Fit(NamedTuple):
    """Three heads, and more than two blocks of steps with a rest, the last of every epoch short."""

    heads: Heads
    features: Tensor
    labels: Tensor
    rows: Tensor


@pytest.fixture
def long_fit() -> Fit:
    g = random(2)
    features, labels = torch.randn(3, 43, 24, generator=g), torch.randint(6, (3, 43), generator=g)
    rows = torch.cat([epoch_of([43] * 3, 43, 4, g) for _ in range(4)])
    assert 2 * STEPS < len(rows) < 3 * STEPS
    return Fit(some_heads(3, 6, dim=24), features, labels, rows)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_two_heads_at_once_are_torchs_sgd_on_each(momentum: float) -> None:
    """Three epochs of 11 images by 4: the last batch is short, and each head has rows of its own."""
    g, heads = random(1), some_heads(2, 3)
    features, labels = torch.randn(2, 11, 5, generator=g), torch.randint(3, (2, 11), generator=g)
    rows = torch.cat([epoch_of([11, 11], 11, 4, g) for _ in range(3)])
    assert rows.shape == (9, 2, 4) and not torch.equal(rows[:, 0], rows[:, 1])
    before = [part.clone() for part in heads]
    trained = fit_heads(heads, features, labels, rows, 0.1, momentum)
    assert all(torch.equal(a, b) for a, b in zip(heads, before, strict=True))  # it is given a copy
    for h, head in enumerate(heads.apart()):
        weight, bias = trained_by_torch(head, features[h], labels[h], rows[:, h], 0.1, momentum)
        torch.testing.assert_close(trained.weight[h], weight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(trained.bias[h], bias, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_blocks_of_steps_are_the_same_steps_one_by_one(momentum: float, long_fit: Fit) -> None:
    """To the last bit where products round alike; elsewhere a rounding apart, which training hardly magnifies."""
    found = fit_heads(*long_fit, 0.1, momentum)
    for a, b in zip(found, trained_step_by_step(*long_fit, 0.1, momentum), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_replayed_blocks_are_the_same_to_the_bit(momentum: float, long_fit: Fit) -> None:
    at_home = fit_heads(*long_fit, 0.1, momentum)
    heads, *data, rows = long_fit  # row numbers are drawn on the CPU
    with (
        elsewhere(recording=True) as device,
        mock.patch.object(Tape, "replay", autospec=True, side_effect=Tape.replay) as replay,
    ):
        there = Heads(*(part.to(device) for part in heads))
        found = fit_heads(there, *(part.to(device) for part in data), rows, 0.1, momentum)
        assert found.weight.device == device and replay.call_count == 2
        for a, b in zip(found, at_home, strict=True):
            assert torch.equal(a.cpu(), b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_gpu_trains_as_the_cpu_does_up_to_rounding(momentum: float, long_fit: Fit) -> None:
    heads, *data, rows = long_fit
    there = Heads(*(part.cuda() for part in heads))
    found = fit_heads(there, *(part.cuda() for part in data), rows, 0.1, momentum)
    for a, b in zip(found, fit_heads(*long_fit, 0.1, momentum), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)


def test_rows_of_minus_one_have_no_influence() -> None:
    g, heads = random(1), some_heads(1, 3)
    features, labels = torch.randn(1, 6, 5, generator=g), torch.randint(3, (1, 6), generator=g)
    plain = fit_heads(heads, features, labels, torch.tensor([[[4, 2, 5]]]), 0.1)
    filled = fit_heads(heads, features, labels, torch.tensor([[[4, -1, 2, 5, -1]]]), 0.1)
    for a, b in zip(plain, filled, strict=True):
        torch.testing.assert_close(a, b)


def test_a_step_without_rows_moves_only_by_momentum() -> None:
    g, heads = random(1), some_heads(1, 3)
    features, labels = torch.randn(1, 6, 5, generator=g), torch.randint(3, (1, 6), generator=g)
    nobody, some = torch.full((1, 1, 2), -1), torch.tensor([[[0, 1]]])
    assert torch.equal(fit_heads(heads, features, labels, nobody, 0.1).weight, heads.weight)
    assert torch.equal(fit_heads(heads, features, labels, nobody[:0], 0.1).weight, heads.weight)
    one = fit_heads(heads, features, labels, some, 0.1).weight - heads.weight
    both = fit_heads(heads, features, labels, torch.cat([some, nobody]), 0.1).weight - heads.weight
    torch.testing.assert_close(both, 1.9 * one)


def test_an_epoch_has_every_row_once() -> None:
    rows = epoch_of([11], 11, 4, random())
    assert rows.shape == (3, 1, 4)
    assert sorted(rows.flatten().tolist()) == [-1, *range(11)]
    assert rows[2, 0, 3] == -1  # the last step is filled up
    assert not torch.equal(rows, epoch_of([11], 11, 4, random(1)))


def test_a_short_set_is_repeated_and_a_long_one_cut() -> None:
    short, long = epoch_of([3, 20], 10, 5, random()).unbind(1)
    for turn in short.flatten()[:9].split(3):
        assert sorted(turn.tolist()) == [0, 1, 2]
    assert int(short.flatten()[9]) in range(3)
    assert len(set(long.flatten().tolist())) == 10 and set(long.flatten().tolist()) <= set(range(20))


def test_an_empty_set_has_no_rows() -> None:
    rows = epoch_of([0, 4], 4, 3, random())
    assert rows.shape == (2, 2, 3)
    assert rows[:, 0].tolist() == [[-1] * 3] * 2
    assert sorted(rows[:, 1].flatten().tolist()) == [-1, -1, 0, 1, 2, 3]


@pytest.mark.parametrize("outputs", [2, 3])
def test_the_first_tasks_head_gets_an_output_for_others_and_later_ones_keep_theirs(outputs: int) -> None:
    g = random()
    weight, bias = torch.randn(outputs, 5, generator=g), torch.randn(outputs, generator=g)
    model = TaskModel(2, torch.zeros(1), torch.zeros(1), weight.clone(), bias.clone())
    head = head_with_others(model, random(1))
    assert head.weight.shape == (1, 3, 5) and head.bias.shape == (1, 3)
    assert torch.equal(head.weight[0, :outputs], weight) and torch.equal(head.bias[0, :outputs], bias)
    assert float(head.weight[0, outputs:].abs().sum()) > 0 or outputs == 3
    assert bool((head.weight[0, outputs:].abs() <= 5**-0.5).all())
    head.weight.zero_()
    assert torch.equal(model.head_weight, weight)  # a copy


@pytest.mark.parametrize("outputs", [2, 3])
def test_outputs_for_turned_images_are_not_taken_for_others(outputs: int) -> None:
    """They come last: without them, a head of a turned task is what it would be anyway."""
    g = random()
    weight, bias = torch.randn(outputs + 6, 5, generator=g), torch.randn(outputs + 6, generator=g)
    plain = TaskModel(2, torch.zeros(1), torch.zeros(1), weight[:outputs].clone(), bias[:outputs].clone())
    turned = TaskModel(2, torch.zeros(1), torch.zeros(1), weight.clone(), bias.clone())
    turned.rotation_classes = True
    for expected, found in zip(head_with_others(plain, random(1)), head_with_others(turned, random(1)), strict=True):
        assert torch.equal(expected, found)


def test_heads_joined_and_apart_are_the_same() -> None:
    heads = [some_heads(1, 3, seed=s) for s in range(4)]
    together = joined(heads)
    assert together.weight.shape == (4, 3, 5) and together.bias.shape == (4, 3)
    for before, after in zip(heads, together.apart(), strict=True):
        assert torch.equal(before.weight, after.weight) and torch.equal(before.bias, after.bias)


def test_each_head_answers_for_its_own_features() -> None:
    heads, features = some_heads(2, 3), torch.randn(2, 7, 5, generator=random(1))
    found = heads.logits(features)
    assert found.shape == (2, 7, 3) and found.dtype == torch.float64
    for h in range(2):
        expected = F.linear(features[h].double(), heads.weight[h].double(), heads.bias[h].double())
        torch.testing.assert_close(found[h], expected)


def test_heads_with_equally_many_outputs_are_alike() -> None:
    assert alike([some_heads(1, outputs) for outputs in (3, 4, 3, 2, 4)]) == [[0, 2], [1, 4], [3]]
    assert alike([]) == []
