"""Batches: every new image once an epoch, as many replayed ones beside it."""

from __future__ import annotations

import pytest
import torch

from tpl.engine import Batches, GatedSGD, Samples, silent, train
from tpl.engine.train import cycle_length
from tpl.errors import TplError


def samples(n: int, offset: int) -> Samples:
    return Samples(torch.zeros(n, 3, 2, 2, dtype=torch.uint8), torch.arange(n) + offset)


def test_new_images_come_once_and_replay_keeps_the_ratio_one_to_one() -> None:
    batches = Batches(samples(10, 0), samples(3, 100), 4, torch.Generator().manual_seed(0))
    assert batches.steps == 3
    for _ in range(2):
        labels = [batches.gather(*rows)[1] for rows in batches.epoch()]
        new = torch.cat([part[part < 100] for part in labels])
        old = torch.cat([part[part >= 100] for part in labels])
        assert sorted(new.tolist()) == list(range(10))
        assert len(old) == 10
        counts = torch.bincount(old - 100, minlength=3)
        assert counts.max() - counts.min() <= 2  # an endless row of permutations, not a lottery


def test_empty_memory_is_no_replay() -> None:
    batches = Batches(samples(5, 0), samples(0, 0), 2, torch.Generator())
    assert [len(batches.gather(*rows)[1]) for rows in batches.epoch()] == [2, 2, 1]


class Diverging:
    def __init__(self) -> None:
        self.weight = torch.ones(1, requires_grad=True)

    def loss(self, images: torch.Tensor, labels: torch.Tensor, progress: torch.Tensor) -> torch.Tensor:
        return (self.weight * torch.inf).sum()

    def after_backward(self, progress: torch.Tensor) -> None: ...

    def after_step(self) -> None: ...


def test_a_diverging_loss_is_a_clear_error() -> None:
    objective = Diverging()
    batches = Batches(samples(4, 0), None, 2, torch.Generator())
    with pytest.raises(TplError, match="learning rate"):
        train(objective, GatedSGD([objective.weight], 0.1), batches, 2, lambda p: p.float(), silent)


@pytest.mark.parametrize(
    ("steps", "epochs", "cycle"), [(79, 40, 79), (8, 5, 8), (1, 20, 8), (3, 20, 9), (1, 2, 2), (5, 1, 5)]
)
def test_annealing_spans_an_epoch_and_never_fewer_steps_than_it_needs(steps: int, epochs: int, cycle: int) -> None:
    assert cycle_length(steps, epochs) == cycle
