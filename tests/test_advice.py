"""Advice on images: every kind of mistake that is put into a folder is found, and good folders are left alone."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.linear_model import Ridge

from commands import ask, call, refusal
from pictures import photos
from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.advice.check import Reference, _copies, interval
from tpl.advice.curve import outlook
from tpl.advice.features import FeatureReader, groups_of
from tpl.advice.files import equal_pictures, names_alike
from tpl.advice.labels import _ridge, leave_one_out
from tpl.advice.suggest import most_useful, uncertainty
from tpl.stream import batches_of, labelled_images

ENCODER = ["--encoder", SMALL_VIT, "--device", "cpu"]


def clouds(classes: int, each: int, apart: float, seed: int = 0, dim: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of unit length around one centre a class, and their labels."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(each)
    centres = apart * F.normalize(torch.randn(classes, dim, generator=draw, dtype=torch.float64), dim=1)
    z = centres[labels] + torch.randn(len(labels), dim, generator=draw, dtype=torch.float64) / dim**0.5
    return F.normalize(z, dim=1), labels


# Labels


def test_leave_one_out_in_closed_form_is_leaving_one_out() -> None:
    z, labels = clouds(3, 6, 1.0)
    target = F.one_hot(labels, 3).double()
    weights = torch.rand(18, dtype=torch.float64) + 0.5
    found = _ridge(z, target, weights, 0.3)
    x = torch.cat([z, torch.ones(18, 1, dtype=torch.float64)], dim=1)
    gram = (x.T * weights) @ x
    penalty = torch.full((17,), 0.3 * float(gram.diagonal()[:-1].mean()), dtype=torch.float64)
    penalty[-1] = 1e-6 * float(gram[-1, -1])
    for i in (0, 7, 17):
        rest = torch.arange(18) != i
        scaled = x[rest] * weights[rest].sqrt().unsqueeze(1) / penalty.sqrt()
        model = Ridge(alpha=1.0, fit_intercept=False).fit(scaled, target[rest] * weights[rest].sqrt().unsqueeze(1))
        expected = model.predict((x[i] / penalty.sqrt()).unsqueeze(0))[0]
        np.testing.assert_allclose(found[i].numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("each", [10, 30])
def test_wrong_labels_are_found_and_right_ones_left_alone(each: int) -> None:
    z, labels = clouds(4, each, 3.0)
    assert leave_one_out(z, labels, 4).suspects() == []
    wrong = labels.clone()
    bad = {1: 2, each + 2: 0, 3 * each: 1}
    for row, label in bad.items():
        wrong[row] = label
    found = leave_one_out(z, wrong, 4).suspects()
    assert {row for row, _, _ in found} == set(bad)
    assert all(likely == int(labels[row]) and p > 0.6 for row, likely, p in found)


def test_classes_without_images_change_nothing() -> None:
    z, labels = clouds(3, 8, 0.5)
    alone, beside = leave_one_out(z, labels, 3), leave_one_out(z, 2 * labels, 9)
    assert torch.equal(beside.probabilities[:, [0, 2, 4]], alone.probabilities)
    assert torch.equal(beside.votes[:, [0, 2, 4]], alone.votes)
    assert float(beside.probabilities[:, [1, 3, 5, 6, 7, 8]].abs().sum()) == 0
    assert torch.equal(beside.predicted, 2 * alone.predicted)


def test_classes_that_look_alike_are_a_pair() -> None:
    z, labels = clouds(4, 20, 3.0)
    z[labels == 3] = z[labels == 1].flip(0) + 1e-3
    (pair,) = leave_one_out(F.normalize(z, dim=1), labels, 4).alike()
    assert pair[:2] == (1, 3) and pair[3] == 40 and pair[2] >= 4


def test_an_image_alone_in_its_class_breaks_nothing() -> None:
    z, labels = clouds(2, 1, 1.0)
    found = leave_one_out(z, labels, 2)
    assert bool(found.probabilities.isfinite().all()) and bool(found.votes.isfinite().all())


# Names, pictures


def test_names_that_are_nearly_equal() -> None:
    names = [
        "Cat",
        "cat ",
        "dog",
        "hot_dog",
        "hot-dog",
        "cats",
        "glass",
        "gla",
        "bus",
        "e\u0301t\u00e9",
        "\u00e9te\u0301",
    ]
    assert names_alike(names) == [("Cat", "cat ", "cats"), ("hot_dog", "hot-dog"), tuple(names[-2:])]
    assert names_alike(["dog"], ["Dog", "cat", "Cat"]) == [("dog", "Dog")]
    assert names_alike(["dog", "cat"]) == []


def test_equal_pictures_in_other_sizes_and_qualities(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", ["cat", "dog"], count=6)
    rng = np.random.default_rng(0)
    scene = rng.normal(0, 1, (12, 12, 3)).cumsum(0).cumsum(1)
    scene = (255 * (scene - scene.min()) / np.ptp(scene)).astype(np.uint8)
    picture = Image.fromarray(scene).resize((300, 240), Image.Resampling.BICUBIC)
    picture.save(folder / "cat" / "scene.png")
    picture.save(folder / "dog" / "scene.jpg", quality=60)
    picture.resize((150, 120)).save(folder / "dog" / "small.jpg", quality=85)
    shutil.copy(folder / "cat" / "0.png", folder / "cat" / "copy.png")
    groups = ask("check", folder, *ENCODER)["equal_pictures"]
    names = [sorted(Path(file).name for file in group["files"]) for group in groups]
    assert names == [["scene.jpg", "scene.png", "small.jpg"], ["0.png", "copy.png"]]
    assert groups[0]["classes"] == ["cat", "dog"] and groups[1]["classes"] == ["cat"]


def test_groups_are_transitive() -> None:
    assert groups_of([(3, 1), (5, 3), (2, 4)]) == [[1, 3, 5], [2, 4]]
    assert equal_pictures(torch.zeros(0, 16, 17)) == []


# The outlook


def test_more_images_help_where_classes_overlap() -> None:
    z, labels = clouds(4, 12, 0.5, dim=32)
    now = float(leave_one_out(z, labels, 4).right.double().mean())
    found = outlook(z, labels, 4, now)
    assert found is not None and found.now < found.doubled < 1 and found.low <= found.doubled <= found.high
    easy, _ = clouds(4, 12, 8.0, dim=32)
    perfect = outlook(easy, labels, 4, 1.0)
    assert perfect is not None and perfect.doubled == 1
    assert outlook(z[:4], torch.arange(4), 4, 0.5) is None


def test_the_outlook_is_about_right() -> None:
    """The mean over some draws is nearer to what twice the images gave than no change is."""
    rows = []
    for seed in range(6):
        z, labels = clouds(4, 24, 0.5, seed=seed, dim=32)
        half = torch.cat([torch.arange(24 * c, 24 * c + 12) for c in range(4)])
        now, later = (float(leave_one_out(z[r], labels[r], 4).right.double().mean()) for r in (half, torch.arange(96)))
        found = outlook(z[half], labels[half], 4, now)
        assert found is not None
        rows.append((now, found.doubled, later))
    now, expected, later = np.mean(rows, axis=0)
    assert later > now + 0.02 and abs(expected - later) < abs(now - later)


def test_wilson_by_hand() -> None:
    low, high = interval(3, 4)
    assert low == pytest.approx(0.3006, abs=1e-3) and high == pytest.approx(0.9544, abs=1e-3)
    assert interval(0, 0) == (0.0, 1.0) and interval(4, 4)[1] == 1.0


# What to label


def test_the_choice_is_unsure_and_has_no_two_of_a_kind() -> None:
    z, labels = clouds(5, 20, 8.0)
    sure = torch.tensor([[0.99, 0.01]], dtype=torch.float64).repeat(100, 1)
    sure[labels >= 2] = torch.tensor([0.52, 0.48], dtype=torch.float64)
    chosen = most_useful(uncertainty(sure), z, 3)
    assert sorted(labels[chosen].tolist()) == [2, 3, 4]
    assert len(set(most_useful(uncertainty(sure), z, 500))) == 100


def test_what_looks_unknown_is_worth_a_label() -> None:
    p = torch.tensor([[0.9, 0.1], [1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    assert uncertainty(p, torch.tensor([0.0, 0.5, 1.0])).tolist() == pytest.approx([0.2, 0.5**8, 1.0])
    assert uncertainty(torch.ones(2, 1)).tolist() == [0.0, 0.0]


# The commands


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("advice")
    learner = Learner("tpl", SMALL_VIT, device="cpu", epochs=4, latent=8, batch_size=16, memory=40, lr=0.05)
    learner.learn(photos(root / "pets", ["cat", "dog", "fox"]))
    learner.save(root / "model")
    return root / "model"


def test_a_good_folder(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", ["cat", "cow", "dog"])
    report = ask("check", folder, *ENCODER)
    assert report["problems"] == 0 and report["classes"] == {"cat": 10, "cow": 10, "dog": 10}
    assert report["leave_one_out"]["right"] == 30 and report["twice_the_images"]["doubled"] == 1
    said = call("check", folder, *ENCODER).stdout
    assert "30 of 30" in said and "Nothing to mend" in said and "twice the images" in said


def test_every_mistake_in_a_folder_is_named(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", ["Cat", "dog", "owl"])
    photos(folder, ["cat "], count=3, seed=5)
    (folder / "dog" / "1.HEIC").write_bytes(b"x")
    (folder / "dog" / "notes.txt").write_text("mine")
    (folder / "dog" / "broken.png").write_bytes(b"no picture")
    (folder / "empty").mkdir()
    shutil.move(folder / "owl" / "0.png", folder / "dog" / "owl.png")
    report = ask("check", folder, *ENCODER)
    assert [(k["suffix"], k["count"]) for k in report["left_out"]] == [(".heic", 1), (".txt", 1)]
    assert "convert it to JPEG" in report["left_out"][0]["hint"]
    assert any("empty: no images" in text for text in report["skipped"])
    assert "broken.png" in report["unreadable"][0]
    assert report["names_alike"] == [["Cat", "cat "]]
    (suspect,) = report["likely_wrong_labels"]
    assert Path(suspect["file"]).name == "owl.png" and (suspect["label"], suspect["likely"]) == ("dog", "owl")
    assert report["twice_the_images"] is None  # three images of a class
    said = call("check", folder, *ENCODER).stdout
    for text in ("1.HEIC", "broken.png", "'Cat', 'cat '", "owl.png: owl", "empty: no images", "five images or more"):
        assert text in said


def test_a_zip_is_checked_like_a_folder(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", ["cat", "dog"], count=5)
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        for file in sorted(folder.rglob("*.png")):
            archive.write(file, file.relative_to(folder))
        archive.writestr("cat/film.mov", b"x")
    report = ask("check", tmp_path / "photos.zip", *ENCODER)
    assert report["classes"] == {"cat": 5, "dog": 5} and report["left_out"][0]["suffix"] == ".mov"


def test_new_photos_are_compared_with_a_models_classes(model: Path, tmp_path: Path) -> None:
    folder = photos(tmp_path / "new", ["owl"], seed=3)
    photos(folder / "other", ["cat"], seed=3)
    shutil.move(folder / "other" / "cat", folder / "Cat")
    (folder / "other").rmdir()
    shutil.copy(photos(tmp_path / "more", ["fox"], seed=4) / "fox" / "0.png", folder / "owl" / "fox.png")
    report = ask("check", folder, "--model", model, "--device", "cpu")
    assert report["names_alike"] == [["Cat", "cat"]]
    assert ("owl", "fox") in [(s["label"], s["likely"]) for s in report["likely_wrong_labels"]]
    assert ["Cat", "cat"] in [pair["classes"] for pair in report["classes_that_look_alike"]]
    assert "its own encoder" in refusal("check", folder, "--model", model, *ENCODER)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that stores feature vectors and no images."""
    root = tmp_path_factory.mktemp("closed")
    learner = Learner("closed-form", SMALL_VIT, device="cpu").learn(photos(root / "pets", ["cat", "dog", "fox"]))
    learner.save(root / "model")
    return root / "model"


