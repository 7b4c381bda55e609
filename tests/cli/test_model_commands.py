"""The commands on models, through the real command line: learn, predict, show, evaluate, rename, remove."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from PIL import Image
from rich.console import Console
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

from pictures import photos
from small_encoder import SMALL_VIT
from torture.forged import forge_header
from tpl import Learner, TplError, cli
from tpl.answers import Measured
from tpl.cli.plan import Budget, method_for, width_for
from tpl.cli.text import listed, round_up, size
from tpl.console import WorkProgress
from tpl.engine import Event
from tpl.lines import ProgressLines, printable
from tpl.memory import encode
from tpl.schedule import LARGE, SMALL
from tpl.stream import find_images

FAST = ["--encoder", SMALL_VIT, "--epochs", "6", "--device", "cpu"]
PETS, BIRDS = ["cat", "cow", "dog", "fox"], ["hen", "owl"]


def call(*arguments: str | Path, stdin: bytes = b"") -> Result:
    """One command in this process; a TplError comes out as it is, for `main` to print."""
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], input=stdin, catch_exceptions=True)


def ask(*arguments: str | Path) -> Any:
    """The JSON that a command prints, which must be all it prints."""
    result = call(*arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def lines(*arguments: str | Path, stdin: bytes = b"") -> list[dict[str, Any]]:
    """The objects that `tpl predict --json` prints."""
    result = call("predict", *arguments, "--json", "--device", "cpu", stdin=stdin)
    assert result.exit_code == 0, (result.output, result.exception)
    return [json.loads(line) for line in result.stdout.splitlines()]


def refusal(*arguments: str | Path) -> str:
    """What a command that cannot be done says; nothing is printed on stdout."""
    result = call(*arguments)
    assert isinstance(result.exception, TplError), (result.output, result.exception)
    assert result.stdout == ""
    return str(result.exception)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("commands")
    photos(root / "pets", PETS)
    photos(root / "birds", BIRDS)
    photos(root / "test", [*PETS, *BIRDS], count=5, seed=1)
    return root


@pytest.fixture(scope="module")
def learned(place: Path) -> dict[str, Any]:
    report: dict[str, Any] = ask("learn", place / "model", place / "pets", *FAST)
    return report


@pytest.fixture(scope="module")
def model(place: Path, learned: dict[str, Any]) -> Path:
    return place / "model"


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be changed."""
    return Path(shutil.copytree(model, tmp_path / "own"))


# Help


