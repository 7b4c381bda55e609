"""The common checks: every registered method passes them without a line of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tpl import Learner, Task
from tpl.methods import load_methods
from tpl.stream import Stream, TaskClosed

METHODS = sorted(load_methods())
OPTIONS = {"latent": 16, "epochs": 4, "batch_size": 16, "lr": 0.05, "memory": 30}


def new_learner(method: str, seed: int = 0) -> Learner:
    known = load_methods()[method].config_class.__dataclass_fields__
    return Learner(method, device="cpu", seed=seed, **{k: v for k, v in OPTIONS.items() if k in known})


def tasks_for(learner: Learner, stream: Stream) -> Iterator[Task]:
    """What the method may see at each stage: one guarded task, or everything so far for an upper bound."""
    for t, task in enumerate(stream.once()):
        yield stream.union(t) if learner.method.cumulative else task


@pytest.fixture(scope="module", params=METHODS)
def trained(request: pytest.FixtureRequest, small_stream: Stream) -> Learner:
    learner = new_learner(request.param)
    for task in tasks_for(learner, small_stream):
        learner.learn(task)
    return learner


def test_learns_three_small_tasks_above_chance(trained: Learner, small_stream: Stream) -> None:
    newest = small_stream[2].test
    assert newest is not None
    right = np.array(trained.predict(newest)) == np.array([small_stream[2].classes[i] for i in newest.labels])
    assert right.mean() > 0.5  # chance is 1/6; every method should at least know the newest task


def test_answers_do_not_depend_on_the_batch(trained: Learner, small_stream: Stream) -> None:
    images = small_stream[1].test
    assert images is not None
    pixels = trained.prepare(images)
    together = trained.method.log_probabilities(pixels)
    one_by_one = torch.cat([trained.method.log_probabilities(p) for p in pixels.split(1)])
    assert torch.equal(together.argmax(dim=1), one_by_one.argmax(dim=1))
    torch.testing.assert_close(together, one_by_one, rtol=1e-3, atol=1e-3)


def test_save_and_load_give_identical_answers(trained: Learner, small_stream: Stream, tmp_path: Path) -> None:
    images = small_stream[0].test
    assert images is not None
    trained.save(tmp_path / "model")
    again = Learner.load(tmp_path / "model", device="cpu")
    assert again.classes_ == trained.classes_
    assert torch.equal(again.log_probabilities(images), trained.log_probabilities(images))


@pytest.mark.parametrize("method", METHODS)
def test_resumed_equals_uninterrupted_and_the_same_seed_gives_the_same_numbers(
    method: str, trained: Learner, small_stream: Stream, tmp_path: Path
) -> None:
    if trained.method.name != method:
        pytest.skip("the other methods have their own turn")
    learner = new_learner(method)
    for t, task in enumerate(tasks_for(learner, small_stream)):
        learner.learn(task)
        if t < 2:  # every task but the last happens in "another process"
            learner.save(tmp_path / "model")
            learner = Learner.load(tmp_path / "model", device="cpu")
    for task in small_stream:
        assert task.test is not None
        assert torch.equal(learner.log_probabilities(task.test), trained.log_probabilities(task.test))


def test_keeps_within_its_memory_budget(trained: Learner) -> None:
    if trained.method.memory is None:
        assert not hasattr(trained.method.config, "memory")
    else:
        assert 0 < len(trained.method.memory) <= trained.method.config.memory


def test_knows_exactly_the_classes_seen(trained: Learner, small_stream: Stream) -> None:
    assert trained.classes_ == list(small_stream.classes)
    early = new_learner(trained.method.name)
    early.learn(small_stream[0])
    images = small_stream[2].test
    assert images is not None
    log_p = early.log_probabilities(images)
    assert log_p.shape == (len(images), 2)
    torch.testing.assert_close(log_p.exp().sum(dim=1), torch.ones(len(images), dtype=torch.float64))
    assert set(early.predict(images)) <= set(small_stream[0].classes)


def test_the_stream_refuses_to_hand_out_an_old_task(small_stream: Stream) -> None:
    """The proof behind "no old data": a learner that kept the old task cannot read it."""
    tasks = small_stream.once()
    first = next(tasks)
    next(tasks)
    with pytest.raises(TaskClosed):
        first.train.load(0)
    with pytest.raises(TaskClosed):
        _ = first.train.labels
