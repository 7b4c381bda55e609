"""Requests with anything in them: methods, paths, queries, headers and forms; none is answered with a 500."""

from __future__ import annotations

import io
import logging
import random
import zipfile
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from torture.fuzz import Case, run_attempts
from torture.fuzz_images import KINDS, valid
from torture.mutations import VALUES, mutated_bytes
from torture.small_models import learned
from torture.tally import Tally
from tpl.serve.app import create_app
from tpl.serve.model import ModelSource
from tpl.serve.security import Access
from tpl.serve.server import Settings
from tpl.serve.uploads import Limits

TOKEN = "a-token-for-the-torture"
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE")
PATHS = (
    "/",
    "/docs",
    "/health",
    "/metrics",
    "/model",
    "/predict",
    "/tasks",
    "/tasks/x",
    "/openapi.json",
    "/%00",
    "/../x",
)
KEYS = ("top", "tasks", "examples", "pictures", "x")


def run(seed: int, cases: int, place: Path) -> Tally:
    """Send requests to a server in this process; what it learns is not waited for."""
    learned(place / "model")
    tally = Tally("requests", seed)
    settings = Settings(Access(TOKEN), Limits(upload=1 << 20, queue=0), read_only=True)
    app = create_app(ModelSource(place / "model", "cpu"), settings)
    logging.getLogger("tpl.serve").setLevel(logging.CRITICAL)
    with TestClient(app, raise_server_exceptions=False) as client:

        def attempt(draw: random.Random) -> str:
            method, path, given = _request(draw)
            Case.text = f"{method} {path} {str(given.get('params'))[:80]} {str(given.get('headers'))[:80]}"
            answer = client.request(method, path, **given)
            broken = answer.status_code >= 500 and "retry-after" not in answer.headers
            assert not broken, f"{answer.status_code}: {answer.text[:100]}"
            return f"{answer.status_code // 100}xx"

        return run_attempts(tally, cases, attempt)


def _request(draw: random.Random) -> tuple[str, str, dict[str, Any]]:
    """A method, a path, and what goes with them."""
    method = draw.choice((*METHODS, "POST", "POST", "POST", "POST"))
    path = draw.choice((*PATHS, "/predict", "/predict", "/tasks"))
    given: dict[str, Any] = {"headers": {}}
    if draw.random() < 0.5:
        values = [str(value)[:2000] for value in VALUES if value != "\ud800"]
        given["params"] = {draw.choice(KEYS): draw.choice(values) for _ in range(draw.randint(1, 3))}
    if draw.random() < 0.7:
        given["headers"]["authorization"] = f"Bearer {TOKEN}"
    if draw.random() < 0.2:
        given["headers"][draw.choice(("content-length", "content-type", "host", "range", "accept", "expect"))] = (
            draw.choice(
                (
                    "0",
                    "-1",
                    "9" * 30,
                    "multipart/form-data",
                    "multipart/form-data; boundary=",
                    "[::1].example",
                    "\xb2",
                    "x" * 999,
                )
            ).encode("latin-1")
        )
    if method not in ("GET", "HEAD", "OPTIONS", "TRACE"):
        given["content"], kind = _form(draw)
        given["headers"].setdefault("content-type", kind)
    return method, path, given


def _form(draw: random.Random) -> tuple[bytes, bytes]:
    """A form with some files, perhaps damaged."""
    body = b""
    for number in range(draw.choice((0, 1, 1, 1, 2, 5, 70))):
        content = valid(draw, draw.choice(KINDS)) if draw.random() < 0.8 else _zip(draw)
        content = mutated_bytes(content, draw) if draw.random() < 0.5 else content
        name = draw.choice(("a.png", "..\\x", "a\x00b", "é" * 300, ""))
        field = draw.choice(("files", "file", "name", ""))
        head = f'--b\r\nContent-Disposition: form-data; name="{field}"; filename="{name}{number}"\r\n\r\n'
        body += head.encode() + content + b"\r\n"
    body += b"--b--\r\n"
    return mutated_bytes(body, draw) if draw.random() < 0.3 else body, b"multipart/form-data; boundary=b"


def _zip(draw: random.Random) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(draw.choice(("a/1.png", "../1.png", "1.png")), valid(draw, ("PNG", "L")))
    return buffer.getvalue()
