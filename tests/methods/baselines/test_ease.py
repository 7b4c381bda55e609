"""EASE: frozen adapters a task, prototypes in every space, and those that are put together from others."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.methods.ease import EASE, completed
from tpl.stream import Stream

OPTIONS: dict[str, Any] = {"latent": 8, "epochs": 1, "batch_size": 16, "lr": 0.05}


def new(stream: Stream, tasks: int) -> tuple[Learner, EASE]:
    learner = Learner("ease", SMALL_VIT, device="cpu", **OPTIONS)
    for task in stream[:tasks]:
        learner.learn(task, held_out=0)
    assert isinstance(learner.method, EASE)
    return learner, learner.method


def test_a_class_exactly_like_a_later_one_gets_its_prototype() -> None:
    """In the first space old class c is like new class c, and at a right angle to the other one."""
    old = torch.eye(2, 4, dtype=torch.float64).unsqueeze(1)
    here = torch.stack([old[0, 0], old[1, 0]])
    there = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1.0]], dtype=torch.float64)
    new = torch.stack([here, there], dim=1)
    found = completed([old, new], "later")
    share = torch.e / (torch.e + 1)  # softmax of the cosines 1 and 0
    expected = torch.stack([share * there[0] + (1 - share) * there[1], share * there[1] + (1 - share) * there[0]])
    torch.testing.assert_close(found[:2, 1], expected)
    torch.testing.assert_close(found[:2, 0], old[:, 0])
    torch.testing.assert_close(found[2:], new)  # what is known stays
    # One donor alone gives all of its prototype: the true one, where the classes are alike.
    torch.testing.assert_close(completed([old[:1], new[:1]], "later")[0, 1], there[0])


def test_donors_are_all_later_classes_or_those_of_the_spaces_task() -> None:
    g = torch.Generator().manual_seed(0)
    known = [torch.randn(2, t + 1, 5, generator=g, dtype=torch.float64) for t in range(3)]
    later, newest = completed(known, "later"), completed(known, "newest")
    for found, donors in ((later, [known[1], known[2][:, :2]]), (newest, [known[1]])):
        others = torch.cat(donors)
        for c in range(2):
            similarity = F.cosine_similarity(known[0][c, 0].unsqueeze(0), others[:, 0], dim=1)
            torch.testing.assert_close(found[c, 1], similarity.softmax(dim=0) @ others[:, 1])
    torch.testing.assert_close(later[:, 2], newest[:, 2])  # the last space has one task


def test_old_adapters_and_prototypes_stay(small_stream: Stream) -> None:
    learner, method = new(small_stream, 1)
    pixels = learner.prepare(small_stream[0].train)
    first, prototypes = method.spaces(pixels), method.prototypes
    assert not torch.allclose(first[:, 0], method.encoder_features(pixels).double(), atol=1e-3)
    learner.learn(small_stream[1], held_out=0)
    both = method.spaces(pixels)
    assert torch.equal(both[:, :1], first) and torch.equal(method.prototypes[:2, :1], prototypes)
    start, end = (extractor.named["down_weight"] for extractor in method.extractors)
    assert not torch.equal(start, end) and float((start - end).abs().mean()) > 0.01  # fresh ones, not a copy


def test_answers_by_hand(small_stream: Stream) -> None:
    learner, method = new(small_stream, 2)
    task = small_stream[1]
    pixels, y = learner.prepare(task.train), np.asarray(task.train.labels)
    z = method.spaces(pixels)
    for c in (0, 1):
        torch.testing.assert_close(method.prototypes[2 + c], z[y == c].mean(dim=0), rtol=1e-6, atol=1e-6)
    own = torch.tensor([0, 0, 1, 1])
    angles = torch.stack([F.cosine_similarity(z[:, s].unsqueeze(1), method.prototypes[:, s], dim=2) for s in (0, 1)])
    logits = angles[own, :, torch.arange(4)].T + 0.1 * angles[1 - own, :, torch.arange(4)].T
    expected = (torch.stack(method.scales).double().mean() * logits).log_softmax(dim=1)
    torch.testing.assert_close(method.log_probabilities(pixels), expected, rtol=1e-6, atol=1e-6)


def test_more_images_move_a_prototype_and_classes_can_go(small_stream: Stream) -> None:
    learner, method = new(small_stream, 3)
    second = small_stream[1]
    z = method.spaces(learner.prepare(second.train.select(np.arange(3))))
    expected = (16 * method.prototypes[2, :2] + z[:, :2].sum(dim=0)) / 19
    images = [second.train.load(i) for i in range(3)]
    learner.update(images, [second.classes[0]] * 3, held_out=0)
    torch.testing.assert_close(method.prototypes[2, :2], expected, rtol=1e-6, atol=1e-6)
    last = method.prototypes[4:, 2]
    for name in small_stream[0].classes:
        learner.remove(name)
    assert method.prototypes.shape[:2] == (4, 2)  # a space has gone with its task
    torch.testing.assert_close(method.prototypes[2:, 1], last)
    torch.testing.assert_close(method.prototypes[0, 0], expected[1], rtol=1e-6, atol=1e-6)
