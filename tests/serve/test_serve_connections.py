"""Connections that bring no request keep nobody out, and the log stays short."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from conftest import TOKEN, Opener
from tpl.serve import server as server_module
from tpl.serve.app import bind
from tpl.serve.connections import OncePerMinute, allowed_connections, uvicorn_settings
from tpl.serve.jobs import without_paths
from tpl.serve.security import Access, AccessMiddleware
from tpl.serve.uploads import Limits

HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
SLOW_BODY = b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\nx"


async def reads_everything(scope: Any, receive: Any, send: Any) -> None:
    """An application that reads a request's body before it answers."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def running(limits: Limits) -> Iterator[int]:
    """The port of a server with these limits."""
    app = AccessMiddleware(reads_everything, Access(TOKEN), limits)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", **uvicorn_settings(limits)))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        server.should_exit = server.force_exit = True
        thread.join(20)


def connect(port: int, sent: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=10)
    client.sendall(sent)
    return client


def answered(port: int, request: bytes = HEALTH) -> bytes:
    with closing(connect(port, request)) as client:
        return client.recv(100)


def ended(client: socket.socket) -> bool:
    """Whether the server closes a connection, perhaps after an answer."""
    with closing(client):
        try:
            while client.recv(1000):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        return True


def test_half_open_connections_keep_nobody_out() -> None:
    with running(Limits(connections=8, header_seconds=60)) as port:
        half_open = [connect(port, b"GET /health HTTP/1.1\r\n") for _ in range(40)]
        assert b"200 OK" in answered(port)
        assert sum(ended(client) for client in half_open[:32]) == 32  # the oldest were closed
        for client in half_open[32:]:
            client.close()


def test_a_header_that_does_not_arrive_is_given_up() -> None:
    with running(Limits(header_seconds=0.3)) as port:
        for start in (b"", b"GET /health HTTP/1.1\r\nHost:", HEALTH + b"GET /"):  # the last one after an answer
            began = time.monotonic()
            assert ended(connect(port, start)) and time.monotonic() - began < 5


def test_slow_bodies_leave_health_alone_and_are_given_up() -> None:
    with running(Limits(requests=4, body_seconds=1)) as port:
        slow = [connect(port, SLOW_BODY) for _ in range(6)]
        time.sleep(0.3)
        assert b"503" in answered(port, SLOW_BODY[:-1])
        assert b"200 OK" in answered(port)
        for client in slow:
            assert ended(client)
        assert b"200 OK" in answered(port, SLOW_BODY.replace(b"1000000", b"1"))


def test_a_body_that_trickles_is_given_up_however_often_a_byte_comes() -> None:
    with running(Limits(body_seconds=0.5, body_rate=1000)) as port, closing(connect(port, SLOW_BODY)) as client:
        client.settimeout(0.05)
        began, found = time.monotonic(), b""
        while not found and time.monotonic() - began < 10:
            try:
                client.sendall(b"x")
                found = client.recv(100)
            except TimeoutError:
                continue
    assert time.monotonic() - began < 5


def test_no_answer_waits_for_the_acknowledgement_of_its_header() -> None:
    with bind("127.0.0.1", 0) as listening, closing(socket.create_connection(listening.getsockname())):
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_connections_leave_files_for_the_rest() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert allowed_connections(10) == 10
    assert allowed_connections(10**9) < 10**9 or hard == resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_log_has_one_line_of_a_kind_a_minute() -> None:
    once = OncePerMinute(seconds=0.2)

    def record(text: str, *values: object) -> logging.LogRecord:
        return logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, text, values, None)

    assert [once.filter(record("bad request %s", i)) for i in range(100)] == [True] + [False] * 99
    assert once.filter(record("something else"))
    time.sleep(0.25)
    later = record("bad request %s", 100)
    assert once.filter(later)
    assert later.getMessage() == "bad request 100 (99 more like this since)"


def test_a_client_that_leaves_is_no_fault_of_the_server(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    app = opened().app
    sent: list[Any] = []
    body = [{"type": "http.request", "body": b"--b\r\n", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return body.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"multipart/form-data; boundary=b")]
    scope = {"type": "http", "method": "POST", "path": "/predict", "raw_path": b"/predict", "query_string": b""}
    scope |= {"headers": headers, "http_version": "1.1", "scheme": "http", "client": None, "server": None}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 499 and not caplog.records


def test_uploads_of_a_killed_server_are_deleted_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module.tempfile, "gettempdir", lambda: str(tmp_path))
    abandoned, used, fresh, other = (
        tmp_path / f"{name}" for name in ("tpl-serve-a", "tpl-serve-b", "tpl-serve-c", "x")
    )
    for folder in (abandoned, used, fresh, other):
        folder.mkdir()
        (folder / "upload.zip").write_bytes(b"private")
    (tmp_path / "tpl-serve-link").symlink_to(other)
    monkeypatch.setattr(server_module, "NEW_SPOOL", -1.0)
    with server_module.FileLock(used / server_module.LOCK):
        server_module._delete_abandoned_spools()
    assert not abandoned.exists() and used.exists() and (other / "upload.zip").exists()
    monkeypatch.setattr(server_module, "NEW_SPOOL", 60.0)
    fresh.mkdir(exist_ok=True)
    server_module._delete_abandoned_spools()
    assert fresh.exists()


def test_messages_about_jobs_have_no_folders_of_the_server() -> None:
    text = "/srv/models/m is damaged: '/home/me/tasks/000/task-0.safetensors' (see docs/learn.md; a/b)"
    assert without_paths(text) == "m is damaged: 'task-0.safetensors' (see docs/learn.md; a/b)"
    assert without_paths("see https://example.org/a/b") == "see https://example.org/a/b"
