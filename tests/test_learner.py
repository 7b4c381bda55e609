"""The learner as a program uses it: any kind of picture, odd tasks, and errors that say what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from small_encoder import SMALL_VIT
from tpl import ArrayImages, Learner, Stream, Task, TplError
from tpl.nets import EncoderError
from tpl.nets.compact import WEIGHTS
from tpl.store import ModelStore
from tpl.stream import UnreadableImage

OPTIONS: dict[str, Any] = {"encoder": SMALL_VIT, "epochs": 1, "latent": 8, "batch_size": 16, "memory": 10}


def new_learner(**changes: Any) -> Learner:
    return Learner("tpl", device="cpu", **OPTIONS | changes)


@pytest.fixture(scope="module")
def learner(small_stream: Stream) -> Learner:
    return new_learner().learn(small_stream[0]).learn(small_stream[1])


@pytest.fixture(scope="module")
def saved(learner: Learner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model"
    learner.save(path)
    return path


def picture() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A grey picture that every mode can hold without loss, not in the encoder's size."""
    return np.random.default_rng(3).integers(0, 256, (48, 40)).astype(np.uint8)


def test_the_same_picture_gets_the_same_answer_however_it_is_given(learner: Learner, tmp_path: Path) -> None:
    grey = picture()
    image = Image.fromarray(grey)
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    files = [tmp_path / name for name in ("grey.png", "deep.png", "palette.gif", "colour.tif")]
    for file, content in zip(files, (image, deep, image.convert("P"), image.convert("RGB")), strict=True):
        content.save(file)
    modes = [image, deep, *(image.convert(mode) for mode in ("RGB", "RGBA", "P", "LA"))]
    assert {i.mode for i in modes} == {"L", "I;16", "RGB", "RGBA", "P", "LA"}
    arrays = [grey, np.stack([grey] * 3, axis=2), grey.astype(np.uint16) * 257]
    given = [*modes, *arrays, *files, str(files[0])]
    log_p = learner.log_probabilities(given)
    assert log_p.shape == (len(given), 4)
    assert log_p.dtype == torch.float64 and torch.isfinite(log_p).all()
    assert torch.equal(learner.prepare(given), learner.prepare([image]).expand(len(given), -1, -1, -1))
    torch.testing.assert_close(log_p, learner.log_probabilities([image]).expand_as(log_p), rtol=1e-3, atol=1e-3)
    assert learner.predict(given) == learner.predict([image]) * len(given)


def test_an_image_set_and_its_images_get_the_same_answers(learner: Learner, small_stream: Stream) -> None:
    images = small_stream[1].test
    assert images is not None
    one_by_one = (images.load(i) for i in range(len(images)))  # any iterable will do
    assert torch.equal(learner.log_probabilities(images), learner.log_probabilities(one_by_one))


def test_probabilities_sum_to_one_and_predictions_are_the_largest(learner: Learner, small_stream: Stream) -> None:
    images = small_stream[0].test
    assert images is not None
    p = learner.predict_proba(images)
    np.testing.assert_allclose(p.sum(axis=1), 1.0)
    assert learner.predict(images) == [learner.classes_[i] for i in p.argmax(axis=1)]


def test_no_images_give_no_answers(learner: Learner) -> None:
    assert learner.predict([]) == []
    assert learner.predict_proba([]).shape == (0, 4)


def test_asking_before_learning_says_what_to_do() -> None:
    with pytest.raises(TplError, match=r"call learn\(task\) first"):
        new_learner().predict([picture()])


def test_what_is_no_picture_is_named(learner: Learner, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    with pytest.raises(UnreadableImage, match=r"broken\.png"):
        learner.predict([broken])
    with pytest.raises(TplError, match=r"absent\.png"):
        learner.predict([tmp_path / "absent.png"])
    with pytest.raises(UnreadableImage, match=r"image 1 is no picture \(float64 of shape \[8, 8, 3\]\)"):
        learner.predict([picture(), np.zeros((8, 8, 3))])


def test_a_class_is_learned_only_once(learner: Learner, small_stream: Stream) -> None:
    again = Task("again", ("class 1", "class 0"), small_stream[0].train)
    with pytest.raises(TplError, match="Already learned: class 1, class 0"):
        learner.learn(again)
    assert learner.classes_ == [f"class {c}" for c in range(4)]


def test_a_class_without_images_is_refused(small_stream: Stream) -> None:
    learner = new_learner()
    with pytest.raises(TplError, match="No training images for ghost"):
        learner.learn(Task("task", ("class 0", "class 1", "ghost"), small_stream[0].train))
    assert learner.classes_ == []


def test_a_model_is_not_loaded_on_other_encoder_weights(saved: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "model"))
    header = ModelStore(copy).header()  # without the seal
    header["encoder"]["fingerprint"] = "0" * 64
    (copy / "model.json").write_text(json.dumps(header), encoding="utf-8")
    with pytest.raises(EncoderError, match=rf"other weights of '{SMALL_VIT}'.*--weights"):
        Learner.load(copy, device="cpu")


def test_a_model_remembers_the_file_its_encoder_came_from(tmp_path: Path, small_stream: Stream) -> None:
    file, moved = tmp_path / "mine.safetensors", tmp_path / "moved.safetensors"
    shutil.copy(str(WEIGHTS), file)
    few = Task("few", small_stream[0].classes, small_stream[0].train.select([0, 1, 24, 25]))
    learner = new_learner(encoder="compact", weights=file).learn(few)
    learner.save(tmp_path / "model")
    images = few.train
    expected = learner.log_probabilities(images)
    assert torch.equal(Learner.load(tmp_path / "model", device="cpu").log_probabilities(images), expected)
    file.rename(moved)
    with pytest.raises(EncoderError, match="There is no weight file"):
        Learner.load(tmp_path / "model", device="cpu")
    found = Learner.load(tmp_path / "model", weights=moved, device="cpu")
    assert torch.equal(found.log_probabilities(images), expected)


@pytest.mark.parametrize(("classes", "per_class", "memory"), [(2, 5, 10), (2, 1, 10), (1, 6, 10), (1, 1, 1), (1, 1, 0)])
def test_the_smallest_tasks_are_learned_and_answered(
    classes: int, per_class: int, memory: int, small_stream: Stream, tmp_path: Path
) -> None:
    """One image a class, one class a task, both at once: the answers are finite and make probabilities."""
    learner = new_learner(memory=memory)
    for task in small_stream:
        rows = [24 * c + i for c in range(classes) for i in range(per_class)]
        learner.learn(Task(task.name, task.classes[:classes], task.train.select(rows)))
    images = small_stream[1].test
    assert images is not None
    log_p = learner.log_probabilities(images)
    assert log_p.shape == (len(images), 3 * classes)
    assert torch.isfinite(log_p).all()
    torch.testing.assert_close(log_p.exp().sum(dim=1), torch.ones(len(images), dtype=torch.float64))
    assert set(learner.predict(images)) <= set(learner.classes_)
    learner.save(tmp_path / "model")
    assert torch.equal(Learner.load(tmp_path / "model", device="cpu").log_probabilities(images), log_p)


def test_uniform_pictures_give_finite_answers() -> None:
    """Features without any spread within a class."""
    pixels = np.repeat(np.array([0, 255], dtype=np.uint8), 6)[:, None, None] * np.ones((1, 32, 32), dtype=np.uint8)
    task = Task("flat", ("black", "white"), ArrayImages(pixels, np.repeat([0, 1], 6)))
    learner = new_learner().learn(task)
    assert torch.isfinite(learner.log_probabilities(task.train)).all()
