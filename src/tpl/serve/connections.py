"""Connections: how many there may be, how long a request may take to arrive, and how often the log says so."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from tpl.serve.uploads import Limits

BACKLOG = 128  # connections that the system accepts before the server has seen them
RESERVED = 128  # open files for uploads, the model and the worker
MINUTE = 60.0


def allowed_connections(wanted: int) -> int:
    """The number of connections that this process has files for; its limit of open files is raised if possible."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + BACKLOG + RESERVED
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, raised), hard))
        soft = max(soft, raised)
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, max(16, soft - BACKLOG - RESERVED))


def limited_protocol(limits: Limits) -> type[H11Protocol]:
    """uvicorn's protocol with a limit of connections and a time for a request's header to arrive.

    When there are too many connections, the one that has waited longest without a request is closed. So half-open
    connections never keep a new client out, and a health check always gets in.
    """

    class LimitedProtocol(H11Protocol):
        most: ClassVar[int] = allowed_connections(limits.connections)
        idle: ClassVar[dict[LimitedProtocol, asyncio.TimerHandle]] = {}  # oldest first; without a request in progress

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._note()
            if len(self.connections) > self.most:
                oldest = next(iter(self.idle))  # at worst this one: all others have requests in progress
                oldest._forget()
                oldest.connections.discard(oldest)  # now: the loop tells of an end only later
                oldest.transport.abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._note()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._note()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._forget()

        def _note(self) -> None:
            """Begin or end the time in which a request's header must arrive."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._forget()
            elif self not in self.idle and not self.transport.is_closing():
                self.idle[self] = self.loop.call_later(limits.header_seconds, self.transport.abort)

        def _forget(self) -> None:
            if timer := self.idle.pop(self, None):
                timer.cancel()

    return LimitedProtocol


class OncePerMinute(logging.Filter):
    """Lets one line of a kind pass in a minute, with the number of those that were left out since the last one."""

    def __init__(self, seconds: float = MINUTE) -> None:
        super().__init__()
        self.seconds = seconds
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        kind = record.name, str(record.msg)[:80]
        last, left_out = self._seen.get(kind, (-self.seconds, 0))
        now = time.monotonic()
        if now - last < self.seconds:
            self._seen[kind] = last, left_out + 1
            return False
        if len(self._seen) > 1000:  # kinds are texts of programs, but some contain what a client sent
            self._seen.clear()
        self._seen[kind] = now, 0
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more like this since)", ()
        return True


def set_up_log() -> None:
    """Log to stderr, a line a minute of each kind."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(OncePerMinute())
    logging.basicConfig(handlers=[handler])


def uvicorn_settings(limits: Limits) -> dict[str, Any]:
    """Settings of uvicorn that belong to connections and the log."""
    return {
        "http": limited_protocol(limits),
        "ws": "none",
        "backlog": BACKLOG,
        "log_config": None,  # to the root logger, which lets a line a minute pass
        "log_level": "warning",
        "access_log": False,
        "h11_max_incomplete_event_size": 64 << 10,
    }