@pytest.mark.parametrize("command", ["learn", "predict", "show", "evaluate", "rename", "remove"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = call(command, "-h")
    assert result.exit_code == 0 and "Example" in result.stdout and "--json" in result.stdout


# The whole way


def test_a_walk_from_photos_to_a_model_that_grew(place: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    said = call("learn", model, place / "pets", *FAST).stdout
    assert "cat, cow, dog, fox" in said and "36 images" in said and "4 held-out images" in said
    assert "capacity" in said and "on disk" in said
    first = lines(model, place / "test" / "cat")
    assert {answer["class"] for answer in first} <= set(PETS)
    assert "pets" in call("show", model).stdout

    more = ask("learn", model, place / "birds", *FAST)
    assert more["task"] == "birds" and more["known_classes"] == 6
    answers = lines(model, place / "test")
    right = [answer["class"] == Path(answer["path"]).parent.name for answer in answers]
    assert len(right) == 30 and np.mean(right) > 0.8
    measured = ask("evaluate", model, place / "test", "--device", "cpu")
    assert (measured["images"], measured["right"]) == (30, sum(right))

    assert call("rename", model, "cat", "tabby cat").exit_code == 0
    assert call("remove", model, "hen", "--yes", "--device", "cpu").exit_code == 0
    shown = ask("show", model)
    assert shown["classes"] == ["tabby cat", "cow", "dog", "fox", "owl"]
    assert [task["name"] for task in shown["tasks"]] == ["pets", "birds"]
    after = lines(model, place / "test" / "cat")
    assert [a["class"] for a in after] == ["tabby cat" if a["class"] == "cat" else a["class"] for a in answers[:5]]


# learn


def test_the_report_of_learning(learned: dict[str, Any], model: Path) -> None:
    assert learned["classes"] == dict.fromkeys(PETS, 10)
    assert (learned["task"], learned["images"], learned["held_out"], learned["epochs"]) == ("pets", 36, 4, 6)
    assert 0 <= learned["accuracy"] <= 1
    assert learned["memory"]["images"] == 36 and learned["memory"]["budget"] == 2000
    assert 0 < learned["capacity"]["units"] < 1
    assert learned["bytes"] == sum(f.stat().st_size for f in model.rglob("*") if f.is_file())
    wrong = sum(pair["count"] for pair in learned["confused"])
    assert learned["accuracy"] == pytest.approx(1 - wrong / 4)
    assert learned["unreadable"] == learned["skipped"] == []


def test_known_classes_are_refused_unless_they_are_an_update(own: Path, place: Path, tmp_path: Path) -> None:
    message = refusal("learn", own, place / "pets")
    assert "knows cat, cow, dog, fox already" in message and "--update" in message
    mixed = photos(tmp_path / "mixed", ["cat", "owl"], count=5, seed=7)
    assert "does not know owl" in refusal("learn", own, mixed, "--update")
    assert "an update trains nothing" in refusal("learn", own, mixed, "--update", "--epochs", "3")
    before = {task["name"]: task for task in ask("show", own)["tasks"]}["pets"]
    report = ask("learn", own, mixed, "--update", "--classes", "cat", "--device", "cpu")
    assert report["updated"] and report["classes"] == {"cat": 5}
    after = {task["name"]: task for task in ask("show", own)["tasks"]}["pets"]
    assert after["images"] + after["held_out"] == before["images"] + before["held_out"] + 5
    said = call("learn", own, mixed, "--update", "--classes", "cat", "--device", "cpu")
    assert said.exit_code == 0 and "5 more images of cat" in said.stdout


def test_known_and_new_classes_together_are_one_command(own: Path, tmp_path: Path) -> None:
    mixed = photos(tmp_path / "mixed", ["cat", "owl"], count=6, seed=7)
    before = {task["name"]: task for task in ask("show", own)["tasks"]}["pets"]
    plan = ask("learn", own, mixed, "--dry-run", "--device", "cpu")
    assert (plan["classes"], plan["more"]) == ({"owl": 6}, {"cat": 6})
    table = call("learn", own, mixed, "--dry-run", "--device", "cpu").stdout.split("To learn")[0].split()
    assert table == ["class", "images", "owl", "6", "cat", "6"]
    report = ask("learn", own, mixed, "--epochs", "1", "--device", "cpu")
    assert (report["classes"], report["more"], report["updated"]) == ({"owl": 6}, {"cat": 6}, False)
    assert (report["task"], report["images"], report["held_out"]) == ("mixed", 5, 1)
    tasks = {task["name"]: task for task in ask("show", own)["tasks"]}
    assert tasks["mixed"]["classes"] == ["owl"]
    pets = tasks["pets"]
    assert pets["images"] + pets["held_out"] == before["images"] + before["held_out"] + 6
    printed = call("learn", own, photos(tmp_path / "again", ["cow", "emu"], count=5, seed=8), "--epochs", "1")
    assert "Learned emu from" in printed.output and "Added 5 more images of cow, known before" in printed.output


def test_a_known_class_under_another_name_is_said(own: Path, tmp_path: Path) -> None:
    again = photos(tmp_path / "again", ["cat"], count=10, seed=9)
    (again / "cat").rename(again / "moggy")
    report = ask("learn", own, again, "--epochs", "1", "--device", "cpu")
    assert [(pair["class"], pair["known"]) for pair in report["same_classes"]] == [("moggy", "cat")]
    assert report["same_classes"][0]["share"] >= 0.3


def test_unreadable_images_are_named_and_the_others_learned(tmp_path: Path, own: Path) -> None:
    folder = photos(tmp_path / "birds", BIRDS, count=5)
    (folder / "hen" / "broken.png").write_bytes(b"no picture")
    (folder / "empty").mkdir()
    message = refusal("learn", own, folder, "--strict", *FAST)
    assert "empty: no images" in message and "broken.png" in message and "--strict" in message
    result = call("learn", own, folder, *FAST, "--json")
    report = json.loads(result.stdout)
    assert report["classes"] == {"hen": 5, "owl": 5}
    assert len(report["unreadable"]) == 1 and "broken.png" in report["unreadable"][0]
    assert "broken.png" in result.stderr and "empty: no images" in result.stderr


def test_files_that_are_not_read_are_counted_by_kind(tmp_path: Path) -> None:
    folder = photos(tmp_path / "pets", PETS[:2], count=3)
    for name in ("a.HEIC", "b.heic", "notes.txt"):
        (folder / "cat" / name).write_bytes(b"x")
    (folder / "cat" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    words = ["learn", tmp_path / "model", folder, "--dry-run", "--preset", "quick", "--device", "cpu"]
    result = call(*words, "--json")
    report = json.loads(result.stdout)
    assert report["skipped"] == [
        "2 x .heic, such as cat/a.HEIC: a photo that is not read: convert it to JPEG",
        "1 x .txt, such as cat/notes.txt: not a picture",
    ]
    assert "2 x .heic" in result.stderr
    assert "gone.png does not exist" in report["unreadable"][0] and "gone.png" in result.stderr
    (folder / "cat" / "gone.png").unlink()
    assert "2 x .heic" in refusal(*words, "--strict")
    assert ask(*words, "--strict", "--classes", "cow")["skipped"] == []
    for file in folder.rglob("*.[hH][eE][iI][cC]"):
        file.unlink()
    assert ask(*words, "--strict")["skipped"] == ["1 x .txt, such as cat/notes.txt: not a picture"]


def test_a_class_without_a_readable_image_is_left_out(tmp_path: Path) -> None:
    folder = photos(tmp_path / "pets", PETS[:2], count=3)
    (folder / "ghost").mkdir()
    (folder / "ghost" / "1.png").write_bytes(b"")
    report = ask("learn", tmp_path / "model", folder, "--dry-run", "--device", "cpu")
    assert report["classes"] == {"cat": 3, "cow": 3} and report["held_out"] == 0
    assert any("ghost: no readable images" in note for note in report["skipped"])
    for file in folder.rglob("*.png"):
        file.write_bytes(b"")
    assert "None of the 7 images" in refusal("learn", tmp_path / "model", folder)
    assert not (tmp_path / "model").exists()


def test_a_dry_run_tells_time_and_size_and_stores_nothing(place: Path, learned: dict[str, Any], tmp_path: Path) -> None:
    report = ask("learn", tmp_path / "model", place / "pets", *FAST, "--dry-run")
    assert not (tmp_path / "model").exists()
    assert report["classes"] == learned["classes"] and (report["images"], report["held_out"]) == (36, 4)
    assert report["bytes"] == pytest.approx(learned["bytes"], rel=0.1)
    assert 0 < report["seconds"] < 100 * learned["seconds"]
    said = call("learn", tmp_path / "model", place / "pets", "--device", "cpu", "--dry-run", "--time", "1h").stdout
    assert "about" in said and "Nothing was stored" in said and "40 epochs" in said


def test_a_dry_run_of_a_second_task_leaves_the_model(own: Path, place: Path) -> None:
    before = (own / "model.json").read_bytes()
    report = ask("learn", own, place / "birds", *FAST, "--dry-run")
    assert (own / "model.json").read_bytes() == before
    real = ask("learn", own, place / "birds", *FAST)
    assert report["bytes"] == pytest.approx(real["bytes"], rel=0.1)


def test_a_list_of_files_and_a_known_data_set_are_learned_alike(place: Path, tmp_path: Path) -> None:
    rows = [f"{place}/birds/{name}/{i}.png,{name}" for name in BIRDS for i in range(3)]
    (tmp_path / "list.csv").write_text("\n".join([*rows, "absent.png,owl"]))
    result = call("learn", tmp_path / "model", tmp_path / "list.csv", "--dry-run", "--json", "--device", "cpu")
    report = json.loads(result.stdout)
    assert report["classes"] == {"hen": 3, "owl": 3} and "line 7" in report["skipped"][0]
    digits = ask("learn", tmp_path / "model", "--data", "digits", "--classes", "3,5", "--dry-run", "--device", "cpu")
    assert list(digits["classes"]) == ["3", "5"] and digits["images"] + digits["held_out"] > 250


def test_a_memory_of_bytes_becomes_a_number_of_images(place: Path, tmp_path: Path) -> None:
    sizes = [len(encode(Image.open(file).convert("RGB"))) for file in (place / "birds").rglob("*.png")]
    arguments = ("learn", tmp_path / "model", place / "birds", "--dry-run", "--device", "cpu")
    budget = ask(*arguments, "--memory", "50kB")["memory"]["budget"]
    assert 0 < budget < 50_000 / (0.5 * np.mean(sizes))  # shrunk images are no larger than half as large
    assert ask(*arguments, "--memory", "none")["memory"]["budget"] == 0
    assert "--memory takes" in refusal(*arguments, "--memory", "much")


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("2000", Budget(2000)),
        ("none", Budget(0)),
        ("50MB", Budget(None, 50_000_000)),
        ("1.5 GB", Budget(None, 15 * 10**8)),
    ],
)
def test_budgets(text: str, budget: Budget) -> None:
    assert Budget.parse(text) == budget


def test_few_images_are_seen_more_often() -> None:
    assert [LARGE.epochs(n, 32) for n in (1, 36, 128, 320, 10_000)] == [60, 60, 50, 20, 20]
    assert [SMALL.epochs(n, 16) for n in (1, 36, 64, 320)] == [40, 40, 30, 20]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--encoder", "vit_tiny_patch16_224"], f"made with --encoder {SMALL_VIT}"),
        (["--seed", "3"], "made with --seed 0"),
        (["--memory", "10"], "made with --memory 2000"),
        (["--memory", "1MB"], "keeps 2000 images"),
        (["--held-out", "1"], "--held-out takes a share"),
        (["--classes", "bat"], "has no class bat; it has hen, owl"),
        (["--classes", "owls"], "has no class owls. Did you mean 'owl'? It has hen, owl"),
        (["--data", "nonsense"], "unknown data set 'nonsense'"),
    ],
)
def test_what_does_not_suit_a_model_is_refused(arguments: list[str], text: str, model: Path, place: Path) -> None:
    assert text in refusal("learn", model, place / "birds", *arguments)


