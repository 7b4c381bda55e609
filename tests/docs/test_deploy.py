"""The files for deployment: the container's user, root and health check, and every option that they use."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from tpl.cli import app

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
TOKEN = "a-token-for-the-tests"


def instruction(name: str) -> list[str]:
    """The arguments of a Dockerfile's last instruction of this name."""
    found: list[str] = re.findall(rf"^{name} (.*)$", DOCKERFILE, flags=re.MULTILINE)
    return found


def check_options(words: list[str]) -> None:
    """Every option of `tpl serve` exists."""
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known, words


def test_the_container_serves_the_volume_as_a_user_without_rights() -> None:
    entry = json.loads(instruction("ENTRYPOINT")[-1])
    assert entry[:3] == ["tpl", "serve", *instruction("VOLUME")]
    check_options(entry + json.loads(instruction("CMD")[-1]))
    assert instruction("USER") == ["10001:10001"] and DOCKERFILE.index("USER") > DOCKERFILE.index("RUN useradd")
    for copied in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, flags=re.MULTILINE):
        kept = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        for name in copied.split():
            assert (ROOT / name).exists() and f"!{name}" in kept, name


def test_compose_makes_the_root_read_only() -> None:
    content = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    (service,) = content["services"].values()
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert [place.split(":")[0] for place in service["tmpfs"]] == ["/tmp"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["volumes"] == [f"./model:{instruction('VOLUME')[0]}"]
    assert set(service["secrets"]) <= set(content["secrets"])
    assert f"/run/secrets/{service['secrets'][0]}" in instruction("CMD")[-1]


@pytest.fixture
def port() -> Iterator[int]:
    """A server that is healthy for those who have the token."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            right = self.path == "/health" and self.headers.get("Authorization") == f"Bearer {TOKEN}"
            self.send_response(200 if right else 401)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_health_check_sends_the_token(port: int) -> None:
    command = json.loads(instruction("HEALTHCHECK")[-1].partition(" CMD ")[2])
    assert command[:2] == ["python", "-c"] and "127.0.0.1:8000" in command[2]
    code = command[2].replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    for token, healthy in ((TOKEN, True), ("another", False)):
        run = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"TPL_TOKEN": token}, capture_output=True, check=False
        )
        assert (run.returncode == 0) is healthy, run.stderr


def test_the_unit_is_confined_and_its_options_exist() -> None:
    found = re.search(r"```ini[^\n]*\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    settings = dict(re.findall(r"^(\w+)=(.*)$", found[1], flags=re.MULTILINE))
    for name, value in {"DynamicUser": "yes", "ProtectSystem": "strict", "NoNewPrivileges": "yes"}.items():
        assert settings[name] == value
    check_options(settings["ExecStart"].split())
    for line in re.findall(r"^tpl serve (.*)$", PAGE, flags=re.MULTILINE):
        check_options(line.split())
