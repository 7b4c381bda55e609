"""Who may ask: tokens, hosts, and what every answer tells a browser not to do."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tpl.errors import TplError
from tpl.serve.errors import Refusal
from tpl.serve.limits import MIB, Limits

SHORTEST_TOKEN = 16
READING = ("GET", "HEAD", "OPTIONS")
# Pages without a word about the model: a browser cannot send a token before it has them.
PAGES = ("/", "/docs")
ASKING = ("/predict",)  # the one thing that is sent but changes nothing

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Access:
    """The token, and what it is asked for. `hosts` are the names a browser may use; empty: any."""

    token: str
    everything: bool = False
    hosts: tuple[str, ...] = ()

    def needs_token(self, method: str, path: str) -> bool:
        """Whether a request must carry the token."""
        if method in READING and path in PAGES:
            return False
        if self.everything:
            return True
        return method not in READING and path.rstrip("/") not in ASKING

    def accepts(self, headers: Headers) -> bool:
        """Whether the request carries the token, compared in constant time."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), self.token.encode())
        return scheme.lower() == "bearer" and right


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def find_token(file: Path | None) -> tuple[str, bool]:
    """The token from a file, else from TPL_TOKEN, else a new one; and whether it is new."""
    if file is not None:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise TplError(f"The token file {file} cannot be read ({error}).") from error
        return _checked(token, f"The token in {file}"), False
    if given := os.environ.get("TPL_TOKEN", "").strip():
        return _checked(given, "TPL_TOKEN"), False
    return secrets.token_urlsafe(32), True


def _checked(token: str, where: str) -> str:
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise TplError(
            f"{where} must have at least {SHORTEST_TOKEN} letters, digits or signs in one line; make one with: "
            "openssl rand -hex 32"
        )
    return token


class Gate:
    """The outermost layer: refuses what may not enter before a byte of its body is read."""

    def __init__(self, app: ASGIApp, access: Access, limits: Limits) -> None:
        self.app, self.access, self.limits = app, access, limits
        self.inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it here."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._check(scope)
        except Refusal as refusal:
            await refusal.response()(scope, receive, send_safely)
            return
        self.inside += 1
        try:
            await self.app(scope, self._counted(receive), send_safely)
        finally:
            self.inside -= 1

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = _host_name(headers.get("host", ""))
        if self.access.hosts and host not in self.access.hosts:
            # A web page whose name was pointed at this machine would otherwise read answers (DNS rebinding).
            raise Refusal(421, f"This server does not answer for the host {host!r}; open it by its address.")
        if self.access.needs_token(scope["method"], scope["path"]) and not self.access.accepts(headers):
            raise Refusal(
                401,
                "This needs the server's token, as the header 'Authorization: Bearer TOKEN'.",
                WWW_Authenticate="Bearer",
            )
        length = headers.get("content-length", "0")
        if not length.isdigit():
            raise Refusal(400, "The Content-Length header is no number.")
        if int(length) > self.limits.upload:
            raise self._too_large()
        if self.inside >= self.limits.requests:
            raise Refusal(503, "Too many requests at the same time; try again.", Retry_After="1")

    def _counted(self, receive: Receive) -> Receive:
        """The body, cut off where it gets too long or stops coming."""
        total, complete = 0, False

        async def counted() -> Message:
            nonlocal total, complete
            if complete:  # what comes now is the client's leaving, which may take any time
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), self.limits.body_seconds)
            except TimeoutError:
                raise Refusal(408, "The request's body stopped coming; send it again.") from None
            complete = not message.get("more_body", False)
            total += len(message.get("body", b""))
            if total > self.limits.upload:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> Refusal:
        return Refusal(413, f"The request is larger than {self.limits.upload // MIB} MiB, the most this server takes.")


def _host_name(host: str) -> str:
    """The name in a Host header, without the port."""
    if host.startswith("["):
        return host.partition("]")[0].lstrip("[").lower()
    return host.partition(":")[0].lower()
