"""The learner for people with folders: what it takes, what it answers, what it notes."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
import zipfile
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import tpl
from handwriting import digits
from small_encoder import SMALL_VIT
from tpl import Answer, Learner, Stream, Task, TaskRecord, TplError
from tpl.store import SCHEMA, ModelStore

OPTIONS: dict[str, Any] = {"epochs": 1, "latent": 8, "batch_size": 16, "memory": 12}


def new_learner(method: str = "tpl", **changes: Any) -> Learner:
    options = {k: v for k, v in OPTIONS.items() if method == "tpl" or k != "memory"}
    return Learner(method, SMALL_VIT, device="cpu", **options | changes)


def write_folder(root: Path, classes: dict[str, int], per_class: int) -> Path:
    """Class folders of PNG files: name and digit."""
    for name, kind in classes.items():
        (root / name).mkdir(parents=True)
        images = digits([kind], per_class)
        for i in range(per_class):
            images.load(i).save(root / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def stream() -> Stream:
    """Two tasks of two digits, 40 images of each to learn and 20 to test with."""
    tasks = []
    for t, pair in enumerate([(0, 1), (2, 3)]):
        names = tuple(f"class {c}" for c in pair)
        tasks.append(Task(f"task {t}", names, digits(pair, 40), digits(pair, 20, start=60)))
    return Stream(tasks)


@pytest.fixture(scope="module")
def learner(stream: Stream) -> Learner:
    """Both tasks learned, with 40 images held out of each."""
    learner = new_learner(lr=0.05).learn(stream[0], held_out=0.5)
    return learner.learn(stream[1], held_out=0.5, name="second")


def test_folder_zip_list_and_task_give_the_same_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "pets", {"cat": 0, "dog": 1}, 6)
    archive = tmp_path / "pets.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        for file in sorted(folder.rglob("*.png")):
            zipped.write(file, file.relative_to(tmp_path))
    files = sorted(folder.rglob("*.png"))
    names = [file.parent.name for file in files]
    learners = [
        new_learner().learn(folder),
        new_learner().learn(str(archive)),
        new_learner().learn(files, names),
        new_learner().learn([Image.open(f) for f in files], np.array(names)),  # type: ignore[arg-type]
    ]
    probe = digits([0, 1], 3, start=100)
    expected = learners[0].log_probabilities(probe)
    for other in learners:
        assert other.classes_ == ["cat", "dog"]
        assert torch.equal(other.log_probabilities(probe), expected)
        assert (other.tasks_[0].images, other.tasks_[0].held_out) == (10, 2)
    assert [x.tasks_[0].name for x in learners] == ["pets", "pets", "task 1", "task 1"]
    assert [x.tasks_[0].source for x in learners] == [str(folder), str(archive), "", ""]


def test_the_record_tells_how_a_task_was_learned(learner: Learner) -> None:
    first, second = learner.tasks_
    assert isinstance(first, TaskRecord)
    assert (first.name, second.name) == ("task 0", "second")
    assert first.classes == ("class 0", "class 1")
    assert (first.images, first.held_out) == (40, 40)
    assert first.accuracy is not None and 0 <= first.accuracy <= 1
    assert abs(datetime.fromisoformat(first.learned).timestamp() - time.time()) < 3600
    json.dumps([dataclasses.asdict(r) for r in learner.tasks_])


def test_accuracy_and_confusions_are_those_of_the_held_out_images(stream: Stream) -> None:
    """Against a count by hand: the held-out images are those of the split."""
    from tpl.stream import hold_out

    learner = new_learner(lr=1e-6).learn(stream[0], held_out=0.5)  # hardly trained: it errs
    _, held = hold_out(stream[0], 0.5, [0])
    truth = [stream[0].classes[i] for i in held.labels]
    guess = learner.predict(held)
    wrong = [(t, g) for t, g in zip(truth, guess, strict=True) if t != g]
    assert learner.tasks_[0].accuracy == pytest.approx(1 - len(wrong) / len(truth))
    assert learner.held_out_confusions() == sorted({(*w, wrong.count(w)) for w in wrong}, key=lambda c: -c[2])
    assert wrong


def test_answers_hold_together(learner: Learner, stream: Stream) -> None:
    images = stream[1].test
    assert images is not None
    p, by_task, unknown = learner.predict_proba(images), learner.task_proba(images), learner.unknown_score(images)
    assert by_task.shape == (len(images), 2)
    np.testing.assert_allclose(by_task[:, 0], p[:, :2].sum(axis=1))
    np.testing.assert_allclose(by_task.sum(axis=1), 1)
    answers = learner.answers(images, top=3)
    assert [a.name for a in answers] == learner.predict(images)
    for answer, row, u in zip(answers, p, unknown, strict=True):
        assert isinstance(answer, Answer)
        assert answer.probability == pytest.approx(row.max())
        assert answer.task == ("task 0" if answer.name in stream[0].classes else "second")
        assert answer.unknown == pytest.approx(u)
        assert answer.top[0] == (answer.name, answer.probability)
        assert [q for _, q in answer.top] == sorted((q for _, q in answer.top), reverse=True)
        assert len(answer.top) == 3
        assert (
            dict(answer.top).items()
            <= {c: pytest.approx(q) for c, q in zip(learner.classes_, row, strict=True)}.items()
        )
    assert learner.answers_of(learner.prepare(images), 3) == answers
    assert len(learner.answers([np.zeros((8, 8), np.uint8)], top=99)[0].top) == 4
    assert learner.answers([]) == []


def test_answers_come_in_bounded_pieces(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    images = digits([0, 3], 5, start=100)
    whole = learner.log_probabilities(images)
    sizes = []
    real = learner.prepare
    monkeypatch.setattr("tpl.learner.CHUNK", 4)
    monkeypatch.setattr(learner, "prepare", lambda part: sizes.append(len(part)) or real(part))
    torch.testing.assert_close(learner.log_probabilities(images), whole, rtol=1e-4, atol=1e-4)
    assert sizes == [4, 4, 2]


def test_known_images_are_rarely_rejected_and_noise_is(learner: Learner) -> None:
    assert learner.rejection_floor() == 1 / 41
    known = learner.answers(digits([0, 1, 2, 3], 60, start=100))
    assert np.mean([a.rejected(0.05) for a in known]) <= 0.05 + 0.05  # 40 held-out images have a chance of their own
    noise = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    unknown = learner.unknown_score(list(noise))
    assert ((unknown >= 0) & (unknown <= 1)).all()
    assert np.mean(unknown >= 0.95) > 0.9


def test_few_images_mean_that_nothing_can_be_rejected(stream: Stream) -> None:
    learner = new_learner().learn(Task("few", ("class 0", "class 1"), digits([0, 1], 4, start=100)))
    assert learner.tasks_[0].held_out == 0 and learner.tasks_[0].accuracy is None
    assert learner.rejection_floor() == 1.0
    noise = np.random.default_rng(0).integers(0, 256, (9, 32, 32, 3), dtype=np.uint8)
    assert learner.unknown_score(list(noise)).tolist() == [0.0] * 9


def test_methods_without_task_scores_say_so(stream: Stream) -> None:
    learner = new_learner("finetune").learn(stream[0])
    images = digits([0], 2, start=100)
    with pytest.raises(TplError, match="'finetune' has no unknown score; tpl, tpl-plus and closed-form have one"):
        learner.unknown_score(images)
    with pytest.raises(TplError, match="'finetune' cannot learn from more images"):
        learner.update(images, ["class 0"] * 2)
    answers = learner.answers(images)
    assert [(a.unknown, a.rejected(0.99)) for a in answers] == [(None, False)] * 2
    assert learner.facts()["smallest_reject"] is None
    assert learner.rejection_floor() == 1.0 and learner.capacity() is None
    assert learner.tasks_[0].accuracy is not None


def test_joint_training_keeps_one_record_of_all(stream: Stream) -> None:
    learner = new_learner("joint").learn(stream[0])
    learner.learn(stream.union(1))
    assert [r.classes for r in learner.tasks_] == [stream.classes[:4]]
    assert learner.task_proba(digits([0], 2, start=100)).tolist() == pytest.approx(np.ones((2, 1)))


def test_save_and_load_keep_all_of_it(learner: Learner, stream: Stream, tmp_path: Path) -> None:
    learner.save(tmp_path / "model")
    again = tpl.load(tmp_path / "model", device="cpu")
    images = stream[0].test
    assert images is not None
    assert again.answers(images) == learner.answers(images)
    assert again.tasks_ == learner.tasks_
    assert again.held_out_confusions() == learner.held_out_confusions()
    assert again.capacity() == learner.capacity()
    assert again.rejection_floor() == learner.rejection_floor()


def test_a_model_of_schema_1_is_read(learner: Learner, stream: Stream, tmp_path: Path) -> None:
    """As the first version wrote it: no checksums, nothing held out, no counts, no more of a task than its classes."""
    store = ModelStore(tmp_path / "model")
    learner.save(store.path)
    header, state, memory = store.read()
    for own in state.tasks:
        for key in ("held.features", "held.labels", "score.counts_", "score.pooled_", "score.scatter_"):
            del own[key]
    store.commit(header, state, memory)
    written = store.header()
    early = {k: v for k, v in written.items() if k not in ("files", "removed_tasks")} | {"schema": 1}
    early["tasks"] = [{"classes": t["classes"], "file": t["file"]} for t in written["tasks"]]
    store.header_file.write_text(json.dumps(early), encoding="utf-8")
    again = tpl.load(store.path, device="cpu")
    images = stream[0].test
    assert images is not None
    assert torch.equal(again.log_probabilities(images), learner.log_probabilities(images))
    assert [r.name for r in again.tasks_] == ["task 1", "task 2"] and again.tasks_[0].accuracy is None
    assert again.rejection_floor() == 1.0
    with pytest.raises(TplError, match="earlier version"):
        again.update(images, ["class 0"] * len(images))
    again.rename("class 0", "zero").remove("class 1").save(store.path)
    assert store.header()["schema"] == SCHEMA
    assert tpl.load(store.path, device="cpu").classes_ == ["zero", "class 2", "class 3"]


def test_a_task_without_new_classes_and_an_update_with_some_are_refused(learner: Learner) -> None:
    images = digits([1, 9], 2, start=100)
    names = ["class 1", "class 1", "new", "new"]
    with pytest.raises(TplError, match=r"Already learned: class 1\. .*use update"):
        learner.learn(images, ["class 1"] * 4)
    with pytest.raises(TplError, match=r"Not known yet: new\. .*learn new classes"):
        learner.update(images, names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"images": [np.zeros((8, 8), np.uint8)]}, "need labels"),
        ({"images": [np.zeros((8, 8), np.uint8)], "labels": ["a", "b"]}, "1 images, but 2 labels"),
        ({"images": [np.zeros((8, 8), np.uint8)], "labels": [" "]}, "label is empty"),
        ({"images": [], "labels": []}, "no images|at least one class"),
        ({"images": "nowhere", "labels": ["a"]}, "come with a task"),
        ({"images": "nowhere"}, "no folder or zip archive nowhere"),
        ({"images": [np.zeros((8, 8), np.uint8)], "labels": ["a"], "held_out": 1.0}, "below 1"),
        ({"images": [np.zeros((8, 8), np.uint8)], "labels": ["a"], "name": "second"}, "task 'second' already"),
    ],
)
def test_what_cannot_be_learned_is_explained(learner: Learner, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TplError, match=message):
        learner.learn(**arguments)
    assert len(learner.classes_) == 4


def test_a_single_path_is_no_list_of_images(learner: Learner) -> None:
    with pytest.raises(TplError, match="Give a list of images"):
        learner.predict("photo.jpg")


def test_an_unreadable_held_out_image_is_told_before_the_training(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "pets", {"cat": 0}, 6)
    for file in folder.rglob("*.png"):
        file.write_bytes(b"no picture")
    events: list[Any] = []
    learner = new_learner()
    with pytest.raises(TplError, match=r"cat.*\.png"):
        learner.learn(folder, callback=events.append)
    assert events == [] and learner.classes_ == [] and learner.tasks_ == []


def test_two_tasks_from_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    learner = new_learner(memory=0)
    for place, name, kind in (("a", "cat", 0), ("b", "dog", 1)):
        learner.learn(write_folder(tmp_path / place / "photos", {name: kind}, 2))
    assert [r.name for r in learner.tasks_] == ["photos", "photos 2"]


def test_a_model_changed_by_someone_else_is_not_overwritten(learner: Learner, tmp_path: Path) -> None:
    learner.save(tmp_path / "model")
    mine, theirs = (tpl.load(tmp_path / "model", device="cpu") for _ in range(2))
    theirs.rename("class 0", "theirs").save(tmp_path / "model")
    with pytest.raises(TplError, match="changed by another process meanwhile"):
        mine.rename("class 0", "mine").save(tmp_path / "model")
    assert "theirs" in tpl.load(tmp_path / "model", device="cpu").classes_
    theirs.rename("theirs", "again").save(tmp_path / "model")  # one's own saves are no surprise
    mine.save(tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "model")
    mine.save(tmp_path / "model")
    assert "mine" in tpl.load(tmp_path / "model", device="cpu").classes_


def test_changing_a_model_in_place(learner: Learner, tmp_path: Path) -> None:
    learner.save(tmp_path / "model")
    with Learner.changing(tmp_path / "model", device="cpu") as mine:
        mine.rename("class 0", "zero")
    assert tpl.load(tmp_path / "model", device="cpu").classes_[0] == "zero"
    with pytest.raises(TplError, match="no class 'ghost'"), Learner.changing(tmp_path / "model", device="cpu") as mine:
        mine.rename("zero", "nought").remove("ghost")
    assert tpl.load(tmp_path / "model", device="cpu").classes_[0] == "zero"
    with pytest.raises(TplError, match="holds no model"), Learner.changing(tmp_path / "absent"):
        pytest.fail("there is nothing to change")
    assert not (tmp_path / "absent").exists()