def test_swapped_arguments_touch_nothing(model: Path, place: Path, tmp_path: Path) -> None:
    (tmp_path / "photos" / "tasks" / "000").mkdir(parents=True)
    (tmp_path / "photos" / "tasks" / "000" / "mine.png").write_bytes(b"x")
    assert "tpl learn MODEL FOLDER" in refusal("learn", tmp_path / "photos", place / "birds")
    assert (tmp_path / "photos" / "tasks" / "000" / "mine.png").exists()
    assert "is a file" in refusal("learn", place / "pets" / "cat" / "0.png", place / "birds")
    assert "not in class folders" in refusal("learn", tmp_path / "new", place / "pets" / "cat")
    assert "name a folder" in refusal("learn", tmp_path / "new")
    assert "holds no model yet" in refusal("learn", tmp_path / "new", place / "birds", "--update")
    assert not (tmp_path / "new").exists()


def test_what_a_killed_first_commit_left_is_no_obstacle(place: Path, tmp_path: Path) -> None:
    """A program killed before its first model.json: the same command must work again."""
    (tmp_path / "model" / "tasks" / "000").mkdir(parents=True)
    (tmp_path / "model" / "tasks" / "000" / "shared.safetensors").write_bytes(b"half")
    (tmp_path / "model" / ".lock.json").write_text('{"pid": 1}')  # a program that ends by itself removes it
    report = ask("learn", tmp_path / "model", place / "birds", *FAST, "--epochs", "1")
    assert report["task"] == "birds" and ask("show", tmp_path / "model")["classes"] == BIRDS


