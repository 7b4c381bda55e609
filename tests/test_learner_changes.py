"""Classes that grow, go, or get another name; everything else stays, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import tpl
from handwriting import digits
from small_encoder import SMALL_VIT
from tensors import differences, tensors_of
from tpl import ArrayImages, Learner, Task, TplError
from tpl.methods.tpl import TPL
from tpl.store import State

OPTIONS: dict[str, Any] = {"epochs": 4, "latent": 8, "batch_size": 16, "memory": 20, "lr": 0.05}
TASKS = (("zero", "one"), ("two", "three"), ("four",))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks of two, two and one class; 4 exemplars a class, 5 images of each held out."""
    learner = Learner("tpl", SMALL_VIT, device="cpu", **OPTIONS)
    for t, names in enumerate(TASKS):
        learner.learn(Task(f"task {t}", names, digits(range(2 * t, 2 * t + len(names)), 20)), held_out=0.25)
    place = tmp_path_factory.mktemp("changes") / "model"
    learner.save(place)
    return place


@pytest.fixture
def learner(saved: Path) -> Learner:
    return tpl.load(saved, device="cpu")


def method_of(learner: Learner) -> TPL:
    assert isinstance(learner.method, TPL)
    return learner.method


def state_of(learner: Learner) -> State:
    state = learner.method.state()
    copies = [{k: v.clone() for k, v in part.items()} for part in (state.shared, *state.tasks)]
    return State(copies[0], copies[1:])


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], *prefixes: str) -> bool:
    keys = [k for k in a if k.startswith(prefixes or ("",))]
    assert keys
    return all(torch.equal(a[k], b[k]) for k in keys)


PROBE = digits([0, 1, 2, 3, 4], 6, start=120)


# Updates


def test_an_update_moves_the_class_and_nothing_else(learner: Learner) -> None:
    before, method = state_of(learner), method_of(learner)
    images = digits([3], 30, start=40)
    learner.update(images, ["three"] * 30, held_out=0)
    after = state_of(learner)
    assert same(before.shared, after.shared, "adapters.")
    assert same(before.tasks[0], after.tasks[0]) and same(before.tasks[2], after.tasks[2])
    assert same(before.tasks[1], after.tasks[1], "embedding", "norms", "head_", "held.")
    # The mean by hand: 15 images before, 30 now.
    z = method.bank.outputs(learner.prepare(images), 1).features.double()
    means = [state.tasks[1]["score.means_"] for state in (before, after)]
    torch.testing.assert_close(means[1][1], (15 * means[0][1] + z.sum(dim=0)) / 45)
    assert torch.equal(means[1][0], means[0][0])
    assert not torch.equal(after.tasks[1]["score.whitening_"], before.tasks[1]["score.whitening_"])
    assert learner.tasks_[1].images == 60 and learner.tasks_[0].images == 30


def test_an_update_redraws_exemplars_and_what_is_derived_from_them(learner: Learner) -> None:
    method = method_of(learner)
    before = [list(images) for images in method.memory.exemplars]
    learner.update(digits([3], 60, start=40), ["three"] * 60)
    after = method.memory.exemplars
    assert [len(images) for images in after] == [4] * 5
    assert after[:3] == before[:3] and after[4] == before[4]
    assert len(set(after[3]) - set(before[3])) > 0
    pixels = method.memory.pixels(method.preprocess)
    for t, seen in enumerate(method.memory_outputs_):
        for kept, fresh in zip(seen, method.bank.outputs(pixels, t), strict=True):
            torch.testing.assert_close(kept, fresh, rtol=1e-4, atol=1e-4)
    assert method.scores_[0].others.bank_.shape[0] == 12
    fitted = method.calibration_
    method._use_memory(method.task_classes_, calibrate=True)
    assert fitted is not None and torch.equal(fitted, method.calibration_)  # type: ignore[arg-type]


def test_an_update_extends_what_is_held_out(learner: Learner) -> None:
    method, floor = method_of(learner), learner.rejection_floor()
    assert floor == 1 / 6  # the task of one class
    learner.update(digits([4, 0], 20, start=40), ["four"] * 20 + ["zero"] * 20, held_out=0.25)
    assert [r.held_out for r in learner.tasks_] == [15, 10, 10]
    assert learner.rejection_floor() == 1 / 11
    assert method.held_[0].labels.bincount().tolist() == [10, 5]
    scores = method.held_out_scores(0)
    assert len(scores) == 15 and bool((scores.diff() >= 0).all())


def test_an_updated_model_is_saved_and_answers_as_before(learner: Learner, tmp_path: Path) -> None:
    learner.update(digits([1, 2], 12, start=40), ["one"] * 12 + ["two"] * 12)
    learner.save(tmp_path / "model")
    again = tpl.load(tmp_path / "model", device="cpu")
    assert again.answers(PROBE) == learner.answers(PROBE)
    assert differences(tensors_of(again.method), tensors_of(learner.method)) == []
    assert again.tasks_ == learner.tasks_


