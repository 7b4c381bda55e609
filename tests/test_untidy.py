"""Untidy streams: known and new classes together."""

from __future__ import annotations

import pytest
import torch

from handwriting import digits
from small_encoder import SMALL_VIT
from tensors import differences, tensors_of
from tpl import Learner, Task, TplError

OPTIONS = {"epochs": 2, "latent": 8, "batch_size": 16, "memory": 20, "lr": 0.05}


def taught(method: str = "tpl-plus", **options: object) -> Learner:
    learner = Learner(method, SMALL_VIT, device="cpu", **OPTIONS | options)
    for t in range(2):
        learner.learn(Task(f"task {t}", (f"{2 * t}", f"{2 * t + 1}"), digits([2 * t, 2 * t + 1], 10)))
    return learner


def test_new_classes_are_learned_and_known_ones_updated() -> None:
    learner, apart = taught(), taught()
    learner.learn(Task("mixed", ("1", "4", "2"), digits([1, 4, 2], 10, start=50)))
    assert learner.outcome_ == {"4": "learned", "1": "updated", "2": "updated"}
    assert [r.classes for r in learner.tasks_] == [("0", "1"), ("2", "3"), ("4",)]
    assert [r.images + r.held_out for r in learner.tasks_] == [30, 30, 10]
    apart.learn(Task("mixed", ("4",), digits([4], 10, start=50)))
    apart.update(Task("update", ("1", "2"), digits([1, 2], 10, start=50)))
    probe = digits(range(5), 3, start=100)
    assert torch.equal(learner.log_probabilities(probe), apart.log_probabilities(probe))


def test_if_the_update_fails_the_task_is_not_learned_either(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = taught()
    before, records = tensors_of(learner.method), learner.tasks_
    before = {name: tensor.clone() for name, tensor in before.items()}

    def fails(*_: object) -> None:
        raise TplError("no update")

    monkeypatch.setattr(learner.method, "update_classes", fails)
    with pytest.raises(TplError, match="no update"):
        learner.learn(Task("mixed", ("1", "4"), digits([1, 4], 10, start=50)))
    assert not differences(before, tensors_of(learner.method))
    assert learner.tasks_ == records


def test_a_method_that_cannot_update_says_so_before_it_trains() -> None:
    learner = Learner("icarl", SMALL_VIT, device="cpu", epochs=1, memory=10)
    learner.learn(Task("first", ("0", "1"), digits([0, 1], 5)))
    with pytest.raises(TplError, match=r"Already learned: 1; new: 4\. The method 'icarl' cannot"):
        learner.learn(Task("mixed", ("1", "4"), digits([1, 4], 5, start=50)))
    assert learner.classes_ == ["0", "1"]
