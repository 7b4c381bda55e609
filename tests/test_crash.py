"""A writer killed at any instant leaves the model before or the model after, and nothing in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import load_script
from small_encoder import SMALL_VIT

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "kill.py"
KILLS = 20
# The script as it is, where timm knows one encoder more; and threads of its own a process cannot take along by fork.
PROGRAM = "import runpy, sys, small_encoder; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def test_killed_writers_leave_the_model_before_or_after() -> None:
    command = [sys.executable, "-c", PROGRAM, str(SCRIPT), "--kills", str(KILLS), "--encoder", SMALL_VIT, "--json"]
    environment = os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert result["broken"] == [] and done.returncode == 0
    assert result["kills"] == sum(result["left"].values()) >= KILLS
    assert {what.split(":")[0] for what in result["left"]} == {"learn", "update", "remove", "remove a task"}
    assert any(what.endswith(": old") for what in result["left"])


def test_the_judge_knows_a_broken_model(tmp_path: Path) -> None:
    """What would have to be told if a commit could half-happen."""
    kill, model = load_script("benchmarks/kill.py"), tmp_path / "model"
    kill.new_model(model, SMALL_VIT)
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
