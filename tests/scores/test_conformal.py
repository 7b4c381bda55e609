"""Conformal p-values: the promise about known images, whatever the scores are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tpl.answers import Answer
from tpl.scores.calibration import p_values, smallest_share, unknown_scores


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def answer(unknown: float) -> Answer:
    return Answer("a", 1.0, "task 1", unknown, (("a", 1.0),))


def test_p_values_count_the_held_out_scores_that_are_no_larger() -> None:
    held = torch.tensor([1.0, 2.0, 2.0, 5.0])
    scores = torch.tensor([0.0, 1.0, 1.5, 2.0, 9.0])
    assert p_values(scores, held).tolist() == [1 / 5, 2 / 5, 2 / 5, 4 / 5, 1.0]


def test_the_task_that_knows_best_decides() -> None:
    held = [torch.arange(9.0), torch.arange(99.0)]
    scores = [torch.tensor([-1.0, -1.0, 4.5]), torch.tensor([-1.0, 98.5, -1.0])]
    assert unknown_scores(scores, held).tolist() == pytest.approx([0.9, 0.0, 0.4])


@pytest.mark.parametrize("tasks", [1, 4])
@pytest.mark.parametrize("share", [0.05, 0.1, 0.3])
def test_no_more_than_the_share_of_known_images_is_rejected(tasks: int, share: float) -> None:
    """Over many draws of held-out images: each draw is off by chance, their mean is not above the share."""
    rates = []
    for seed in range(200):
        held = [draws(59, seed=1000 * t + seed).sort().values for t in range(tasks)]
        known = draws(tasks, 100, seed=10_000 + seed)  # images of the first task; the others score them much lower
        scores = [known[0], *(row - 8 for row in known[1:])]
        unknown = unknown_scores(scores, held)
        rates.append(np.mean([answer(u).rejected(share) for u in unknown.tolist()]))
    assert np.mean(rates) <= share + 3 * np.std(rates) / len(rates) ** 0.5
    assert np.mean(rates) >= share - 0.03  # and hardly fewer: the rule is not idle


def test_without_held_out_images_nothing_is_ever_rejected() -> None:
    nothing = torch.zeros(0, dtype=torch.float64)
    held = [draws(500).sort().values, nothing]
    unknown = unknown_scores([torch.tensor([-99.0]), torch.tensor([-99.0])], held)
    assert unknown.tolist() == [0.0]
    assert smallest_share(held) == 1.0


def test_the_smallest_share_is_where_rejection_begins() -> None:
    held = [draws(19).sort().values, draws(400).sort().values]
    lowest = unknown_scores([torch.tensor([-99.0])] * 2, held).tolist()[0]
    assert smallest_share(held) == 1 / 20
    assert answer(lowest).rejected(0.05)
    assert not answer(lowest).rejected(0.049)
