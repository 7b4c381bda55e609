"""A mistake on the command line is told at once: before torch is there, which takes seconds to import."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tpl import TplError
from tpl.cli.app import uninterrupted
from tpl.methods import load_methods
from tpl.names import method_names, refuse_unknown

MISTAKES = [
    (["run", "digits-5t", "--order", "X"], "class order 'X' is not understood"),
    (["run", "digits-5t", "--order", "random:1,random:x"], "must be a whole number, 0 or more, not 'x'"),
    (["run", "digits-5t", "--order", "absent.json:1"], "no class-order file absent.json"),
    (["run", "digits-5t", "--method", "tpl,nope"], "no method 'nope'; there are afc, "),
    (["run", "nope"], "no benchmark 'nope'; there are digits-5t, "),
    (["learn", "model", "absent"], "no folder or zip archive absent"),
    (["learn", "model", ".", "--method", "joint"], "needs the images of all tasks every time"),
    (["learn", "model", ".", "--method", "tpl", "--passes", "2"], "--passes is an option of tpl-plus"),
    (["learn", "model", ".", "--memory", "many"], "--memory takes a number of images"),
    (["learn", "old", "."], "knows cat already"),
    (["learn", "old", ".", "--method", "tpl-plus"], "made with --method tpl, which cannot change"),
    (["suite", "absent.toml"], "no suite file absent.toml"),
    (["suite", "--methods", "tpl,nope", "--benchmarks", "digits-5t"], "no method 'nope'"),
    (["suite", "--methods", "tpl", "--benchmarks", "nope"], "no benchmark 'nope'"),
    (["suite", "wrong.toml"], "no method 'nope'"),
    (["ood-study", "nope"], "no benchmark 'nope'"),
    (["describe", "nope"], "no method 'nope'"),
    (["run", "digits-5t", "--set", "nope=1"], "no option 'nope' here"),
    (["run", "digits-5t", "--set", "k=many"], "k must be a int; got 'many'"),
    (["run", "digits-5t", "--lr", "-1"], "lr must be above 0"),
    (["run", "c100-10t", "--encoder", "compact"], "'compact' was pre-trained on cifar100"),
    *(
        [[command, "absent", *rest], "absent holds no model"]
        for command, *rest in (
            ["show"],
            ["predict", "1.png"],
            ["evaluate", "."],
            ["rename", "a", "b"],
            ["remove", "a", "--yes"],
            ["export", "model.onnx"],
            ["serve"],
        )
    ),
]
PROGRAM = """
import json, sys
from typer.testing import CliRunner
from tpl import cli
for arguments, words in json.loads(sys.argv[1]):
    error = CliRunner().invoke(cli.app, arguments).exception
    assert words in str(error), (arguments, error)
    assert "torch" not in sys.modules, arguments
"""


def test_a_mistake_is_told_before_torch_is_there(tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text('methods = ["nope"]\nbenchmarks = ["digits-5t"]\n')
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").touch()
    (tmp_path / "old").mkdir()
    encoder = {"name": "compact", "sha256": "0" * 64, "fingerprint": "0" * 64, "weights": None}
    parts = [f"tasks/000/{part}.safetensors" for part in ("task-0", "shared", "memory")]
    header = {
        "schema": 2,
        "method": "tpl",
        "seed": 0,
        "options": {},
        "encoder": encoder,
        "tasks": [{"classes": ["cat"], "file": parts[0]}],
        "newest": "tasks/000",
        "commits": 1,
        "files": dict.fromkeys(parts, "0" * 64),
    }
    (tmp_path / "old" / "model.json").write_text(json.dumps(header))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(MISTAKES)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_names_are_read_as_they_are_registered() -> None:
    own = [name for name, method in load_methods().items() if method.__module__.startswith("tpl.methods.")]
    assert list(method_names()) == sorted(own)
    refuse_unknown("method", "tpl", method_names())
    with pytest.raises(TplError, match="There is no dish 'soup'; there are pie, tea"):
        refuse_unknown("dish", "soup", ("pie", "tea"))
    with pytest.raises(TplError, match=r"no dish 'Pies'\. Did you mean 'pie'\? There are pie, tea\."):
        refuse_unknown("dish", "Pies", ("pie", "tea"))
    with pytest.raises(TplError, match=r"d18, d19 and 80 more\.$"):
        refuse_unknown("dish", "soup", [f"d{i}" for i in range(100)])


def test_ctrl_c_waits_for_what_must_be_whole() -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done