def test_an_update_helps_where_the_class_has_changed(learner: Learner) -> None:
    """White on black becomes black on white: after the update such images are less strange."""

    def negative(start: int) -> ArrayImages:
        images = digits([3], 30, start=start)
        return ArrayImages(np.stack([255 - np.asarray(images.load(i)) for i in range(30)]), np.zeros(30, np.int64))

    new, method = negative(80), method_of(learner)
    z = method.bank.outputs(learner.prepare(new), 1).features
    before = learner.unknown_score(new).mean(), method.scores_[1].centres.distances(z)[:, 1].mean()
    learner.update(negative(40), ["three"] * 30, held_out=0.5)
    assert learner.unknown_score(new).mean() < before[0] - 0.05
    assert method.scores_[1].centres.distances(z)[:, 1].mean() < before[1] / 2


def test_a_failed_update_changes_nothing(learner: Learner, tmp_path: Path) -> None:
    before, records = state_of(learner), learner.tasks_
    method = method_of(learner)
    exemplars = [list(images) for images in method.memory.exemplars]

    class Vanishing(ArrayImages):
        """Can be read once; when the exemplars are drawn, it has gone."""

        reads = 0

        def load(self, index: int) -> Image.Image:
            self.reads += 1
            if self.reads > 4:
                raise TplError("gone")
            return super().load(index)

    images = Vanishing(np.zeros((4, 8, 8), np.uint8), np.zeros(4, np.int64))
    with pytest.raises(TplError, match="gone"):
        learner.update(Task("update", ("three",), images))
    after = state_of(learner)
    assert same(before.shared, after.shared)
    assert all(same(a, b) for a, b in zip(before.tasks, after.tasks, strict=True))
    assert method.memory.exemplars == exemplars
    assert learner.tasks_ == records


def test_a_folder_may_have_empty_known_classes(learner: Learner) -> None:
    task = Task("more", ("one", "three"), ArrayImages(np.zeros((2, 8, 8), np.uint8), np.array([1, 1])))
    learner.update(task)
    assert [r.images for r in learner.tasks_] == [30, 32, 15]


# Removal


def traces(learner: Learner, name: str) -> list[bytes]:
    """Everything in a model that belongs to one class, as bytes."""
    method, number = method_of(learner), learner.classes_.index(name)
    t, own = method.place_of(name)
    model, held = method.bank.tasks[t], method.held_[t]
    rows = [model.head_weight[own], method.scores_[t].centres.means_[own]]
    rows += list(held.features[held.labels == own])
    mine = method.memory.labels == number
    rows += [row for seen in method.memory_outputs_ for row in seen.features[mine]]
    return [*method.memory.exemplars[number], *(row.detach().numpy().tobytes() for row in rows), name.encode()]


def content(path: Path) -> bytes:
    return b"".join(f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file())


@pytest.mark.parametrize("name", ["zero", "three", "four"])
def test_a_removed_class_is_gone_from_memory_and_disk(learner: Learner, name: str, tmp_path: Path) -> None:
    learner.save(tmp_path / "model")
    of_class = traces(learner, name)
    assert len(of_class) >= 4 + 1 + 1 + 5 + 3 * 4
    on_disk = content(tmp_path / "model")
    assert all(trace in on_disk for trace in of_class)
    learner.remove(name).save(tmp_path / "model")
    on_disk = content(tmp_path / "model")
    assert not [i for i, trace in enumerate(of_class) if trace in on_disk]
    state = learner.method.state()
    in_memory = b"".join(t.numpy().tobytes() for part in (state.shared, *state.tasks) for t in part.values())
    assert not any(trace in in_memory for trace in of_class)
    assert name not in learner.classes_ and all(name not in r.classes for r in learner.tasks_)
    assert name not in dict(learner.answers(PROBE, top=9)[0].top)
    again = tpl.load(tmp_path / "model", device="cpu")
    assert again.answers(PROBE) == learner.answers(PROBE)
    assert differences(tensors_of(again.method), tensors_of(learner.method)) == []


@pytest.mark.parametrize("name", ["zero", "three", "four"])
def test_answers_among_the_others_stay(learner: Learner, name: str) -> None:
    """The others' images get the name they got, where that was not the removed class."""
    others = [c for c in learner.classes_ if c != name]
    columns = [learner.classes_.index(c) for c in others]
    before = learner.predict_proba(PROBE)[:, columns]
    method = method_of(learner)
    pixels = learner.prepare(PROBE)
    outputs = [method.bank.outputs(pixels, t).features for t in range(3)]
    learner.remove(name)
    assert learner.classes_ == others
    after = learner.predict_proba(PROBE)
    clear = before.max(axis=1) > 0.6  # not torn between two classes, nor the removed one's
    assert clear.sum() >= 8
    assert (after.argmax(axis=1) == before.argmax(axis=1))[clear].mean() >= 0.95
    # Within a task, the odds between two remaining classes are untouched.
    for classes in method.task_classes_:
        if len(classes) == 2:
            a, b = (others.index(c) for c in classes)
            seen = before[:, [a, b]].min(axis=1) > 1e-200
            odds = [np.log(p[seen, a]) - np.log(p[seen, b]) for p in (before, after)]
            np.testing.assert_allclose(odds[1], odds[0], rtol=1e-5, atol=1e-5)  # one task fewer shares the passes
    kept = [0, 1, 2] if name != "four" else [0, 1]
    assert all(torch.equal(method.bank.outputs(pixels, i).features, outputs[t]) for i, t in enumerate(kept))


