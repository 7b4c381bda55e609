"""The common checks: every registered method passes them without a line of its own, and so does every technique."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tpl import Learner, Task
from tpl.methods import load_methods
from tpl.methods.bank.techniques import TECHNIQUES
from tpl.stream import Stream, TaskClosed

OPTIONS = {"latent": 16, "epochs": 3, "batch_size": 16, "lr": 0.05, "memory": 30}
# Second stages of single methods: as short as they can be and still happen.
OPTIONS |= {"balanced_epochs": 1, "anchor_steps": 3, "fusion_epochs": 5, "negative_steps": 1}
CASES: dict[str, tuple[str, dict[str, object]]] = {name: (name, {}) for name in sorted(load_methods())}
CASES |= {f"hat, {name}": ("hat", {"technique": name, "epochs": 2}) for name in TECHNIQUES if name != "none"}
CASES["tpl, supsup"] = ("tpl", {"protect": "supsup"})
# From scratch, more and smaller steps are worth more than passes.
CASES |= {
    f"resnet18, {name}": (name, {"encoder": "resnet18:8", "batch_size": 4, "epochs": 2}) for name in ("tpl", "hat")
}
CASES["foster"] = ("foster", {"epochs": 4, "compression": 1.0})  # a student that begins anew needs its time


def new_learner(case: str, seed: int = 0) -> Learner:
    method, options = CASES[case]
    known = load_methods()[method].config_class.__dataclass_fields__
    return Learner(method, device="cpu", seed=seed, **({k: v for k, v in OPTIONS.items() if k in known} | options))


def tasks_for(learner: Learner, stream: Stream) -> Iterator[Task]:
    """What the method may see at each stage: one guarded task, or everything so far for an upper bound."""
    for t, task in enumerate(stream.once()):
        yield stream.union(t) if learner.method.cumulative else task


# A case's tests share one training, so one worker takes them all.
@pytest.fixture(scope="module", params=[pytest.param(case, marks=pytest.mark.xdist_group(case)) for case in CASES])
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models before the last task are: `0` knows the first task, `1` the first two."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def trained(case: str, small_stream: Stream, saved: Path) -> Learner:
    learner = new_learner(case)
    for t, task in enumerate(tasks_for(learner, small_stream)):
        learner.learn(task)
        if t < 2:
            learner.save(saved / case / str(t))
    return learner


def test_learns_three_small_tasks_above_chance(trained: Learner, small_stream: Stream) -> None:
    right, told = [], np.empty(0)
    for task in small_stream:
        assert task.test is not None
        truth = np.array([task.classes[i] for i in task.test.labels])
        log_p = trained.log_probabilities(task.test)
        own = [trained.classes_.index(name) for name in task.classes]
        right.append(np.array(trained.classes_)[log_p.argmax(dim=1)] == truth)
        told = np.array(task.classes)[log_p[:, own].argmax(dim=1)] == truth
    assert np.concatenate(right).mean() > 0.25  # chance is 1/6, and one task of three known is 1/3
    assert told.mean() > 0.75  # the newest task's classes are told apart, whichever task is chosen


def test_answers_do_not_depend_on_the_batch(trained: Learner, small_stream: Stream) -> None:
    images = small_stream[1].test
    assert images is not None
    pixels = trained.prepare(images)[::4]
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


def test_resumed_equals_uninterrupted_and_the_same_seed_gives_the_same_numbers(
    case: str, trained: Learner, small_stream: Stream, saved: Path
) -> None:
    if case.startswith("hat, "):
        pytest.skip("as hat: a technique keeps nothing from one task to the next")
    learner = Learner.load(saved / case / "1", device="cpu")
    for t, task in enumerate(tasks_for(learner, small_stream)):
        if t == 2:  # the last task happens in "another process"
            learner.learn(task)
    for task in small_stream:
        assert task.test is not None
        assert torch.equal(learner.log_probabilities(task.test), trained.log_probabilities(task.test))


def test_keeps_within_its_memory_budget(trained: Learner) -> None:
    if trained.method.memory is None:
        assert not hasattr(trained.method.config, "memory")
    else:
        assert len(trained.method.memory) <= trained.method.config.memory


def test_knows_exactly_the_classes_seen(case: str, trained: Learner, small_stream: Stream, saved: Path) -> None:
    assert trained.classes_ == list(small_stream.classes)
    early = Learner.load(saved / case / "0", device="cpu")
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