def test_stored_feature_vectors_stand_for_stored_images(closed: Path, tmp_path: Path) -> None:
    folder = photos(tmp_path / "new", ["hen", "owl"], seed=3)
    shutil.copy(photos(tmp_path / "more", ["fox"], seed=4) / "fox" / "0.png", folder / "owl" / "fox.png")
    told = call("check", folder, "--model", closed, "--device", "cpu", "--json")
    assert "by name alone" not in told.stderr
    assert ("owl", "fox") in [(s["label"], s["likely"]) for s in json.loads(told.stdout)["likely_wrong_labels"]]


def test_stored_feature_vectors_are_those_of_the_plain_encoder(closed: Path) -> None:
    """An image that was learned is found among them, so that it does not answer for itself."""
    method = Learner.load(closed, device="cpu").method
    reader = FeatureReader(method.encoder, method.compute)
    given = labelled_images(closed.parent / "pets")
    found = reader.look(batches_of(given.images, reader.preprocess, 16))
    assert bool(_copies(Reference.of(method, reader).features, found.features).all())


def test_a_model_that_stores_nothing_changes_no_number(tmp_path: Path) -> None:
    pets = photos(tmp_path / "pets", ["cat", "dog", "fox"], count=4)
    Learner("slda", SMALL_VIT, device="cpu").learn(pets).save(tmp_path / "model")
    folder = photos(tmp_path / "new", ["hen", "owl"], count=6)
    told = call("check", folder, "--model", tmp_path / "model", "--device", "cpu", "--json")
    alone = ask("check", folder, *ENCODER)
    assert "by name alone" in told.stderr and json.loads(told.stdout) == alone


