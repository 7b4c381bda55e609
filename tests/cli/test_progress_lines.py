"""Commands whose standard error is no terminal: lines of progress while they work, and results alone on stdout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from pictures import photos
from small_encoder import SMALL_VIT
from tpl import cli
from tpl.bench import demo, reproduce, study
from tpl.bench.paper import find_rows
from tpl.bench.spec import RunSpec
from tpl.engine import Callback, Event, RunLabel

TIMED = re.compile(r"\[\d\d:\d\d\] tpl: (.*)")


def told(text: str) -> list[str]:
    """What all lines say after the time; there must be no others."""
    found = [TIMED.fullmatch(line) for line in text.splitlines()]
    assert all(found), text
    return [line[1] for line in found if line]


def test_lines_come_while_a_run_works(tmp_path: Path) -> None:
    """In a process of its own, whose standard error is a file: what is in it before the run ends was flushed."""
    run, log, out = tmp_path / "run", tmp_path / "log", tmp_path / "out"
    few = ["--method", "finetune", "--tasks", "2", "--epochs", "1", "--set", "latent=8", "--device", "cpu"]
    command = [sys.executable, "-m", "small_encoder", "run", "digits-5t", "--encoder", SMALL_VIT, *few]
    command += ["--out", str(run), "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with log.open("wb") as stderr, out.open("wb") as stdout:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment)
    with process:
        while "task 1 of 2" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.01)
        assert not (run / "results.json").exists()  # it has hardly begun
        assert out.read_bytes() == b""
        assert process.wait(120) == 0
    assert b"\x1b" not in log.read_bytes()
    begun, *_, done = told(log.read_text())
    assert begun == "task 1 of 2 (task 1): 2 classes, 288 images"
    answer = json.loads(out.read_text())
    right = f"{100 * answer['last']:.1f} % accuracy on the classes so far"
    assert re.fullmatch(rf"task 2 of 2 done in \d+ s: {re.escape(right)}", done)


def call(*arguments: str | Path) -> tuple[Any, list[str]]:
    """The JSON that a command prints, and its lines."""
    result = CliRunner().invoke(cli.app, [*map(str, arguments), "--device", "cpu", "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout), told(result.stderr)


def test_a_model_tells_what_it_learns(tmp_path: Path) -> None:
    model, pets = tmp_path / "model", photos(tmp_path / "pets", ["cat", "dog"], count=10)
    report, lines = call("learn", model, pets, "--encoder", SMALL_VIT, "--epochs", "2")
    assert lines[0] == "task pets: 2 classes, 18 images"
    right = f"{100 * report['accuracy']:.1f} % accuracy on 2 held-out images"
    assert re.fullmatch(rf"task pets done in \d+ s: {re.escape(right)}", lines[-1])
    more = photos(tmp_path / "more", ["cat"], count=3, seed=1)
    begun, done = call("learn", model, more, "--update")[1]
    assert begun == "task update: 1 class, 3 images" and re.fullmatch(r"task update done in \d+ s", done)


@pytest.fixture
def labels(monkeypatch: pytest.MonkeyPatch) -> list[RunLabel]:
    """What runs are called by commands that make several; none is made. A callback puts the labels here."""

    def execute(specs: RunSpec | list[RunSpec], places: Any, resume: bool, callback: Callback) -> list[SimpleNamespace]:
        callback(Event("run"))
        count = len(specs) if isinstance(specs, list) else 1
        return [SimpleNamespace(description={}, summary={}, matrices={"cil": np.zeros((1, 1))})] * count

    monkeypatch.setattr(demo, "execute", execute)
    monkeypatch.setattr(study, "execute_together", execute)
    monkeypatch.setattr("tpl.bench.run.execute_together", execute)
    return []


def test_runs_of_a_demo_are_numbered(labels: list[RunLabel], tmp_path: Path) -> None:
    demo.run_demo(tmp_path, "cpu", False, lambda event: labels.append(event.run))
    assert labels == [RunLabel("finetune", 0, 3), RunLabel("tpl", 1, 3), RunLabel("joint", 2, 3)]


@pytest.mark.usefixtures("labels")
def test_runs_of_a_study_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = dict.fromkeys(study.MEASURED, 0.5)
    monkeypatch.setattr(study, "_measured", lambda place, spec, detectors: [(name, row) for name in detectors])
    heard: list[Event] = []
    spec = RunSpec("digits-5t", "hat", device="cpu")
    study.study(spec, ["natural", "random:1"], tmp_path, ["msp", "mls", "vos"], heard.append)
    assert [event.run for event in heard if event.kind == "run"] == [RunLabel("hat", 0, 2), RunLabel("vos", 1, 2)]
    phases = [(event.data["phase"], event.data["steps"]) for event in heard if event.kind == "phase"]
    assert phases == [("measuring detectors of hat", 4), ("measuring detectors of vos", 2)]
    assert sum(event.kind == "step" for event in heard) == 6


def test_runs_behind_rows_of_the_paper_are_numbered_once(labels: list[RunLabel], tmp_path: Path) -> None:
    rows = find_rows(["encoders/vit-tiny/c100-10t", "encoders/vit-tiny/c100-20t"])
    settings = reproduce.RowSettings(tmp_path, orders=("natural", "random:1"))
    made = reproduce.run_rows([*rows, rows[0]], settings, lambda event: labels.append(event.run))
    assert len(made) == 4
    encoder = "vit_tiny_patch16_224"
    assert labels == [RunLabel(f"tpl on c100-10t, {encoder}", 0, 2), RunLabel(f"tpl on c100-20t, {encoder}", 1, 2)]
