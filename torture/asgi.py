"""Requests to an application in this process, without sockets, threads or a client library."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI


class Application:
    """A running application."""

    def __init__(self, app: FastAPI, loop: asyncio.AbstractEventLoop) -> None:
        self.app, self.loop = app, loop

    def ask(
        self, method: str, path: str, query: str, headers: dict[str, bytes], body: bytes
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        """Status, headers and content of an answer."""
        given = {"host": b"localhost", "content-length": str(len(body)).encode()} | headers
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": quote(path, errors="replace").encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
        }
        return self.loop.run_until_complete(self._ask(scope, body))

    async def _ask(self, scope: dict[str, Any], body: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
        sent: list[Any] = []
        parts = [body[at : at + 65536] for at in range(0, len(body), 65536)] or [b""]
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if parts:
                part = parts.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(parts)}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        start = sent[0]
        return start["status"], dict(start["headers"]), b"".join(message.get("body", b"") for message in sent[1:])


@contextmanager
def running(app: FastAPI) -> Iterator[Application]:
    """Start an application's background work, and stop it at the end."""
    loop = asyncio.new_event_loop()
    lifespan = app.router.lifespan_context(app)
    loop.run_until_complete(lifespan.__aenter__())
    try:
        yield Application(app, loop)
    finally:
        loop.run_until_complete(lifespan.__aexit__(None, None, None))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
