"""Requests with anything in them: methods, paths, queries, headers and forms; none is answered with a 500."""

from __future__ import annotations

import io
import logging
import random
import zipfile
from pathlib import Path
from unittest import mock
from urllib.parse import urlencode

from torture.asgi import Application, running
from torture.fuzz import Case, run_attempts
from torture.fuzz_images import KINDS, some
from torture.mutations import VALUES, mutated_bytes
from torture.small_models import learned
from torture.tally import Tally
from tpl.serve.app import create_app
from tpl.serve.jobs import JobQueue
from tpl.serve.model import ModelSource
from tpl.serve.security import Access
from tpl.serve.server import Settings
from tpl.serve.uploads import Limits

TOKEN = "a-token-for-the-torture"
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE")
PATHS = (
    "/",
    "/docs",
    "/../x",
    "/health",
    "/metrics",
    "/model",
    "/predict",
    "/tasks",
    "/tasks/x",
    "/openapi.json",
    "/\0",
)
KEYS = ("top", "tasks", "examples", "pictures", "x")
HEADERS = ("content-length", "content-type", "host", "range", "accept", "expect", "authorization")
CONTENTS = (
    b"0", b"-1", b"9" * 30, b"multipart/form-data", b"multipart/form-data; boundary=", b"[::1].example", b"\xb2",
    b"x" * 999, b"Basic \xff", b"Basic Og==", b"Bearer", b"application/json",
)  # fmt: skip
QUERIES = [str(value)[:2000] for value in VALUES if value != "\ud800"]


def run(seed: int, cases: int, place: Path) -> Tally:
    """Send requests to a server in this process, which does not learn what it accepts."""
    learned(place / "model")
    tally = Tally("requests", seed)
    settings = Settings(Access(TOKEN), Limits(upload=1 << 20))
    source = ModelSource(place / "model", "cpu")
    logging.getLogger("tpl.serve").setLevel(logging.CRITICAL)
    with (
        mock.patch.object(JobQueue, "submit", lambda queue, job: job.archive.unlink()),
        running(create_app(source, settings)) as application,
    ):

        def attempt(draw: random.Random) -> str:
            method, path, query, headers, body = _request(draw)
            Case.text = f"{method} {path} {query[:80]} {str(headers)[:80]} {len(body)} bytes"
            return answered(application, method, path, query, headers, body)

        return run_attempts(tally, cases, attempt)


def answered(
    application: Application, method: str, path: str, query: str, headers: dict[str, bytes], body: bytes
) -> str:
    """The kind of answer to a request; AssertionError for an error of the server's own."""
    status, said, content = application.ask(method, path, query, headers, body)
    broken = status >= 500 and b"retry-after" not in said
    assert not broken, f"{status}: {content[:100]!r}"
    return f"{status // 100}xx"


def _request(draw: random.Random) -> tuple[str, str, str, dict[str, bytes], bytes]:
    """A method, a path, a query, headers and a body."""
    method = draw.choice((*METHODS, "POST", "POST", "POST", "POST"))
    path = draw.choice((*PATHS, "/predict", "/predict", "/tasks"))
    headers, query, body = {}, "", b""
    if draw.random() < 0.5:
        query = urlencode({draw.choice(KEYS): draw.choice(QUERIES) for _ in range(draw.randint(1, 3))})
        query = mutated_bytes(query.encode(), draw).decode("ascii", "replace") if draw.random() < 0.2 else query
    if draw.random() < 0.7:
        headers["authorization"] = f"Bearer {TOKEN}".encode()
    if method not in ("GET", "HEAD", "OPTIONS", "TRACE"):
        body = _form(draw)
        headers["content-type"] = b"multipart/form-data; boundary=b"
    if draw.random() < 0.2:
        headers[draw.choice(HEADERS)] = draw.choice(CONTENTS)
    return method, path, query, headers, body


def _form(draw: random.Random) -> bytes:
    """A form with some files, perhaps damaged."""
    body = b""
    for number in range(draw.choice((0, 1, 1, 1, 1, 1, 2, 5) if draw.random() < 0.98 else (70,))):
        content = some(draw, draw.choice(KINDS)) if draw.random() < 0.8 else _zip(draw)
        content = mutated_bytes(content, draw) if draw.random() < 0.5 else content
        name = draw.choice(("a.png", "..\\x", "a\x00b", "é" * 300, ""))
        field = draw.choice(("files", "file", "name", ""))
        head = f'--b\r\nContent-Disposition: form-data; name="{field}"; filename="{name}{number}"\r\n\r\n'
        body += head.encode() + content + b"\r\n"
    body += b"--b--\r\n"
    return mutated_bytes(body, draw) if draw.random() < 0.3 else body


def _zip(draw: random.Random) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(draw.choice(("a/1.png", "../1.png", "1.png")), some(draw, ("PNG", "L")))
    return buffer.getvalue()
