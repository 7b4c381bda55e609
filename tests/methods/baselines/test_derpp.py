"""DER++: the loss by hand, and logits that stay as they were when an image was stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.engine import IGNORED, Event
from tpl.methods.derpp import DarkExperience, DERpp, DERppConfig
from tpl.stream import Stream

OPTIONS: dict[str, Any] = {"latent": 8, "batch_size": 16, "lr": 0.05, "memory": 14}


class Answers(SimpleNamespace):
    """A network whose logits are its images."""

    head_bias = torch.zeros(3)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return images


def test_the_loss_by_hand() -> None:
    """Two new images and two replayed ones, and a row of each that only fills up."""
    new = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 3.0], [9.0, 9.0, 9.0]])
    replayed = torch.tensor([[1.0, 2.0, 0.5], [0.0, 1.0, 2.0], [7.0, 7.0, 7.0]])
    stored = torch.tensor([[4.0, 4.0], [0.5, 1.0], [3.0, 0.0]])  # of three rows, at a time of two classes
    objective = DarkExperience(
        cast(Any, Answers()),
        classes=torch.tensor([1, 0, 1]),
        logits=stored,
        known=torch.tensor([1, 2, 2]),  # the first row came when one class was known
        config=DERppConfig(alpha=0.3, beta=0.7),
    )
    labels = torch.tensor([[2, 1, IGNORED, 2, 0, IGNORED]])  # classes; then rows 2 and 0 of the memory
    none = torch.zeros(())
    loss = objective.losses(torch.cat([new, replayed]), labels, none, none)

    def surprise(logits: torch.Tensor, label: int) -> float:
        return -float(logits.log_softmax(0)[label])

    fresh = (surprise(new[0], 2) + surprise(new[1], 1)) / 2
    again = (surprise(replayed[0], 1) + surprise(replayed[1], 1)) / 2
    apart = (((1 - 3) ** 2 + (2 - 0) ** 2) / 2 + (0 - 4) ** 2 / 1) / 2
    assert loss.tolist() == pytest.approx([fresh + 0.3 * apart + 0.7 * again])


def test_logits_are_those_at_insertion_and_do_not_follow_the_network(small_stream: Stream) -> None:
    learner = Learner(
        "derpp", SMALL_VIT, device="cpu", epochs=1, **OPTIONS
    )  # one epoch: all logits are noted at its end
    method = learner.method
    assert isinstance(method, DERpp)
    learner.learn(small_stream[0])
    logits_and_keys = 14 * (2 * 4 + 8)
    assert method.memory_bytes == method.memory.bytes_used + logits_and_keys
    pixels, stored, keys = method.memory.pixels(method.preprocess), method.stored_logits, method.memory.keys
    torch.testing.assert_close(stored, method.logits(pixels))
    assert bool(stored.std() > 0)

    learner.learn(small_stream[1])
    kept = torch.isin(keys, method.memory.keys)  # rows of the first task that were not replaced
    assert 0 < int(kept.sum()) < 14
    old = method.stored_logits[: int(kept.sum())]
    assert torch.equal(old[:, :2], stored[kept])  # not a bit has moved,
    assert not bool(old[:, 2:].any())  # there were no other classes then,
    assert float((old[:, :2] - method.logits(pixels[kept])[:, :2]).abs().max()) > 0.01  # and the network has moved on
    now = method.logits(method.memory.pixels(method.preprocess))
    torch.testing.assert_close(method.stored_logits[len(old) :], now[len(old) :])  # the new ones are the network's


def test_logits_come_from_all_over_the_training(small_stream: Stream) -> None:
    """Every stored image has the logits of one of the epochs, and each epoch has some."""
    learner = Learner("derpp", SMALL_VIT, device="cpu", epochs=3, **OPTIONS)
    method = learner.method
    assert isinstance(method, DERpp)
    seen: list[torch.Tensor] = []
    images = method.preprocess.batch(small_stream[0].train)

    def callback(event: Event) -> None:
        if event.kind == "epoch":
            seen.append(method.logits(images))

    learner.learn(small_stream[0], callback=callback)
    stored = method.memory.pixels(method.preprocess)
    which = torch.stack([(images == image).flatten(1).all(dim=1).nonzero()[0, 0] for image in stored])
    gaps = torch.stack([(logits[which] - method.stored_logits).abs().amax(dim=1) for logits in seen])  # [epochs, rows]
    assert float(gaps.amin(dim=0).max()) < 1e-4
    assert set(gaps.argmin(dim=0).tolist()) == {0, 1, 2}


def test_a_task_that_fails_leaves_images_keys_and_logits_as_they_were(small_stream: Stream) -> None:
    learner = Learner("derpp", SMALL_VIT, device="cpu", epochs=1, **OPTIONS)
    method = learner.method
    assert isinstance(method, DERpp)
    learner.learn(small_stream[0])
    before = method.memory.keys.clone(), method.stored_logits.clone(), [list(e) for e in method.memory.exemplars]

    def fail(event: Event) -> None:
        if event.kind == "trained":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learner.learn(small_stream[1], callback=fail)
    assert torch.equal(method.memory.keys, before[0])
    assert torch.equal(method.stored_logits, before[1])
    assert method.memory.exemplars == before[2]
    learner.remove(small_stream[0].classes[0])
    assert method.stored_logits.shape == (len(method.memory), 1)
