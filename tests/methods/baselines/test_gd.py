"""GD: the specialist's loss, the two teachers, and the weights that balance the head."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rehearsing import LABELS, Fit, Says, kl, loss_of, move_head, softmax, some_logits, spy, tiny_learner, tiny_task

from tpl.engine import Feed, Samples
from tpl.methods.gd import GD, GDConfig, Specialist, balancing_weights
from tpl.methods.parts.distill import Distillation


def test_the_specialist_is_right_about_new_images_and_unsure_about_old_ones() -> None:
    """Classes 3 and 4 are new; rows 0 and 2 show them, rows 1 and 4 old ones, row 3 nothing."""
    logits = some_logits()
    rows = [softmax(row[3:]) for row in logits.double().numpy()]
    right = -(np.log(rows[0][1]) + np.log(rows[2][0])) / 2
    unsure = (kl(np.array([0.5, 0.5]), rows[1]) + kl(np.array([0.5, 0.5]), rows[4])) / 2
    objective = Specialist(Says(5), 3, 0.7)  # type: ignore[arg-type]
    assert loss_of(objective, logits, LABELS) == pytest.approx(right + 0.7 * unsure, rel=1e-5)
    without_old = torch.where(LABELS < 3, -100, LABELS)  # no memory: nothing to be unsure about
    assert loss_of(objective, logits, without_old) == pytest.approx(right, rel=1e-5)


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[Fit]:
    """The trainings of two tasks with 3 and 2 classes: one, and three."""
    method = tiny_learner("gd", memory=9, lr=0.04, balanced_epochs=7).method
    assert isinstance(method, GD)
    fits = spy(method, monkeypatch, move_head)
    for number, classes in enumerate([3, 2]):
        method.learn(tiny_task(number, classes))
    fits.append(fits[-1]._replace(head=method.network.head_weight.detach()))
    return fits


def test_the_network_starts_where_it_was_and_has_two_teachers(fits: list[Fit]) -> None:
    assert [fit.name for fit in fits[:4]] == ["training", "specialist", "training", "balancing"]
    _, specialist, main, _, _ = fits
    assert isinstance(specialist.objective, Specialist) and specialist.objective.first == 3
    assert torch.equal(main.head, specialist.head)  # what the specialist learned is not in the network
    (before, old), (taught, new) = main.objective.teachers
    assert torch.equal(before.head_weight, main.head)
    assert torch.equal(taught.head_weight, main.head + 1)
    assert (old, new) == ([slice(0, 3)], [slice(3, 5)])
    assert not any(p.requires_grad for teacher in (before, taught) for p in teacher.parameters())


def test_old_classes_are_distilled_together_and_new_ones_from_the_specialist(fits: list[Fit]) -> None:
    (_, old), (_, new) = fits[2].objective.teachers
    says = [(Says(3, 0.5), old), (Says(5, -1.0), new)]
    logits = some_logits()
    objective = Distillation(Says(5), says, fits[2].objective.temperature)  # type: ignore[arg-type]
    total = 0.0
    for row, label in zip(logits.double().numpy(), LABELS.tolist(), strict=True):
        if label >= 0:
            total -= np.log(softmax(row)[label])
            total += 4 * 3 / 5 * kl(softmax(row[:3] / 4), softmax(row[:3] / 2))
            total += 4 * 2 / 5 * kl(softmax(-row[3:] / 2), softmax(row[3:] / 2))
    assert loss_of(objective, logits, LABELS) == pytest.approx(total / 4, rel=1e-5)


def test_balancing_moves_the_head_alone(fits: list[Fit]) -> None:
    main, last = fits[2:4]
    assert last.trainable is not None and [p.shape for p in last.trainable] == [main.head.shape, (5,)]
    assert last.objective.teachers == main.objective.teachers
    assert main.objective.class_weights is None
    assert (last.recipe.epochs, last.recipe.lr, last.recipe.schedule) == (7, pytest.approx(0.004), "cosine")


@pytest.mark.parametrize("replay_batches", ["union", "balanced"])
def test_every_class_weighs_the_same_in_what_the_steps_show(replay_batches: str) -> None:
    """Counted in the batches themselves, whichever way they are made."""
    new, old = (
        Samples(torch.zeros(len(labels), 1), torch.tensor(labels))
        for labels in ([3] * 30 + [4] * 10, [0] * 5 + [1] * 2 + [2] * 1)
    )
    config = GDConfig(replay_batches=replay_batches, batch_size=8)
    weights = balancing_weights(config.times_shown(new, old, 5))
    feed = Feed([config.batches(new, old, torch.Generator().manual_seed(0))])
    shown = torch.zeros(5)
    for inputs in (inputs for _ in range(4) for inputs in feed.epoch()):
        shown += feed.gather(inputs)[1][0].bincount(minlength=5)
    torch.testing.assert_close(weights * shown, torch.full((5,), shown.sum().item() / 5))
    alone = balancing_weights(config.times_shown(new, None, 5))
    assert alone.tolist() == pytest.approx([0, 0, 0, 4 / 15, 4 / 5])  # none is remembered
