"""`torchrun ... -m tpl run`: two processes train one run, end with one's numbers, and only the first one talks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from handwriting import digits
from tpl import Learner
from tpl.bench.run import execute
from tpl.bench.spec import RunSpec
from tpl.cli import main
from tpl.store import ModelStore

OPTIONS: dict[str, Any] = {"epochs": 1, "latent": 8, "batch_size": 10, "memory": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four digits in class folders, 8 images each."""
    place = tmp_path_factory.mktemp("digits")
    images = digits(range(4), 8)
    for i, label in enumerate(images.labels):
        (place / str(label)).mkdir(exist_ok=True)
        images.load(i).save(place / str(label) / f"{i}.png")
    return place


def spec(folder: Path) -> RunSpec:
    return RunSpec("folder", data=folder, per_task=2, validation=0.25, device="cpu", options=OPTIONS)


def told(rank: int, port: int) -> dict[str, str]:
    """What torchrun tells one of two processes of the other."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    return {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_processes_end_where_one_does(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Weights and answers after a second task with replay; one JSON object in all, on the first one's stdout."""
    options = [f"--set={name}={value}" for name, value in OPTIONS.items()]
    arguments = ["run", "folder", f"--data={folder}", "--per-task=2", "--validation=0.25", "--device=cpu", *options]
    arguments += [f"--out={tmp_path / 'two'}", "--json"]
    port, pipe = free_port(), subprocess.PIPE
    environment = os.environ | told(1, port) | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tpl", *arguments]
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as second:
        one = execute(spec(folder), tmp_path / "one")  # while the other one starts
        for name, value in told(0, port).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["tpl", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()  # the first of the two is this process
        said = second.communicate(timeout=300)
    assert (ended.value.code, second.returncode, said[0]) == (0, 0, ""), said
    assert json.loads(capfd.readouterr().out)["last"] == pytest.approx(one.summary["last"], abs=1e-9)
    assert json.loads((tmp_path / "two" / "run.json").read_text(encoding="utf-8"))["environment"]["processes"] == 2
    alone, shared = (ModelStore(tmp_path / name / "model").read()[1] for name in ("one", "two"))
    for own, other in zip([alone.shared, *alone.tasks], [shared.shared, *shared.tasks], strict=True):
        for name in ("adapters.up_weight", "adapters.down_weight", "embedding", "norms", "head_weight", "head_bias"):
            if name in own:
                # The gradients are the same sums in another order; an embedding's are stretched by up to s_max = 400.
                torch.testing.assert_close(other[name], own[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)
    images = spec(folder).stream().union(1).test
    assert images is not None
    answers = [Learner.load(tmp_path / name / "model", device="cpu").predict_proba(images) for name in ("one", "two")]
    torch.testing.assert_close(torch.as_tensor(answers[1]), torch.as_tensor(answers[0]), rtol=0, atol=1e-3)


def test_other_commands_refuse_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["tpl", "list"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "only `tpl run`" in capsys.readouterr().err
