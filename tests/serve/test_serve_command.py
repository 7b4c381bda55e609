"""`tpl serve` as a process."""

from __future__ import annotations

import importlib.util
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from conftest import archive, classes, serving, workers
from tpl import Learner
from tpl.cli import app as commands
from tpl.errors import TplError


def test_killing_the_server_ends_its_learning_and_leaves_the_model(model: Path) -> None:
    with serving(model) as running:
        key = {"Authorization": f"Bearer {running.token}"}
        files = {"file": ("new.zip", archive(classes(7)))}
        assert httpx2.post(f"{running.url}/tasks", files=files, headers=key).status_code == 202
        pids = []
        while not pids:
            pids = workers(running.process.pid)
            time.sleep(0.05)
        running.process.kill()
        running.process.wait()
        end = time.monotonic() + 30
        while Path(f"/proc/{pids[0]}").exists() and "Z" not in Path(f"/proc/{pids[0]}/stat").read_text().split()[2]:
            assert time.monotonic() < end, "the worker has outlived its server"
            time.sleep(0.05)
    assert Learner.load(model, device="cpu").classes_ == ["0", "1", "2", "3"]


def test_interrupting_the_server_is_its_regular_end(learned: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("the-token-of-this-test", encoding="utf-8")
    with serving(learned, "--token-file", str(token), "--read-only") as running:
        assert running.token is None  # known already: not printed
        assert httpx2.get(f"{running.url}/health").json()["classes"] == 4
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(timeout=20) == 0


def test_a_port_in_use_and_a_missing_model_are_told(learned: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(TplError, match=f"port {port} .*choose another with --host or --port"):
            commands(["serve", str(learned), "--port", port], standalone_mode=False)
    with pytest.raises(TplError, match="holds no model"):
        commands(["serve", str(tmp_path), "--port", "0"], standalone_mode=False)
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_the_command_says_how_to_install_it(learned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name == "uvicorn" else found(name, package)

    monkeypatch.setattr("tpl.cli.serve.find_spec", find)
    with pytest.raises(TplError, match=r"needs uvicorn; install with: pip install 'tpl-cil\[serve\]'"):
        commands(["serve", str(learned)], standalone_mode=False)