def test_a_model_that_lost_its_header_is_not_overwritten(own: Path, place: Path) -> None:
    (own / "model.json").unlink()
    stored = sorted(own.rglob("*.safetensors"))
    message = refusal("learn", own, place / "birds", *FAST)
    assert "no model.json: restore it from a backup, or remove the directory" in message
    (own / ".lock.json").write_text("{}")  # of a program killed in a later commit
    (own / "tasks" / "001").mkdir()
    assert "restore it from a backup" in refusal("learn", own, place / "birds", *FAST)
    assert sorted(own.rglob("*.safetensors")) == stored


def test_half_a_first_commit_never_was_a_model(place: Path, tmp_path: Path) -> None:
    (tmp_path / "model" / "tasks" / ".000.partial").mkdir(parents=True)
    (tmp_path / "model" / "tasks" / ".000.partial" / "shared.safetensors").write_bytes(b"half")
    assert ask("learn", tmp_path / "model", place / "birds", "--preset", "quick", *FAST[:2])["task"] == "birds"


def test_an_interrupt_while_training_loses_nothing(
    own: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: ProgressLines, event: Any) -> None:
        if event.kind == "epoch":
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressLines, "__call__", interrupt)
    before = (own / "model.json").read_bytes()
    for model in (own, tmp_path / "new"):
        result = call("learn", model, place / "birds", *FAST)
        assert result.exit_code == 130 and result.stdout == ""
        assert "nothing is lost" in result.stderr
    assert (own / "model.json").read_bytes() == before and len(lines(own, place / "test" / "cat")) == 5
    assert not (tmp_path / "new").exists()


# predict


def test_an_answer_as_json(model: Path, place: Path) -> None:
    (answer,) = lines(model, place / "test" / "cow" / "0.png")
    assert list(answer) == ["path", "class", "probability", "task", "unknown", "passes", "top"]
    assert answer["path"] == str(place / "test" / "cow" / "0.png") and answer["task"] == "pets"
    expected = Learner.load(model, device="cpu").answers([answer["path"]])[0]
    assert answer["class"] == expected.name and answer["probability"] == pytest.approx(expected.probability)
    assert answer["unknown"] == pytest.approx(expected.unknown, abs=1e-6)  # six digits are printed
    assert [entry["class"] for entry in answer["top"]] == [name for name, _ in expected.top]
    assert sum(entry["probability"] for entry in answer["top"]) == pytest.approx(1)


def test_folders_zips_and_stdin_lead_to_the_same_answers(model: Path, place: Path, tmp_path: Path) -> None:
    folder = place / "test"
    whole = lines(model, folder)
    assert len(whole) == 30
    assert lines(model, folder, "--batch", "7") == whole
    names = [answer["path"] for answer in whole]
    assert lines(model, "-", stdin="\n".join(names).encode()) == whole
    assert lines(model, "-", stdin=b"\0".join(name.encode() for name in names)) == whole
    archive = shutil.make_archive(str(tmp_path / "test"), "zip", folder)
    zipped = {answer.pop("path").removeprefix(archive): answer for answer in lines(model, archive)}
    assert zipped == {answer.pop("path").removeprefix(str(folder)): answer for answer in whole}


def test_answers_for_people_and_spreadsheets(model: Path, place: Path) -> None:
    image = place / "test" / "cow" / "0.png"
    (answer,) = lines(model, image)
    text = call("predict", model, image, "--top", "2", "--device", "cpu").stdout
    assert text.count("\n") == 1 and text.startswith(f"{image}: {answer['class']} ")
    assert "task pets, unknown" in text and f"then {answer['top'][1]['class']} " in text
    table = call("predict", model, image, place / "absent.png", "--csv", "--top", "2", "--device", "cpu").stdout
    good, bad = csv.DictReader(io.StringIO(table))
    assert good["path"] == str(image) and good["class"] == answer["class"] and good["rejected"] == ""
    assert good["class_2"] == answer["top"][1]["class"]
    assert float(good["probability"]) == pytest.approx(answer["probability"], abs=1e-6)
    assert bad["class"] == "" and "does not exist" in bad["error"]


