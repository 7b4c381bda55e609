"""Replay: new and remembered images in equal parts, each under its own class."""

from __future__ import annotations

import pytest
import torch
from rehearsing import move_head, spy, tiny_learner, tiny_task

from tpl.methods.replay import Replay


def test_a_task_is_trained_with_the_memory_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = tiny_learner("replay", memory=8, memory_policy="first")
    method = learner.method
    assert isinstance(method, Replay)
    fits = spy(method, monkeypatch, move_head)
    tasks = [tiny_task(0), tiny_task(1)]
    for task in tasks:
        method.learn(task)
    assert fits[0].replay is None
    assert fits[1].objective is None  # plain cross-entropy
    assert fits[1].samples.labels.tolist() == [2, 3] * 6
    assert fits[1].replay is not None
    assert fits[1].replay.labels.tolist() == [0] * 4 + [1] * 4
    whole = method.preprocess.batch(tasks[0].train)
    assert torch.equal(fits[1].replay.pixels, torch.cat([whole[0:8:2], whole[1:8:2]]))
    assert method.memory.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_removed_class_leaves_head_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    method = tiny_learner("replay").method
    assert isinstance(method, Replay)
    spy(method, monkeypatch, move_head)
    method.learn(tiny_task(0, classes=3))
    method.remove("0-1")
    assert len(method.network.head_bias) == 2
    assert method.memory.labels.tolist() == [0, 0, 1, 1]
