"""Benchmark and recipe scripts: all explain themselves, and those that can be made small run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pictures import photos
from scripts import load_script

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "recipes").glob("*.py")])
ALWAYS_WHOLE = ("compare_knownness",)  # takes no options


def load(name: str) -> ModuleType:
    (file,) = [file for file in SCRIPTS if file.stem == name]
    return load_script(str(file.relative_to(ROOT)))


@pytest.mark.parametrize("name", [file.stem for file in SCRIPTS])
def test_every_script_has_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = load(name)
    assert module.__doc__ and callable(module.main)
    if name in ALWAYS_WHOLE:
        return
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 0 and "usage:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "arguments", "key"),
    [
        ("inference", "--tasks 2 --batch 2 --seconds 0 --repeats 1 --latent 4 --device cpu", "tasks"),
        ("throughput", "--latent 4 --batch-size 2 --steps 1 --seconds 0.001 --device cpu", "measured"),
        ("adapted_blocks", "--blocks 1 --batch-size 2 --batch 2 --tasks 2 --steps 1 --seconds 0 --device cpu", "rows"),
        ("peers", "digits-5t --methods slda ranpac --epochs 1 --tasks 1 --device cpu", "rows"),
        ("mask_pruning", "--width 8 --images 64 --tasks 1 --epochs 1", "open"),
    ],
)  # fmt: skip
def test_a_small_measurement(
    name: str, arguments: str, key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments.split()])
    load(name).main()
    assert json.loads(capsys.readouterr().out)[key]


def test_detectors_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("detectors")
    for size, value in {"IMAGES": 20, "TASKS": 1, "DIM": 16, "TRAINED": 200, "STORED": 20}.items():
        monkeypatch.setattr(module, size, value)
    found = module.measure()
    assert set(found) == set(module.DETECTORS) - {"odin"}
    assert all(seconds["fit"] >= 0 and seconds["score"] >= 0 for seconds in found.values())


def test_the_strength_of_a_ridge_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from safetensors.torch import save_file

    module, g = load("choose_ridge"), torch.Generator().manual_seed(0)
    labels = torch.arange(20).repeat(30)
    save_file({"z": torch.randn(600, 8, generator=g) + 4 * labels[:, None] % 7, "y": labels}, tmp_path / "features")
    split = module.Split.of(tmp_path / "features", "cpu")
    ridge = module.learned(split, [None] * 20, module.RidgeConfig(random_features=16), memory=True)
    module.report(split, ridge, ridge="error")
    line = json.loads(capsys.readouterr().out)
    assert line["ridge"] == "error" and 0 <= line["accuracy"] <= 100


def test_two_tasks_are_learned_and_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photos(tmp_path, ["ant", "bee", "cat", "cow", "dog", "fox"], 2)
    quick = ["--each", "2", "--rounds", "1", "--product", "--preset quick"]
    monkeypatch.setattr(sys, "argv", ["learn_time", str(tmp_path), *quick])
    load("learn_time").main()
    row = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].strip("|").split("|")]
    assert row[0] == "`--preset quick`" and row[3:] == ["–", "–, –"]
    assert all(float(seconds) > 0 for seconds in row[1:3])


def test_the_closed_form_is_compared_with_its_rivals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photos(tmp_path / "photos", ["ant", "bee", "cat", "cow", "dog", "fox"], 8)
    options = ["--fits", "--classes", "4", "--tasks", "2", "--per-class", "3", "--test", "4", "--seeds", "2"]
    monkeypatch.setattr(
        sys, "argv", ["photos", str(tmp_path / "photos"), *options, "--json", str(tmp_path / "out.json")]
    )
    load("photos").main()
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    found = {row["name"]: row["accuracy"] for row in rows if row["seed"] == 1}
    assert found["closed form of tpl learn"] > 0.5 and len(found) == 5 and len(rows) == 10
    assert "| closed form of tpl learn |" in capsys.readouterr().out
