"""iCaRL: its loss, the means of its exemplars and its answers, each by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rehearsing import LABELS, Says, loss_of, move_head, some_logits, spy, tiny_learner, tiny_task
from torch import Tensor

from tpl.errors import TplError
from tpl.methods.icarl import BinaryDistillation, ICaRL


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


@pytest.mark.parametrize("old", [0, 3])
def test_old_outputs_learn_from_the_old_network_and_new_ones_from_labels(old: int) -> None:
    logits = some_logits()
    teacher = Says(old, -0.5) if old else None
    objective = BinaryDistillation(Says(5), teacher)  # type: ignore[arg-type]
    total = 0.0
    for row, label in zip(logits.tolist(), LABELS.tolist(), strict=True):
        for c, value in enumerate(row):
            target = sigmoid(-0.5 * value) if c < old else float(c == label)
            if label >= 0:
                total -= target * np.log(sigmoid(value)) + (1 - target) * np.log(1 - sigmoid(value))
    assert loss_of(objective, logits, LABELS) == pytest.approx(total / 4, rel=1e-5)


@pytest.fixture
def method(monkeypatch: pytest.MonkeyPatch) -> ICaRL:
    """Two tasks, trained as far as a fake goes; features are six pixels, so that all can be checked by hand."""
    method = tiny_learner("icarl", memory=12).method
    assert isinstance(method, ICaRL)
    spy(method, monkeypatch, move_head)
    monkeypatch.setattr(method, "features", six_pixels)
    for number in range(2):
        method.learn(tiny_task(number, per_class=8))
    return method


def six_pixels(pixels: Tensor) -> Tensor:
    return pixels[:, :2, 3:6, 7].flatten(1).float() - 128


def test_the_answer_is_the_nearest_mean_of_exemplars(method: ICaRL) -> None:
    def unit(vector: np.ndarray) -> np.ndarray:
        return np.asarray(vector / np.sqrt((vector**2).sum()))

    seen = six_pixels(method.memory.pixels(method.preprocess)).double().numpy()
    labels = method.memory.labels.numpy()
    assert labels.tolist() == [c for c in range(4) for _ in range(3)]
    means = [unit(np.mean([unit(z) for z in seen[labels == c]], axis=0)) for c in range(4)]
    pixels = method.preprocess.batch(tiny_task(9).train)
    answers = method.log_probabilities(pixels).exp().numpy()
    for z, answer in zip(six_pixels(pixels).double().numpy(), answers, strict=True):
        distances = np.array([((unit(z) - mean) ** 2).sum() for mean in means])
        np.testing.assert_allclose(answer, np.exp(-distances) / np.exp(-distances).sum(), rtol=1e-6)
        assert answer.argmax() == distances.argmin()


def test_the_exemplars_are_those_of_herding(method: ICaRL) -> None:
    task = tiny_task(1, per_class=8)
    pixels = method.preprocess.batch(task.train)[1::2]  # class 3 of all
    z = six_pixels(pixels).double().numpy()
    z /= np.sqrt((z**2).sum(axis=1, keepdims=True))
    chosen: list[int] = []
    for _ in range(3):
        gaps = {i: np.abs(z.mean(axis=0) - z[[*chosen, i]].mean(axis=0)) for i in range(8) if i not in chosen}
        chosen.append(min(gaps, key=lambda i: float((gaps[i] ** 2).sum())))
    assert torch.equal(method.memory.pixels(method.preprocess)[9:], pixels[chosen])


def test_a_removed_class_is_never_answered(method: ICaRL) -> None:
    pixels = method.preprocess.batch(tiny_task(9).train)
    before = method.log_probabilities(pixels)
    method.remove("0-1")
    left = before[:, [0, 2, 3]].log_softmax(dim=1)
    torch.testing.assert_close(method.log_probabilities(pixels), left)


def test_a_memory_too_small_for_an_answer_is_explained() -> None:
    with pytest.raises(TplError, match="2 classes do not fit into a memory of 1"):
        tiny_learner("icarl", memory=1).learn(tiny_task(0))