def test_a_share_and_no_gain_are_said(tmp_path: Path) -> None:
    said = call("check", photos(tmp_path / "photos", ["cat", "dog"]), *ENCODER).stdout
    assert "20 of 20, 100.0 % (" in said and "no gain expected" in said


def test_suggestions(model: Path, tmp_path: Path) -> None:
    inbox = photos(tmp_path / "inbox", ["cat", "dog", "fox", "owl"], count=8, seed=7)
    (inbox / "bad.png").write_bytes(b"no picture")
    for i in range(5):
        shutil.copy(inbox / "owl" / "0.png", inbox / "owl" / f"copy-{i}.png")
    report = ask("suggest", model, inbox, "--count", "6", "--device", "cpu")
    assert report["images"] == 37 and "bad.png" in report["unreadable"][0]
    paths = [row["path"] for row in report["suggested"]]
    assert len(set(paths)) == 6
    assert sum("copy-" in path or path.endswith("owl/0.png") for path in paths) <= 1
    assert all({"top", "unknown", "unsure", "path"} == row.keys() for row in report["suggested"])
    said = call("suggest", model, inbox, "--count", "2", "--device", "cpu")
    assert said.exit_code == 0 and "2 of 37 images" in said.stdout and "bad.png" in said.stderr
    (tmp_path / "nothing").mkdir()
    assert "no readable images" in refusal("suggest", model, tmp_path / "nothing", "--device", "cpu")


@pytest.mark.parametrize("command", ["check", "suggest"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = call(command, "-h")
    assert result.exit_code == 0 and "Example" in result.stdout and "--json" in result.stdout
