"""docs/learn.md promises a way from photos to a served classifier: every command on it is executed, in order."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pictures import walkthrough
from tpl import cli

PAGE = (Path(__file__).parents[1] / "docs" / "learn.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (.+)$", "\n".join(re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)), re.MULTILINE)
FAST = ["--epochs", "4", "--device", "cpu"]  # the page leaves both to the program, which takes longer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folders that the page starts from."""
    tmp_path = tmp_path_factory.mktemp("home")
    walkthrough(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        yield tmp_path


@pytest.fixture(scope="module")
def said(home: Path) -> dict[str, str]:
    """What every command of the page prints, but for the server and requests to it."""
    return {line: run(line) for line in COMMANDS if not line.startswith(("tpl serve", "curl"))}


def run(line: str) -> str:
    """One line of the page: `tpl ...`, maybe fed by another program, maybe written to a file."""
    line, _, target = line.partition(" > ")
    fed, _, own = line.rpartition(" | ")
    given = subprocess.run(fed, shell=True, check=True, capture_output=True).stdout if fed else b""
    program, *words = shlex.split(own)
    assert program == "tpl"
    trains = words[0] == "learn" and "--update" not in words
    result = CliRunner().invoke(cli.app, [*words, *(FAST if trains else [])], input=given)
    assert result.exit_code == 0, (line, result.output, result.exception)
    if target:
        Path(target).write_text(result.stdout, encoding="utf-8")
    return result.stdout


@contextmanager
def serving(line: str, port: int) -> Iterator[None]:
    """The page's server, at a port of its own."""
    words = shlex.split(line)[1:]
    command = [sys.executable, "-m", "tpl", *words, "--port", str(port), "--device", "cpu"]
    source = str(Path(cli.__file__).parents[2])  # for another process, wherever this one found the package
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as server:
        try:
            assert server.stdout is not None and f":{port}" in server.stdout.readline().decode()
            yield
        finally:
            server.terminate()
            server.communicate(timeout=60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


def test_every_command_of_the_page_works(home: Path, said: dict[str, str]) -> None:
    assert len(COMMANDS) >= 12
    servers = [line for line in COMMANDS if line.startswith("tpl serve")]
    requests = [line for line in COMMANDS if line.startswith("curl")]
    assert "Accuracy" in said["tpl evaluate model test"]
    answers = [json.loads(line) for line in (home / "answers.jsonl").read_text().splitlines()]
    assert [answer["path"] for answer in answers] == [
        f"inbox/{name}-{i}.jpg" for name in ("cat", "owl") for i in (0, 1)
    ]
    assert len((home / "answers.csv").read_text().splitlines()) == 5
    assert "hen" in said["tpl show model"] and "birds" in said["tpl show model"]
    (server,) = servers
    assert requests
    if find_spec("uvicorn") is None or shutil.which("curl") is None:
        pytest.skip("serving needs the packages of tpl-cil[serve], and curl")
    port = free_port()
    with serving(server, port):
        for request in requests:
            done = subprocess.run(
                ["curl", "-sf", *shlex.split(request.replace(":8000", f":{port}"))[1:]], capture_output=True, timeout=60
            )
            assert done.returncode == 0
            (answer,) = json.loads(done.stdout)["answers"]
            assert answer["class"] in ("house cat", "cow", "dog", "hen", "owl")


def test_what_the_page_shows_is_what_the_commands_print(said: dict[str, str]) -> None:
    """The words around the numbers of two commands. Which class an unknown picture resembles may differ."""
    for line in ("tpl learn model photos", "tpl predict model inbox"):
        shown = PAGE.partition(f"$ {line}\n")[2].partition("```")[0]
        shown = re.sub(r"balanced: .*", "", shown)  # with --epochs, as here, no preset chooses
        assert _words(shown) - _words(said[line]) <= {"cat", "cow", "dog", "fox"}, line


def _words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]{2,}", text))
