"""Adapters that grow: a further set when the units run short, and nothing that was learned before changes by a bit."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from handwriting import digits
from small_encoder import SMALL_VIT
from tpl import Learner, Task
from tpl.engine import Event
from tpl.methods.plus import TPLPlus
from tpl.methods.tpl import TPL

# Without a regulariser a task takes half of the units: three or four fill a set.
OPTIONS: dict[str, Any] = {"epochs": 1, "latent": 4, "batch_size": 16, "memory": 40, "lr": 0.05, "sparsity": 0.0}
GROWING = OPTIONS | {"grow_adapters": "when_full"}
TASKS = 9
PROBE = digits(range(4), 6, start=120)


def task(number: int) -> Task:
    return Task(f"task {number}", (f"class {number}",), digits([number], 12, start=0))


def bank_of(learner: Learner) -> Any:
    assert isinstance(learner.method, TPL)
    return learner.method.bank


def features(learner: Learner) -> list[Tensor]:
    assert isinstance(learner.method, TPL)
    pixels = learner.prepare(PROBE)
    return [learner.method.task_features(pixels, t) for t in range(len(learner.tasks_))]


@pytest.fixture(scope="module")
def grown() -> tuple[Learner, list[list[Tensor]], list[int]]:
    """A model, all features after every task, and how many sets of adapters there were."""
    learner, seen, sets = Learner("tpl", SMALL_VIT, device="cpu", **GROWING), [], []
    for number in range(TASKS):
        learner.learn(task(number))
        seen.append(features(learner))
        sets.append(len(bank_of(learner).sets))
    return learner, seen, sets


def test_features_of_old_tasks_never_change(grown: tuple[Learner, list[list[Tensor]], list[int]]) -> None:
    _, seen, sets = grown
    assert sets[0] == 1 and sets[-1] >= 3, "the model has not grown twice"
    for earlier, later in pairwise(seen):
        assert all(torch.equal(a, b) for a, b in zip(earlier, later, strict=False))


def test_a_set_is_left_once_it_is_full(grown: tuple[Learner, list[list[Tensor]], list[int]]) -> None:
    learner, _, sets = grown
    bank = bank_of(learner)
    owners = [model.adapter_set for model in bank.tasks]
    assert owners == sorted(owners) and set(owners) == set(range(sets[-1]))
    for number in range(sets[-1] - 1):
        masks = [bank.unit_mask(t) for t, owner in enumerate(owners) if owner == number]
        assert float(torch.stack(masks).amax(dim=0).mean()) >= 0.9
    assert learner.capacity() == bank.capacity() and bank.capacity()["sets"] == sets[-1]


def test_a_grown_model_is_stored(grown: tuple[Learner, list[list[Tensor]], list[int]], tmp_path: Path) -> None:
    learner, seen, sets = grown
    learner.save(tmp_path)
    again = Learner.load(tmp_path, device="cpu")
    assert torch.equal(again.log_probabilities(PROBE), learner.log_probabilities(PROBE))
    assert bank_of(again).trained_set == sets[-1] - 1
    assert torch.equal(bank_of(again).used, bank_of(learner).used)
    again.learn(task(TASKS))
    assert all(torch.equal(a, b) for a, b in zip(seen[-1], features(again), strict=False))


def test_without_the_option_a_full_network_is_said() -> None:
    learner, told = Learner("tpl", SMALL_VIT, device="cpu", **OPTIONS), list[Event]()
    for number in range(8):
        learner.learn(task(number), callback=told.append)
    assert len(bank_of(learner).sets) == 1
    assert any("grow_adapters=when_full" in event.data["text"] for event in told if event.kind == "warning")


def test_a_failure_while_growing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner("tpl", SMALL_VIT, device="cpu", **GROWING)
    number = 0
    while not number or bank_of(learner).capacity()["units"] < 0.9:
        learner.learn(task(number))
        number += 1
    before, sets = features(learner), len(bank_of(learner).sets)

    def broken(event: Event) -> None:
        if event.kind == "epoch":
            assert len(bank_of(learner).sets) == sets + 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learner.learn(task(number), callback=broken)
    assert len(bank_of(learner).sets) == sets and len(learner.tasks_) == number
    assert all(torch.equal(a, b) for a, b in zip(before, features(learner), strict=True))
    learner.learn(task(number))
    assert len(bank_of(learner).sets) == sets + 1


def test_a_view_of_a_removed_task_keeps_its_adapters() -> None:
    """The expert of tpl-plus uses the first task's model also when that task is gone and the adapters have grown.

    They grow by default, which those of tpl do not.
    """
    options = OPTIONS | {"random_features": 64, "expert_views": "first"}
    learner = Learner("tpl-plus", SMALL_VIT, device="cpu", **options)
    for number in range(6):
        learner.learn(task(number))
    assert isinstance(learner.method, TPLPlus) and bank_of(learner).trained_set > 0
    before = learner.method.common_features(learner.prepare(PROBE))
    learner.remove("class 0")
    after = learner.method.common_features(learner.prepare(PROBE))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