def test_an_unreadable_file_is_a_line_not_the_end(model: Path, place: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no picture")
    images = [place / "test/cat/0.png", tmp_path / "bad.png", place / "test/cat/1.png", tmp_path / "absent.png"]
    answers = lines(model, *images)
    assert [set(answer) == {"path", "error"} for answer in answers] == [False, True, False, True]
    assert [answer["path"] for answer in answers] == [str(image) for image in images]
    assert lines(model, images[0], images[2]) == [answers[0], answers[2]]
    said = call("predict", model, *images, "--device", "cpu")
    assert said.exit_code == 0 and "2 of 4 images could not be read" in said.stderr
    assert said.stdout.count("error: ") == 2
    assert call("predict", model, *images[1::2], "--device", "cpu").exit_code == 1
    assert "bad.png is not an image" in refusal("predict", model, images[1], "--strict", "--device", "cpu")


def test_rejected_images_have_no_class(model: Path, place: Path) -> None:
    result = call("predict", model, place / "test", "--reject", "0.2", "--json", "--device", "cpu")
    assert result.stderr == ""  # 4 held-out images are just enough
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    for answer in answers:
        assert answer["rejected"] == (answer["unknown"] >= 0.8 - 1e-9)
        assert (answer["class"] is None) == answer["rejected"]
    strangers = [answer["rejected"] for answer in answers if Path(answer["path"]).parent.name in BIRDS]
    friends = [answer["rejected"] for answer in answers if Path(answer["path"]).parent.name in PETS]
    assert np.mean(strangers) > np.mean(friends)
    text = call("predict", model, place / "test", "--reject", "0.2", "--device", "cpu").stdout
    assert text.count(": unknown (") == sum(friends + strangers)
    table = call("predict", model, place / "test", "--reject", "0.2", "--csv", "--device", "cpu").stdout
    rows = list(csv.DictReader(io.StringIO(table)))
    assert [row["class"] == "unknown" for row in rows] == [a["rejected"] for a in answers]
    assert [row["nearest"] for row in rows] == [a["top"][0]["class"] for a in answers]  # also of rejected images
    assert all(row["class"] in ("unknown", row["nearest"]) for row in rows)


def test_too_few_held_out_images_for_a_share_are_told(model: Path, place: Path) -> None:
    result = call("predict", model, place / "test", "--reject", "0.01", "--json", "--device", "cpu")
    assert result.exit_code == 0
    said = " ".join(result.stderr.split())
    assert "--reject 0.01 rests on extrapolation" in said and "from 0.025 on" in said  # one in 40 images, and one
    assert "a share between 0 and 1" in refusal("predict", model, place / "test", "--reject", "5")


@pytest.fixture(scope="module")
def without_score(place: Path) -> Path:
    """A model of a method that has no unknown score."""
    ask("learn", place / "slda", place / "pets", "--method", "slda", "--encoder", SMALL_VIT, "--device", "cpu")
    return place / "slda"


def test_a_method_without_an_unknown_score_claims_none(without_score: Path, place: Path) -> None:
    image = place / "test" / "cow" / "0.png"
    (answer,) = lines(without_score, image)
    assert answer["unknown"] is None
    text, table = (call("predict", without_score, image, *more, "--device", "cpu").stdout for more in ([], ["--csv"]))
    assert "task pets" in text and "unknown" not in text
    assert next(csv.DictReader(io.StringIO(table)))["unknown"] == ""
    told = refusal("predict", without_score, image, "--reject", "0.05", "--device", "cpu")
    assert told == "'slda' has no unknown score; tpl, tpl-plus and closed-form have one."
    assert ask("show", without_score)["smallest_reject"] is None
    assert "this method has no unknown score" in " ".join(call("show", without_score).stdout.split())


def test_a_score_that_is_not_there_is_not_measured(without_score: Path, place: Path) -> None:
    report = ask("evaluate", without_score, place / "test", "--device", "cpu")
    found = report["unknown"]
    assert found["images"] == 10 and found["auroc"] is found["known_rejected"] is found["smallest_reject"] is None
    assert found["rejected"] == {"known": None, "unknown": None}
    text = call("evaluate", without_score, place / "test", "--device", "cpu").stdout
    assert "10 images of classes" in text and "AUROC" not in text and "has no unknown score" in text


def test_a_single_photo_of_every_class_is_the_reason(place: Path, tmp_path: Path) -> None:
    folder = photos(tmp_path / "single", ["cat", "cow"], count=1)
    ask("learn", tmp_path / "model", folder, "--method", "closed-form", "--encoder", SMALL_VIT, "--device", "cpu")
    result = call("predict", tmp_path / "model", place / "test", "--reject", "0.05", "--json", "--device", "cpu")
    assert result.exit_code == 0 and "no class has two images" in " ".join(result.stderr.split())
    assert "too few images to compare with" in " ".join(call("show", tmp_path / "model").stdout.split())
    assert ask("evaluate", tmp_path / "model", place / "test", "--device", "cpu")["unknown"]["auroc"] is None


@pytest.mark.parametrize("form", [[], ["--json"], ["--csv"]])
def test_paths_that_do_not_exist_are_told_before_the_model_is_loaded(
    form: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["predict", model, tmp_path / "a.png", "~/no-such-folder", *form, "--device", "cpu"]
    with monkeypatch.context() as patched:
        patched.setattr("tpl.cli.predict.may_exist", lambda name: True)  # the long way
        expected = call(*command)
    monkeypatch.setattr(Learner, "load", lambda *_: pytest.fail("the model was loaded"))
    found = call(*command)
    assert found.exit_code == expected.exit_code == 1
    assert (found.stdout, found.stderr) == (expected.stdout, expected.stderr) and "a.png does not exist" in found.stdout
    assert "(--strict was given.)" in refusal(*command, "--strict")


def test_files_are_not_written_into_folders_that_do_not_exist(model: Path, place: Path, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    for command, option in (("evaluate", "--report"), ("predict", "--out")):
        told = refusal(command, model, place / "test", option, absent / "file", "--device", "cpu")
        assert f"there is no folder {absent}" in told
    assert not absent.exists()


def test_nothing_to_predict_is_an_error(model: Path, tmp_path: Path) -> None:
    assert "no images in" in refusal("predict", model, tmp_path, "--device", "cpu")
    assert "holds no model" in refusal("predict", tmp_path, "x.png")
    assert "one of --csv and --json" in refusal("predict", model, "x.png", "--csv", "--json")


def test_names_that_are_no_text_are_printed_and_read_back(model: Path, place: Path, tmp_path: Path) -> None:
    name = b"caf\xe9\nround.png".decode("utf-8", "surrogateescape")
    try:
        shutil.copy(place / "test/cat/0.png", tmp_path / name)
    except OSError:
        pytest.skip("this file system takes text only")
    (answer,) = lines(model, tmp_path)
    assert answer["path"] == str(tmp_path / name)
    (found,) = find_images([answer["path"]])
    assert found.entry == tmp_path / name
    for form in ([], ["--csv"]):
        result = call("predict", model, tmp_path, *form, "--device", "cpu")
        assert result.exit_code == 0 and "udce9" in result.stdout


# show, evaluate


def test_show_loads_a_model_of_an_earlier_version_and_names_a_damaged_one(model: Path, tmp_path: Path) -> None:
    older = shutil.copytree(model, tmp_path / "older")
    forge_header(older, lambda header: header.pop("facts"))
    found, usual = ask("show", older), ask("show", model)
    assert all(found[key] == usual[key] for key in usual if key not in ("model", "bytes"))
    header = json.loads((older / "model.json").read_text())
    for key, value in (
        ("tasks", [{"classes": 3}]),
        ("encoder", "compact"),
        ("facts", {"memory": {}}),
        ("facts", "none"),
    ):
        (older / "model.json").write_text(json.dumps(header | {key: value}))
        assert "model.json is damaged" in str(call("show", older).exception)


def test_show_tells_what_a_model_knows(model: Path, learned: dict[str, Any]) -> None:
    shown = ask("show", model)
    (task,) = shown["tasks"]
    assert task["classes"] == shown["classes"] == PETS
    assert (task["images"], task["held_out"], task["accuracy"]) == (36, 4, learned["accuracy"])
    assert task["source"].endswith("pets") and task["learned"].startswith("20")
    assert shown["encoder"]["name"] == SMALL_VIT and len(shown["encoder"]["sha256"]) == 64
    assert shown["bytes"] == learned["bytes"] and shown["capacity"] == pytest.approx(learned["capacity"])
    assert shown["covariance_estimators"] == ["oas"]  # 36 images, 32 dimensions
    text = call("show", model).stdout
    assert "shrunk by OAS" in text
    assert all(word in text for word in ("pets", "cat, cow", "36", SMALL_VIT, "2000", "units are free"))


def test_evaluate_agrees_with_the_answers(model: Path, place: Path) -> None:
    report = ask("evaluate", model, place / "test", "--device", "cpu")
    answers = [(Path(a["path"]).parent.name, a["class"], a["unknown"]) for a in lines(model, place / "test")]
    known = [(true, said) for true, said, _ in answers if true in PETS]
    assert report["images"] == len(known) == 20
    assert report["accuracy"] == pytest.approx(np.mean([true == said for true, said in known]))
    for name, row in report["classes"].items():
        assert row["right"] == sum(pair == (name, name) for pair in known)
    assert sum(n for row in report["confusion"].values() for n in row.values()) == 20
    assert sum(pair["count"] for pair in report["confused"]) == 20 - report["right"]
    unknown = report["unknown"]
    assert (unknown["images"], unknown["classes"]) == (10, BIRDS)
    truth = [true in BIRDS for true, _, _ in answers]
    assert unknown["auroc"] == pytest.approx(roc_auc_score(truth, [score for _, _, score in answers]))
    assert unknown["known_rejected"] is not None and unknown["smallest_reject"] == pytest.approx(1 / 41)
    text = call("evaluate", model, place / "test", "--device", "cpu").stdout
    assert "Accuracy" in text and "hen, owl" in text and "AUROC" in text


def test_evaluate_names_the_lines_it_left_out(model: Path, place: Path, tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text(f"{place}/test/cat/0.png,cat\nabsent.png,cat\n")
    report = ask("evaluate", model, tmp_path / "list.csv", "--device", "cpu")
    assert report["images"] == 1 and "line 2" in report["skipped"][0]
    assert "line 2" in call("evaluate", model, tmp_path / "list.csv", "--device", "cpu").stderr


def test_rejection_rates_need_enough_held_out_images(place: Path, tmp_path: Path) -> None:
    many = photos(tmp_path / "many", ["cat", "cow"], count=40)
    model = tmp_path / "model"
    learned = ask("learn", model, many, "--held-out", "0.5", *FAST)
    assert learned["held_out"] == 40
    unknown = ask("evaluate", model, place / "test", "--device", "cpu")["unknown"]
    answers = lines(model, place / "test", "--reject", "0.05")
    for key, inside in (("known_rejected", True), ("unknown_rejected", False)):
        part = [a["rejected"] for a in answers if (Path(a["path"]).parent.name in ("cat", "cow")) == inside]
        assert unknown[key] == pytest.approx(np.mean(part))
        counted = unknown["rejected"][key.removesuffix("_rejected")]
        assert (counted["count"], counted["images"]) == (sum(part), len(part))
        assert counted["interval"] == pytest.approx(Measured(sum(part), len(part)).interval)
    text = call("evaluate", model, place / "test", "--device", "cpu").stdout
    assert "Rejected at --reject 0.05" in text
    assert f"% of the unknown ones, {counted['count']} of {counted['images']} (" in text


def test_evaluate_leaves_unreadable_images_out(model: Path, tmp_path: Path) -> None:
    folder = photos(tmp_path / "test", ["cat"], count=2)
    (folder / "cat" / "bad.png").write_bytes(b"no picture")
    report = ask("evaluate", model, folder, "--device", "cpu")
    assert report["images"] == 2 and "bad.png" in report["unreadable"][0]
    assert report["unknown"]["auroc"] is None
    assert "bad.png" in refusal("evaluate", model, folder, "--strict", "--device", "cpu")


# rename, remove


def test_rename_and_remove_as_json(own: Path) -> None:
    assert ask("rename", own, "cat", "lion")["classes"] == ["lion", *PETS[1:]]
    report = ask("remove", own, "lion", "--yes", "--device", "cpu")
    assert report["removed"] == "lion" and report["classes"] == PETS[1:]
    assert report["bytes"] == ask("show", own)["bytes"]


def test_removing_asks_first(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pass --yes" in refusal("remove", own, "cat")
    monkeypatch.setattr("tpl.cli.models._at_terminal", lambda: True)
    result = call("remove", own, "cat", stdin=b"n\n")
    assert result.exit_code == 1 and "Nothing was removed" in result.stderr
    assert ask("show", own)["classes"] == PETS
    assert call("remove", own, "cat", "--device", "cpu", stdin=b"y\n").exit_code == 0
    assert ask("show", own)["classes"] == PETS[1:]


def test_a_class_that_is_not_there(own: Path) -> None:
    assert "no class 'bat'" in refusal("rename", own, "bat", "cat")
    assert "no class 'bat'" in refusal("remove", own, "bat")
    assert "already" in refusal("rename", own, "cat", "cow")


def test_a_mistyped_class_is_told_before_the_model_is_loaded(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Learner, "load", lambda *given, **options: pytest.fail("the model was loaded"))
    for words in (["rename", own, "cown", "x"], ["remove", own, "Cow", "--yes"]):
        assert "Did you mean 'cow'? There are cat, cow, dog, fox." in refusal(*words)
    assert "class 'cow' already" in refusal("rename", own, "cat", "cow")
    assert "no file or folder nowhere" in refusal("suggest", own, "nowhere")


# As a program


def start(module: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    # A shell that runs the tests in the background has its children ignore Ctrl-C: not this one.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, preexec_fn=heed, env=environment)


def test_a_reader_that_has_seen_enough_ends_it_quietly(model: Path, place: Path) -> None:
    with start(
        "small_encoder", "predict", model, place / "test", place / "pets", "--batch", "1", "--device", "cpu"
    ) as program:
        assert program.stdout is not None and program.stderr is not None
        assert program.stdout.readline().startswith(str(place).encode())
        program.stdout.close()
        assert program.stderr.read() == b""
        assert program.wait(120) == 0


def test_ctrl_c_ends_with_130_and_leaves_nothing(place: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    with start("tpl", "learn", model, place / "birds", "--epochs", "100000", "--device", "cpu") as program:
        deadline = time.monotonic() + 120
        while not (model / ".lock.json").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=120)
    assert program.returncode == 130 and out == b"", err.decode()
    assert b"nothing is lost" in err and b"Traceback" not in err
    assert err.splitlines()[-1].startswith(b"Interrupted: ")  # a line of its own
    assert not model.exists()


# What is drawn


def test_progress_is_drawn_on_a_terminal_only() -> None:
    def drawn(terminal: bool, quiet: bool = False) -> str:
        text = io.StringIO()
        with WorkProgress(Console(file=text, force_terminal=terminal, width=100), quiet) as progress:
            progress.begin("reading", 40)
            progress.advance(40)
            progress(Event("prepare", {"done": 32, "images": 36}))
            progress(Event("epoch", {"epoch": 1, "epochs": 7, "loss": 0.25}))
            progress(Event("warning", {"text": "hardly any room [/] left"}))
            progress.progress.refresh()
        return text.getvalue()

    shown = drawn(terminal=True)
    assert "learning" in shown and "1/7" in shown and "loss 0.25" in shown
    for text in (shown, drawn(terminal=False), drawn(terminal=True, quiet=True)):
        assert "hardly any room [/] left" in text
    assert "learning" not in drawn(terminal=False) and "learning" not in drawn(terminal=True, quiet=True)


# Words


def test_words() -> None:
    assert [size(n) for n in (0, 999, 1234, 5_670_000, 2e9)] == ["0 bytes", "999 bytes", "1.23 kB", "5.67 MB", "2 GB"]
    assert listed(["a", "b", "c"], most=2) == "a, b and 1 more"
    assert printable("a\x1b[2Jb\n") == "a\\x1b[2Jb\\n"


@pytest.mark.parametrize(
    ("share", "typed"), [(1 / 3, 0.34), (0.2, 0.2), (1 / 20, 0.05), (1 / 2001, 0.0005), (0.5, 0.5)]
)
def test_a_share_to_type_is_never_too_small(share: float, typed: float) -> None:
    assert round_up(share) == pytest.approx(typed) and round_up(share) >= share - 1e-9


def test_a_model_without_stored_images(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", photos(tmp_path / "pets", PETS[:2], 6)
    said = refusal("learn", model, folder, "--memory-kind", "features", "--memory", "100")
    assert "keeps none" in said and not model.exists()
    report = ask("learn", model, folder, "--memory-kind", "features", "--epochs", "1", "--device", "cpu")
    assert report["memory"]["kind"] == "features" and report["memory"]["images"] == report["memory"]["budget"] == 0
    assert report["memory"]["bytes"] > 1000
    shown = call("show", model)
    assert "no images: statistics of features" in shown.stdout
    birds = photos(tmp_path / "birds", BIRDS, 6)
    assert "cannot change" in refusal("learn", model, birds, "--memory-kind", "none")


def test_a_model_of_tpl_plus(place: Path, tmp_path: Path) -> None:
    model, fast = tmp_path / "model", ["--epochs", "1", "--device", "cpu"]
    report = ask("learn", model, place / "pets", "--encoder", SMALL_VIT, *fast)
    assert report["bytes"] < 20e6
    options = json.loads((model / "model.json").read_text())["options"]
    assert (options["random_features"], options["passes"]) == (1024, "all")
    assert refusal("learn", model, place / "birds", "--passes", "few").startswith(
        "passes must be all, auto or a number"
    )
    assert "--method tpl-plus, which cannot change" in refusal("learn", model, place / "birds", "--method", "tpl")
    ask("learn", model, place / "birds", "--passes", "auto", *fast)
    assert json.loads((model / "model.json").read_text())["options"] == options | {"passes": "auto"}
    assert "tpl-plus" in call("show", model).stdout
    for name in PETS:  # the first task goes; what its model sees, the expert goes on seeing
        ask("remove", model, name, "--yes", "--device", "cpu")
    assert {answer["class"] for answer in lines(model, place / "test")} <= set(BIRDS)
    ask("learn", model, place / "pets", *fast)
    assert ask("evaluate", model, place / "test", "--device", "cpu")["images"] == 30


def test_a_network_from_scratch_has_no_expert() -> None:
    assert (method_for("compact"), method_for("resnet18:8")) == ("tpl-plus", "tpl")


@pytest.mark.parametrize(("images", "width"), [(1, 1024), (300, 1200), (50_000, 2048)])
def test_the_expert_of_a_model_from_folders_is_neither_narrow_nor_huge(images: int, width: int) -> None:
    assert width_for(images) == width


@pytest.mark.parametrize("name", ["a" * 300, "~nobody-of-this-name/x", "absent.jpg"])
def test_a_path_that_cannot_be_looked_up_is_no_traceback(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    call("learn", model, photos(tmp_path / "photos", ["cat", "dog"], count=2), "--preset", "quick")
    for command in ("suggest", "learn", "evaluate"):
        assert name[:4] in refusal(command, model, name)
    assert name[:4] in refusal("check", name)
    assert name[:4] in call("predict", model, name).output
