"""How much two opinions count: by the likelihood of held-out images, and a prior."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tpl.methods.plus import Balance


def opinions(samples: int, sharpness: float, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """log P of three classes whose logits are right but for noise, and said too loud by a factor."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (samples,), generator=generator)
    logits = 2 * torch.eye(3, dtype=torch.float64)[labels]
    logits = logits + noise * torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    return (sharpness * logits).log_softmax(dim=1), labels


def test_without_images_it_is_as_usual() -> None:
    assert Balance().exponents == Balance.usual


def test_a_loud_opinion_is_toned_down_and_a_worthless_one_silenced() -> None:
    bank, labels = opinions(4000, sharpness=32, noise=1, seed=0)
    nothing = torch.full_like(bank, 1 / 3).log()
    a, _ = Balance().updated(bank, nothing, labels).exponents
    assert a == 2 / 32  # logits 2 e_y + N(0, 1) have log-odds of twice their difference
    random, _ = opinions(4000, sharpness=32, noise=1, seed=1)
    assert Balance().updated(random, nothing, labels).exponents[0] == 0
    right, _ = opinions(4000, sharpness=2, noise=1, seed=0)
    a, w = Balance().updated(random, right, labels).exponents
    assert (a, w) == (0, 1.0)


def test_the_likeliest_by_brute_force() -> None:
    (bank, labels), (expert, _) = opinions(300, 8, 2, seed=0), opinions(300, 3, 3, seed=0)
    found = Balance().updated(bank[:100], expert[:100], labels[:100]).updated(bank[100:], expert[100:], labels[100:])
    assert found.images == 300
    costs = {
        (a, w): float(torch.nn.functional.cross_entropy(a * bank + w * expert, labels, reduction="sum"))
        + float(
            torch.log2(torch.tensor((a or 1 / 128) / Balance.usual[0])) ** 2
            + torch.log2(torch.tensor(w / Balance.usual[1])) ** 2
        )
        for a in Balance.bank_grid
        for w in Balance.expert_grid
    }
    assert found.exponents == min(costs, key=lambda pair: costs[pair])
    assert Balance.from_state(found.state()).exponents == found.exponents
    assert Balance.from_state({}).images == 0


def test_few_images_hardly_move_it() -> None:
    bank, labels = opinions(1, 0.5, 0, seed=0)
    assert Balance().updated(bank, bank, labels).exponents == Balance.usual


def early(balance: Balance) -> Balance:
    """The balance as an early version would have stored it, without the likelihoods at a = 0."""
    state = balance.state()
    return Balance.from_state(state | {"likelihoods": state["likelihoods"][1:]})


def test_likelihoods_of_an_early_version_are_continued_without_zero() -> None:
    (bank, _), (expert, labels) = opinions(400, 32, 1, seed=1), opinions(400, 2, 1, seed=0)
    old = early(Balance().updated(bank[:200], expert[:200], labels[:200]))
    assert old.exponents[0] == 1 / 64
    more = old.updated(bank[200:], expert[200:], labels[200:])
    whole = Balance().updated(bank, expert, labels)
    assert more.exponents[0] == 1 / 64 and more.images == 400 and whole.exponents[0] == 0
    torch.testing.assert_close(more.likelihoods, whole.likelihoods[1:])
    assert Balance.from_state(more.state()).exponents == more.exponents


def test_balances_are_joined_on_the_exponents_that_both_have() -> None:
    (bank, _), (expert, labels) = opinions(400, 32, 1, seed=1), opinions(400, 2, 1, seed=0)
    a, b = (Balance().updated(bank[part], expert[part], labels[part]) for part in (slice(200), slice(200, 400)))
    whole = Balance().updated(bank, expert, labels)
    torch.testing.assert_close(a.joined(b).likelihoods, whole.likelihoods)
    for pair in ((early(a), b), (a, early(b)), (early(a), early(b))):
        found = pair[0].joined(pair[1])
        torch.testing.assert_close(found.likelihoods, whole.likelihoods[1:])
        assert found.images == 400


def test_likelihoods_of_any_other_shape_are_damage() -> None:
    with pytest.raises(ValueError, match="likelihoods"):
        Balance(torch.zeros(5, len(Balance.expert_grid), dtype=torch.float64))
