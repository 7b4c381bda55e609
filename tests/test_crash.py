"""A writer killed at any instant leaves the model before or the model after, and nothing in between."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "kill.py"
KILLS = 20

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def kill_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kill", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_killed_writers_leave_the_model_before_or_after() -> None:
    command = [sys.executable, str(SCRIPT), "--kills", str(KILLS), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert result["broken"] == [] and done.returncode == 0
    assert result["kills"] == sum(result["left"].values()) == KILLS
    assert {what.split(":")[0] for what in result["left"]} == {"learn", "update", "remove", "remove a task"}
    assert any(what.endswith(": old") for what in result["left"])


def test_the_judge_knows_a_broken_model(tmp_path: Path) -> None:
    """What would have to be told if a commit could half-happen."""
    kill, model = kill_module(), tmp_path / "model"
    kill.new_model(model)
    old = kill.content(model)
    kill.work(model, lambda learner: learner.rename("one", "two and a half"))
    new = kill.content(model)
    assert old != new
    assert kill.judge(model, old, new, lambda: False) == "new"
    assert kill.judge(model, new, old, lambda: False) == "the command does not work any more"
    assert kill.judge(model, old, old, lambda: False).startswith("neither")
    (model / "tasks" / "999.safetensors").write_bytes(b"forgotten")
    assert "999.safetensors" in kill.judge(model, old, new, lambda: False)
    header = json.loads((model / "model.json").read_text())
    shared = next(file for file in header["files"] if "shared" in file)
    (model / shared).write_bytes((model / shared).read_bytes()[:-1])
    assert "shared.safetensors is damaged" in kill.judge(model, old, new, lambda: False)
