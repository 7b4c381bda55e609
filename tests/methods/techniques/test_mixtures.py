"""Mixup, CutMix and MixOE: which images are shown, and which labels asked for."""

from __future__ import annotations

import pytest
import torch
from toy_tasks import CPU, SIDE, random, some_batch

from tpl.engine import IGNORED
from tpl.methods.bank.techniques import CutMix, MixOE, Mixup, box, partners, swapped_quarters


def soft_entropy(z: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-sum_c target_c log p_c of every row, from the definition."""
    odds = (z @ weight.T + bias).exp()
    return -(targets * (odds / odds.sum(dim=1, keepdim=True)).log()).sum(dim=1)


def one_hot(labels: torch.Tensor, own: int) -> torch.Tensor:
    return torch.eye(own)[labels]


def some_head(own: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(own, dim, generator=random(7)), torch.randn(own, generator=random(8))


def test_partners_are_one_circle_of_all_rows_that_count() -> None:
    labels = torch.tensor([0, IGNORED, 1, 1, IGNORED, 0, 2])
    following = []
    for seed in range(40):
        partner = partners(labels, torch.rand(9, generator=random(seed)))
        assert partner[1] == 1 and partner[4] == 4
        circle = [0]
        while (step := int(partner[circle[-1]])) != 0:
            circle.append(step)
        assert sorted(circle) == [0, 2, 3, 5, 6]
        following.append(circle[1])
    assert set(following) == {2, 3, 5, 6}


def test_a_row_that_counts_alone_is_its_own_partner() -> None:
    labels = torch.tensor([IGNORED, 1, IGNORED])
    assert partners(labels, torch.tensor([0.1, 0.9, 0.5])).tolist() == [0, 1, 2]


def test_quarters_change_places_and_none_stays() -> None:
    pixels = torch.arange(4 * 5 * 4 * 3, dtype=torch.uint8).reshape(4, 1, 3 * 5, 4)[:, :, :5]
    ways = set()
    for seed in range(20):
        moved = swapped_quarters(pixels, random(seed))
        assert moved.dtype == torch.uint8 and torch.equal(moved[:, :, 4], pixels[:, :, 4])  # five rows: the last stays
        for image, before in zip(moved[:, 0], pixels[:, 0], strict=True):
            now, was = ([part[:2, :2], part[:2, 2:], part[2:4, :2], part[2:4, 2:]] for part in (image, before))
            places = [next(i for i, old in enumerate(was) if torch.equal(new, old)) for new in now]
            steps = {(place - i) % 4 for i, place in enumerate(places)}
            assert len(steps) == 1
            ways |= steps
    assert ways == {1, 2, 3}


@pytest.mark.parametrize("size", [(6, 6), (5, 9)])
@pytest.mark.parametrize("seed", range(8))
def test_a_box_is_the_box(size: tuple[int, int], seed: int) -> None:
    share, y, x = torch.rand(3, generator=random(seed)).tolist()
    expected = torch.zeros(size, dtype=torch.bool)
    sides = []
    for length, draw in zip(size, (y, x), strict=True):
        half, centre = int(length * share**0.5) // 2, int(length * draw)
        sides.append(slice(max(centre - half, 0), min(centre + half, length)))
    expected[sides[0], sides[1]] = True
    assert torch.equal(box(size, torch.tensor([share]), torch.tensor([y, x])), expected)


def test_mixup_mixes_images_and_labels_alike() -> None:
    technique = Mixup(3, 4, 8, CPU)
    images, labels, draws = some_batch(technique, ignored=2)
    draws[0] = 0.7
    share, partner = float(technique.weight_of(draws)), partners(labels, draws[1:])
    assert 0.5 < share < 1
    shown = technique.mixed(images, labels, draws)
    for row in range(8):
        torch.testing.assert_close(shown[row], share * images[row] + (1 - share) * images[partner[row]])
    z, (weight, bias) = torch.randn(8, 4, generator=random(3)), some_head(3, 4)
    targets = share * one_hot(labels[:6], 3) + (1 - share) * one_hot(labels[partner[:6]], 3)
    expected = soft_entropy(z[:6], weight, bias, targets).mean()
    torch.testing.assert_close(technique.loss(z, weight, bias, labels, draws), expected)


def test_mixup_with_all_the_weight_shows_the_image_itself() -> None:
    technique = Mixup(3, 4, 8, CPU)
    images, labels, draws = some_batch(technique)
    draws[0] = 1 - 2**-24
    assert float(technique.weight_of(draws)) == 1
    assert torch.equal(technique.mixed(images, labels, draws), images)
    draws[0] = 0
    assert torch.equal(technique.mixed(images, labels, draws), images[partners(labels, draws[1:])])


def test_mixups_weights_are_beta_distributed() -> None:
    technique, draws = Mixup(3, 4, 8, CPU), torch.rand(20_000, 1, generator=random(0))
    weights = torch.cat([technique.weight_of(d) for d in draws]).double()
    assert float(weights.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(weights.var()) == pytest.approx(1 / (4 * (2 * 0.2 + 1)), abs=0.005)  # of Beta(a, a)


def test_cutmix_pastes_the_box_and_labels_by_its_area() -> None:
    technique = CutMix(3, 4, 8, CPU)
    images, labels, draws = some_batch(technique, ignored=2)
    draws[:3] = torch.tensor([0.45, 0.3, 0.95])  # sides of int(6 * sqrt(.45)) // 2 * 2 = 4, around (1, 5)
    partner = partners(labels, draws[3:])
    expected = images.clone()
    expected[:, :, 0:3, 3:6] = images[partner][:, :, 0:3, 3:6]  # cut off at the edges
    assert torch.equal(technique.mixed(images, labels, draws), expected)
    z, (weight, bias) = torch.randn(8, 4, generator=random(3)), some_head(3, 4)
    pasted = 9 / SIDE**2
    targets = (1 - pasted) * one_hot(labels[:6], 3) + pasted * one_hot(labels[partner[:6]], 3)
    expected_loss = soft_entropy(z[:6], weight, bias, targets).mean()
    torch.testing.assert_close(technique.loss(z, weight, bias, labels, draws), expected_loss)


def test_mixoe_pastes_outliers_into_copies_of_the_new_images() -> None:
    technique = MixOE(3, 4, 4, CPU)
    images = torch.randn(8, 3, SIDE, SIDE, generator=random(0))
    labels = torch.tensor([0, 1, 2, IGNORED, 3, IGNORED, 3, 3])  # whole pairs: rows 0 and 4, 2 and 6
    draws = torch.tensor([0.95, 0.5, 0.5])  # keeps .95^10 = .599: sides of int(6 * sqrt(.401)) // 2 * 2 = 2, at (3, 3)
    expected = images.clone()
    for new, outlier in ((0, 4), (2, 6)):
        expected[outlier] = images[new]
        expected[outlier, :, 2:4, 2:4] = images[outlier, :, 2:4, 2:4]
    assert torch.equal(technique.mixed(images, labels, draws), expected)
    z, (weight, bias) = torch.randn(8, 4, generator=random(3)), some_head(3, 4)
    plain = soft_entropy(z[:3], weight, bias, one_hot(labels[:3], 3)).mean()
    kept = 1 - 4 / SIDE**2
    targets = kept * one_hot(labels[[0, 2]], 3) + (1 - kept) / 3
    mixtures = soft_entropy(z[[4, 6]], weight, bias, targets).mean()
    torch.testing.assert_close(technique.loss(z, weight, bias, labels, draws), plain + mixtures)


@pytest.mark.parametrize("rows", [4, 3])
def test_mixoe_without_outliers_is_plain_cross_entropy(rows: int) -> None:
    technique = MixOE(3, 4, 4, CPU)
    images, labels = torch.randn(rows, 3, SIDE, SIDE, generator=random(0)), torch.arange(rows) % 3
    draws = torch.rand(3, generator=random(1))
    assert torch.equal(technique.mixed(images, labels, draws), images)
    z, (weight, bias) = torch.randn(rows, 4, generator=random(3)), some_head(3, 4)
    expected = soft_entropy(z, weight, bias, one_hot(labels, 3)).mean()
    torch.testing.assert_close(technique.loss(z, weight, bias, labels, draws), expected)
