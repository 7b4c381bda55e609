"""Untidy streams: known and new classes together, and small chunks without task boundaries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from handwriting import digits
from small_encoder import SMALL_VIT
from tensors import differences, tensors_of
from tpl import Learner, Task, TplError
from tpl.store import WAITING, ModelStore
from tpl.stream import ImageSet

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


# A stream without task boundaries


def chunks(classes: list[int], count: int, size: int) -> Iterator[tuple[ImageSet, list[str]]]:
    """Images of some classes by turns, a few at a time."""
    images = digits(classes, count, start=0)
    order = np.arange(len(images)).reshape(len(classes), count).T.flatten()
    for rows in np.split(order, range(size, len(order), size)):
        part = images.select(rows)
        yield part, [str(classes[label]) for label in part.labels]


def test_a_stream_in_chunks_is_learned_task_by_task() -> None:
    learner = Learner("tpl-plus", SMALL_VIT, device="cpu", **OPTIONS)
    outcomes = []
    for images, labels in [*chunks([0, 1], 10, 4), *chunks([2, 3, 0], 10, 5)]:
        learner.observe(images, labels, task_images=8)
        if learner.outcome_:
            outcomes.append(learner.outcome_)
    assert outcomes[0] == {"0": "learned", "1": "learned"}
    assert any(each.get("2") == each.get("3") == "learned" for each in outcomes[1:])
    assert any(each.get("0") == "updated" for each in outcomes[1:])
    learner.learn_waiting()
    assert not learner.waiting_.images
    assert learner.classes_ == ["0", "1", "2", "3"]
    assert sum(record.images + record.held_out for record in learner.tasks_) == 50


def test_classes_that_wait_are_answered_without_training() -> None:
    learner = Learner("tpl", device="cpu", **OPTIONS | {"epochs": 1})
    learner.observe(digits([0, 1], 10), ["0"] * 10 + ["1"] * 10, task_images=20)
    assert not learner.classes_
    probe = digits([0, 1], 10, start=100)
    truth = ["0"] * 10 + ["1"] * 10
    assert np.mean([a == b for a, b in zip(learner.predict(probe), truth, strict=True)]) > 0.7
    learner.learn_waiting()
    learner.observe(digits([6], 10), ["6"] * 10, task_images=20)
    found = learner.predict(digits([0, 6], 10, start=100))
    assert np.mean([a == b for a, b in zip(found, ["0"] * 10 + ["6"] * 10, strict=True)]) > 0.7
    assert learner.classes_ == ["0", "1"]


def test_a_method_without_a_memory_answers_for_waiting_classes_by_its_own_means() -> None:
    learner = Learner("closed-form", device="cpu").learn(Task("first", ("0", "1"), digits([0, 1], 10)))
    learner.observe(digits([6], 10), ["6"] * 10, task_images=20)
    assert learner.classes_ == ["0", "1"]
    found = learner.predict(digits([0, 6], 10, start=100))
    assert np.mean([a == b for a, b in zip(found, ["0"] * 10 + ["6"] * 10, strict=True)]) > 0.7


def test_what_waits_survives_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = taught()
    learner.save(tmp_path / "model")
    learner.observe(digits([4, 5], 6), ["4"] * 6 + ["5"] * 6, task_images=8)
    again = Learner.load(tmp_path / "model", device="cpu")
    assert again.waiting_.images == learner.waiting_.images
    more = digits([4, 5], 6, start=50), ["4"] * 6 + ["5"] * 6

    with monkeypatch.context() as patched:  # killed before the model is saved: all still waits
        patched.setattr(Learner, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            again.observe(*more, task_images=8)
    third = Learner.load(tmp_path / "model", device="cpu")
    assert [len(third.waiting_.images[name]) for name in ("4", "5")] == [12, 12]
    assert third.classes_ == learner.classes_

    def killed(store: ModelStore, tensors: object) -> None:
        if "4" in ModelStore(tmp_path / "model").header()["tasks"][-1]["classes"]:
            raise KeyboardInterrupt
        write(store, tensors)  # type: ignore[arg-type]

    write = ModelStore.write_waiting
    with monkeypatch.context() as patched:  # killed after the commit, before the waiting images are removed
        patched.setattr(ModelStore, "write_waiting", killed)
        with pytest.raises(KeyboardInterrupt):
            third.observe([], [], task_images=8)
    fourth = Learner.load(tmp_path / "model", device="cpu")
    assert fourth.classes_[-2:] == ["4", "5"] and not fourth.waiting_.images


def test_damage_to_what_waits_is_noticed_and_removal_reaches_it(tmp_path: Path) -> None:
    learner = taught()
    learner.save(tmp_path / "model")
    learner.observe(digits([0, 4], 3), ["0"] * 3 + ["4"] * 3)
    learner.remove("0").save(tmp_path / "model")
    assert list(Learner.load(tmp_path / "model", device="cpu").waiting_.images) == ["4"]
    file = tmp_path / "model" / WAITING
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(TplError, match=r"waiting.*is damaged.*Delete it"):
        Learner.load(tmp_path / "model", device="cpu")


def test_a_learner_with_another_method_has_nothing_waiting() -> None:
    learner = Learner("tpl", SMALL_VIT, device="cpu", **OPTIONS)
    learner.observe(digits([0], 3), ["0"] * 3)
    other = learner.instead("closed-form")
    assert not other.waiting_.images and other.waiting_.method is other.method
    assert len(learner.waiting_.images["0"]) == 3
