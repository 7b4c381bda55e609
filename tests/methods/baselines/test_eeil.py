"""EEIL: distillation inside each old task, then all tasks on a balanced set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rehearsing import LABELS, Fit, Says, kl, loss_of, move_head, softmax, some_logits, spy, tiny_learner, tiny_task

from tpl.methods.eeil import EEIL
from tpl.methods.parts.distill import Distillation


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[Fit]:
    """The trainings of three tasks with 1, 3 and 1 classes: one, two and two."""
    method = tiny_learner("eeil", memory=9, lr=0.04, balanced_epochs=7).method
    assert isinstance(method, EEIL)
    fits = spy(method, monkeypatch, move_head)
    for number, classes in enumerate([1, 3, 1]):
        method.learn(tiny_task(number, classes))
    return fits


def test_old_tasks_are_distilled_one_by_one(fits: list[Fit]) -> None:
    """The loss by hand, with the groups that the method asks for and teachers that say half as much."""
    assert [fit.name for fit in fits] == ["training", "training", "balancing", "training", "balancing"]
    assert fits[0].objective.teachers == []
    ((teacher, groups),) = fits[3].objective.teachers
    assert torch.equal(teacher.head_weight, fits[3].head)  # the network as it was before
    logits = some_logits()
    objective = Distillation(Says(5), [(Says(5, 0.5), groups)], fits[3].objective.temperature)  # type: ignore[arg-type,list-item]
    total = 0.0
    for row, label in zip(logits.double().numpy(), LABELS.tolist(), strict=True):
        if label >= 0:
            total -= np.log(softmax(row)[label])
            for task in ([0], [1, 2, 3]):
                total += 4 * len(task) / 4 * kl(softmax(row[task] / 4), softmax(row[task] / 2))
    assert loss_of(objective, logits, LABELS) == pytest.approx(total / 4, rel=1e-5)


def test_balancing_distils_all_tasks_from_the_trained_network_on_a_balanced_set(fits: list[Fit]) -> None:
    main, last = fits[3:]
    ((teacher, groups),) = last.objective.teachers
    assert torch.equal(teacher.head_weight, main.head + 1)  # the mark of the training before
    assert not any(p.requires_grad for p in teacher.parameters())
    assert groups == [slice(0, 1), slice(1, 4), slice(4, 5)]
    assert last.samples.labels.bincount().tolist() == [2, 2, 2, 2, 2]  # 9 places for 4 old classes
    assert last.replay is None and last.trainable is None  # the whole network, on that set alone
    assert (last.recipe.epochs, last.recipe.lr, last.recipe.schedule) == (7, pytest.approx(0.004), "cosine")
    assert (main.recipe.epochs, main.recipe.lr) == (1, 0.04)
