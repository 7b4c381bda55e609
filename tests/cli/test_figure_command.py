"""The commands that draw: what they write and print, and that every mistake says what to do."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from small_encoder import SMALL_VIT
from tpl import TplError, cli
from tpl.bench.run import execute
from tpl.bench.spec import RunSpec
from tpl.methods.bank import Bank


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["figure", *map(str, arguments)])


def ask(*arguments: str | Path) -> Any:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*arguments: str | Path) -> str:
    problem = call(*arguments).exception
    assert isinstance(problem, TplError)
    return str(problem)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("figure") / "run"
    options = {"epochs": 1, "latent": 8, "memory": 40}
    execute(RunSpec("digits-5t", encoder=SMALL_VIT, tasks=2, device="cpu", options=options), place)
    return place


@pytest.mark.parametrize("command", ["densities", "toy"])
def test_help_has_an_example_and_a_time(command: str) -> None:
    text = " ".join(call(command, "-h").stdout.split())
    assert "Usage" in text and "Example" in text and "seconds" in text


def test_densities_of_the_test_images(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ask("densities", run, "--device", "cpu")
    assert Path(answer["figure"]) == run / "densities.png" and (run / "densities.png").stat().st_size > 10_000
    assert {key: answer[key] for key in ("benchmark", "method", "order", "images")} == {
        "benchmark": "digits-5t", "method": "tpl", "order": "natural", "images": "test images",
    }  # fmt: skip
    assert [task["task"] for task in answer["tasks"]] == [1, 2]
    assert [task["classes"] for task in answer["tasks"]] == [["0", "1"], ["2", "3"]]
    for task in answer["tasks"]:
        assert 0 < task["explained_variance"] <= 1
        assert 0 <= task["overlap"] <= 1
        assert task["own_images"] + task["other_images"] == 144

    def never(*_: object) -> None:
        raise AssertionError("the model was loaded again")

    monkeypatch.setattr(Bank, "__init__", never)  # what is kept is enough
    one = ask("densities", run, "--task", "2", "--out", tmp_path / "two.svg")
    assert one["tasks"] == answer["tasks"][1:] and (tmp_path / "two.svg").is_file()
    shown = call("densities", run, "--out", tmp_path / "shown.png")
    assert shown.exit_code == 0 and str(tmp_path / "shown.png") in shown.stdout.replace("\n", "")


def test_densities_of_the_memory(run: Path, tmp_path: Path) -> None:
    answer = ask("densities", run, "--memory", "--device", "cpu", "--out", tmp_path / "memory.png")
    assert answer["images"] == "images in the replay memory"
    assert [(task["own_images"], task["other_images"]) for task in answer["tasks"]] == [(20, 20)] * 2


def test_toy_tells_the_ratios(tmp_path: Path) -> None:
    answer = ask("toy", "--out", tmp_path / "toy.svg")
    assert [point["ratio"] for point in answer["points"]] == pytest.approx([0.1, 3.1447e20], rel=1e-3)
    assert (answer["likelihood_chooses"], answer["ratio_chooses"]) == (0, 1)
    assert Path(answer["figure"]).is_file()
    assert "toy.png" in call("toy", "--out", tmp_path / "toy.png").stdout.replace("\n", "")


def changed(run: Path, place: Path, **changes: Any) -> Path:
    """A copy of a run that says something else of itself."""
    shutil.copytree(run, place)
    file = place / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    return place


def test_mistakes_say_what_would_do(run: Path, tmp_path: Path) -> None:
    assert "holds no finished run" in refusal("densities", tmp_path / "absent")
    assert "has the tasks 1 to 2; there is no task 3" in refusal("densities", run, "--task", "3")
    assert "written as .png or .svg; got 'x.gif'" in refusal("densities", run, "--out", tmp_path / "x.gif")
    assert "written as .png or .svg" in refusal("toy", "--out", tmp_path / "x")
    joint = changed(run, tmp_path / "joint", method="joint")
    assert "a run of joint, which has no model of its own for each task" in refusal("densities", joint)
    single = changed(run, tmp_path / "single", classes=[["0", "1"]])
    assert "has a single task" in refusal("densities", single)


def test_without_matplotlib_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in refusal("toy", "--out", tmp_path / "toy.png")
