"""The commands on versions, through the real command line: history, undo, evaluate --against."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from commands import ask, call, refusal
from pictures import photos
from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.bench.paired import Paired
from tpl.store import ModelStore


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("versions")
    photos(root / "pets", ["cat", "cow"])
    photos(root / "birds", ["hen", "owl"])
    photos(root / "test", ["cat", "cow", "hen"], count=5, seed=1)
    learner = Learner("tpl", SMALL_VIT, device="cpu", epochs=4, latent=8, batch_size=16, memory=20, lr=0.05)
    for folder in ("pets", "birds"):
        learner.learn(root / folder)
        learner.save(root / "model")
    return root


@pytest.fixture
def own(place: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be changed."""
    return Path(shutil.copytree(place / "model", tmp_path / "own"))


def test_history_tells_what_each_version_changed(own: Path) -> None:
    found = ask("history", own)
    assert found["keep"] == 5
    assert [(v["number"], v["change"]) for v in found["versions"]] == [
        (2, "learned birds (hen, owl)"),
        (1, "learned pets (cat, cow)"),
    ]
    ask("rename", own, "hen", "rooster")
    said = call("history", own).stdout
    assert "newest task" in said and "not that of the whole model" in said
    assert "renamed hen to" in said and "Version 3 is the present one; up to 5 older versions are kept" in said


def test_undo_brings_the_answers_of_before_back(own: Path, place: Path) -> None:
    test = [place / "test" / "cat" / f"{i}.png" for i in range(5)]
    before = Learner.load(own, device="cpu", version=1).predict_proba(test)
    done = ask("undo", own)
    assert (done["undone"], done["same_as"], done["classes"]) == (2, 1, ["cat", "cow"])
    assert (Learner.load(own, device="cpu").predict_proba(test) == before).all()
    assert "nothing to undo" in refusal("undo", own)
    assert "no version 9" in refusal("undo", own, "--to", "9")
    said = call("undo", own, "--to", "2").stdout
    assert "as version 2 was: 4 classes" in said and "--to 1" in said
    ask("undo", own)
    with Learner.changing(own, device="cpu") as learner:
        learner.learn(place / "birds", name="again")
    assert ask("history", own)["versions"][0]["change"] == "learned again (hen, owl)"


def test_pruned_versions_are_gone(own: Path) -> None:
    before = ask("history", own)
    after = ask("history", own, "--keep", "0")
    assert [v["number"] for v in after["versions"]] == [2]
    assert after["bytes"] < before["bytes"] - before["versions"][1]["bytes"] + 500
    assert "no version 1" in refusal("undo", own)


def test_a_removed_class_is_in_no_version(own: Path) -> None:
    exemplar = bytes(Learner.load(own, device="cpu").method.memory.exemplars[0][0])  # type: ignore[union-attr]
    assert any(exemplar in file.read_bytes() for file in own.rglob("*.safetensors"))
    ask("remove", own, "cat", "--yes", "--device", "cpu")
    assert not any(exemplar in file.read_bytes() for file in own.rglob("*.safetensors"))
    assert [v["number"] for v in ask("history", own)["versions"]] == [3]


def test_evaluate_against_an_older_version(own: Path, place: Path, tmp_path: Path) -> None:
    found = ask("evaluate", own, place / "test", "--against", "1", "--device", "cpu")["against"]
    assert found["images"] == 10 and found["older"] == "1"  # classes that both know
    assert found["right"] - found["right_before"] == found["gained"] - found["lost"]
    copy = Path(shutil.copytree(own, tmp_path / "copy"))
    same = ask("evaluate", own, place / "test", "--against", copy, "--device", "cpu")["against"]
    assert (same["images"], same["gained"], same["lost"], same["verdict"]) == (15, 0, 0, "equal")
    assert "As good as" in call("evaluate", own, place / "test", "--against", copy, "--device", "cpu").stdout
    assert "takes the number" in refusal("evaluate", own, place / "test", "--against", "nowhere")
    assert "name it with --against" in refusal("evaluate", own, place / "test", "--fail-if-worse")


def test_a_worse_version_says_so(own: Path, place: Path) -> None:
    """Names that are swapped make every answer wrong."""
    learner = Learner.load(own, device="cpu")
    for old, new in (("cat", "x"), ("cow", "cat"), ("x", "cow")):
        learner.rename(old, new)
    learner.save(own)
    said = call("evaluate", own, place / "test", "--against", "2", "--device", "cpu")
    assert said.exit_code == 0 and "Worse than 2" in said.stdout and "Lost: " in said.stdout
    failed = call("evaluate", own, place / "test", "--against", "2", "--fail-if-worse", "--device", "cpu", "--json")
    assert failed.exit_code == 1 and json.loads(failed.stdout)["against"]["verdict"] == "worse"


@pytest.mark.parametrize(
    ("gained", "lost", "chance", "verdict"),
    [
        (0, 0, 1.0, "equal"),
        (3, 3, 1.0, "equal"),
        (1, 0, 1.0, "equal"),
        (2, 3, 1.0, "equal"),
        (0, 5, 2 / 32, "perhaps worse"),
        (6, 0, 2 / 64, "better"),
        (1, 8, 20 / 512, "worse"),
    ],
)
def test_the_exact_test_by_hand(gained: int, lost: int, chance: float, verdict: str) -> None:
    rows = [("a", "a", "b")] * gained + [("a", "b", "a")] * lost + [("a", "a", "a")] * 4 + [("b", "a", "a")] * 2
    found = Paired.of(*([row[i] for row in rows] for i in range(3)))
    assert (found.gained, found.lost) == (gained, lost)
    assert found.chance == pytest.approx(chance) and found.verdict == verdict


@pytest.mark.parametrize("command", ["history", "undo"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = call(command, "-h")
    assert result.exit_code == 0 and "Example" in result.stdout and "--json" in result.stdout


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    for command in ("history", "undo"):
        assert "holds no model" in refusal(command, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not ModelStore(tmp_path).exists()


def test_learning_says_what_it_did_to_known_classes(own: Path, place: Path, tmp_path: Path) -> None:
    fox = photos(tmp_path / "fox", ["fox"], count=5)
    report = ask("learn", own, fox, "--test", place / "test", "--epochs", "1", "--device", "cpu")
    found = report["against"]
    assert found["images"] == 15 and found["older"] == "before"
    older = [Learner.load(own, device="cpu", version=n) for n in (2, 3)]
    right = [
        sum(name == path.parent.name for name, path in zip(each.predict(paths), paths, strict=True))
        for each, paths in zip(older, 2 * [sorted((place / "test").rglob("*.png"))], strict=True)
    ]
    assert [found["right_before"], found["right"]] == right
    new = call("learn", tmp_path / "new", fox, "--test", place / "test", "--epochs", "1", "--device", "cpu")
    assert new.exit_code == 0 and "this one is new" in new.stderr
