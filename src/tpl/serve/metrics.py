"""What the server counts, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = ("GET", "HEAD", "POST")

__all__ = ["CONTENT_TYPE_LATEST", "Metrics", "Timed"]


class Metrics:
    """One registry an application: two in one process do not mix."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        by_route = ("method", "route", "status")
        self.requests = Counter("tpl_requests", "Requests by route and status.", by_route, registry=own)
        self.seconds = Histogram("tpl_request_seconds", "Time to answer, by route.", ("route",), registry=own)
        self.images = Counter("tpl_images", "Images by outcome: answered or unreadable.", ("outcome",), registry=own)
        sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
        self.batch = Histogram("tpl_batch_images", "Images that shared one pass.", buckets=sizes, registry=own)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A number that is read when somebody asks."""
        Gauge(name, text, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)


class Timed:
    """Counts and times every request, refused ones too."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and look at the clock."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        finally:
            # Patterns, not what was sent: a scanner must not make a new series with every guess.
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.metrics.requests.labels(method, route, status).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - begun)