def test_the_last_class_takes_its_task_along_but_not_its_units(learner: Learner, tmp_path: Path) -> None:
    capacity, method = learner.capacity(), method_of(learner)
    learner.remove("two")
    assert [r.name for r in learner.tasks_] == ["task 0", "task 1", "task 2"]
    learner.remove("three")
    assert [r.name for r in learner.tasks_] == ["task 0", "task 2"]
    assert learner.task_proba(PROBE).shape == (len(PROBE), 2)
    assert learner.capacity() == capacity
    assert method.removed_tasks == 1
    learner.save(tmp_path / "model")
    again = tpl.load(tmp_path / "model", device="cpu")
    assert again.capacity() == capacity
    outputs = [method.bank.outputs(learner.prepare(PROBE), t).features for t in range(2)]
    for each in (learner, again):
        each.learn(digits([5, 6], 6), ["five"] * 6 + ["six"] * 6)
        for t, old in enumerate(outputs):  # the units of the task that went protect those who share them
            assert torch.equal(method_of(each).bank.outputs(each.prepare(PROBE), t).features, old)
    assert torch.equal(learner.log_probabilities(PROBE), again.log_probabilities(PROBE))
    assert [r.name for r in learner.tasks_] == ["task 0", "task 2", "task 3"]


def test_all_but_one_class_can_go(learner: Learner) -> None:
    for name in ("zero", "four", "two", "one"):
        learner.remove(name)
    assert learner.classes_ == ["three"]
    np.testing.assert_allclose(learner.predict_proba(PROBE), 1)
    with pytest.raises(TplError, match="only class"):
        learner.remove("three")
    assert learner.classes_ == ["three"]


def test_rows_for_replayed_classes_go_too(tmp_path: Path) -> None:
    learner = Learner("tpl", SMALL_VIT, device="cpu", **OPTIONS | {"others": "per_class"})
    for t, name in enumerate(("a", "b", "c")):
        learner.learn(digits([t], 4), [name] * 4)
    method = method_of(learner)
    row = method.bank.tasks[2].head_weight[1 + 1].clone()  # b, as the third task saw it replayed
    learner.remove("b")
    assert [len(m.head_bias) for m in method.bank.tasks] == [1, 2]
    assert not any(torch.equal(row, kept) for kept in method.bank.tasks[1].head_weight)
    learner.learn(digits([4], 4), ["d"] * 4).remove("c")
    assert [len(m.head_bias) for m in method.bank.tasks] == [1, 2]
    assert learner.log_probabilities(PROBE).isfinite().all()


def test_a_removed_class_can_be_learned_again(learner: Learner) -> None:
    learner.remove("four").learn(digits([4], 8), ["four"] * 8)
    assert learner.classes_[-1] == "four"
    assert learner.log_probabilities(PROBE).isfinite().all()


def test_other_methods_drop_the_row_of_the_head(tmp_path: Path) -> None:
    learner = Learner("finetune", SMALL_VIT, device="cpu", latent=4, epochs=1, batch_size=16)
    learner.learn(digits([0, 1, 2], 4), [c for c in "abc" for _ in range(4)])
    before = learner.predict_proba(PROBE)[:, [0, 2]]
    learner.remove("b")
    np.testing.assert_allclose(learner.predict_proba(PROBE), before / before.sum(axis=1, keepdims=True), rtol=1e-4)
    learner.save(tmp_path / "model")
    assert tpl.load(tmp_path / "model", device="cpu").classes_ == ["a", "c"]


# Names


def test_a_renamed_class_is_the_same_class(learner: Learner, tmp_path: Path) -> None:
    before = learner.log_probabilities(PROBE)
    learner.rename("three", "drei")
    assert torch.equal(learner.log_probabilities(PROBE), before)
    assert learner.classes_ == ["zero", "one", "two", "drei", "four"]
    assert learner.tasks_[1].classes == ("two", "drei") and learner.tasks_[1].images == 30
    learner.save(tmp_path / "model")
    again = tpl.load(tmp_path / "model", device="cpu")
    assert again.classes_ == learner.classes_ and again.tasks_ == learner.tasks_
    assert b'"three"' not in content(tmp_path / "model")
    learner.update(digits([3], 4, start=40), ["drei"] * 4)
    assert learner.tasks_[1].images == 34
    learner.rename("drei", "drei")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [("three", "one", "'one' already"), ("three", " ", "empty"), ("ghost", "three", "no class 'ghost'.*zero, one")],
)
def test_impossible_names_are_explained(learner: Learner, old: str, new: str, message: str) -> None:
    with pytest.raises(TplError, match=message):
        learner.rename(old, new)
    with pytest.raises(TplError, match="no class 'ghost'"):
        learner.remove("ghost")
    assert learner.classes_ == ["zero", "one", "two", "three", "four"]
