"""Access: tokens, host names, limits of requests, and what browsers are told not to do."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from fastapi.responses import HTMLResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tpl.errors import TplError
from tpl.serve.errors import Refusal
from tpl.serve.uploads import MIB, Limits

MIN_TOKEN, MAX_TOKEN = 16, 4096
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
# These pages contain nothing about the model: a browser can send a token only after it has loaded one of them.
PAGES = ("/", "/docs")
PREDICT = "/predict"  # the only POST that changes nothing
LABEL_STUDIO = "/label-studio"  # below it, the token may be the password of HTTP Basic: Label Studio has no other way
ALWAYS = ("/health", "/metrics")  # answered however many requests there are

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Access:
    """The token, whether every request needs it, and the host names that a browser may use (empty: any)."""

    token: str
    everything: bool = False
    hosts: tuple[str, ...] = ()

    def needs_token(self, method: str, path: str) -> bool:
        """Whether a request must carry the token."""
        if method in SAFE_METHODS and path in PAGES:
            return False
        if self.everything:
            return True
        return method not in SAFE_METHODS and path.rstrip("/") != PREDICT

    def accepts(self, headers: Headers, path: str = "") -> bool:
        """Whether the request carries the token, compared in constant time."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "basic" and path.startswith(f"{LABEL_STUDIO}/"):
            scheme, given = "bearer", _password(given)
        right = hmac.compare_digest(given.strip().encode(), self.token.encode())
        return scheme.lower() == "bearer" and right


def _password(credentials: str) -> str:
    """The password of HTTP Basic; empty if there is none."""
    try:
        return base64.b64decode(credentials.strip(), validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
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
            with file.open(encoding="utf-8") as stream:
                token = stream.read(MAX_TOKEN).strip()  # of a pipe, too, but not all of /dev/zero
        except (OSError, UnicodeDecodeError) as error:
            raise TplError(f"The token file {file} cannot be read ({error}).") from error
        return _checked(token, f"The token in {file}"), False
    if given := os.environ.get("TPL_TOKEN", "").strip():
        return _checked(given, "TPL_TOKEN"), False
    return secrets.token_urlsafe(32), True


def _checked(token: str, where: str) -> str:
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise TplError(
            f"{where} must have at least {MIN_TOKEN} letters, digits or signs in one line; make one with: "
            "openssl rand -hex 32"
        )
    return token


class AccessMiddleware:
    """Refuses requests without access before a byte of their body is read, and adds the security headers.

    starlette's own middleware for hosts and body sizes is not used: it answers in plain text, with other statuses.
    """

    def __init__(self, app: ASGIApp, access: Access, limits: Limits) -> None:
        self.app, self.access, self.limits = app, access, limits
        self.active = 0  # requests in progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await asyncio.wait_for(send(message), self.limits.body_seconds)  # a client may stop reading

        try:
            self._check(scope)
        except Refusal as refusal:
            await refusal.response()(scope, receive, send_safely)
            return
        counted = int(not _always(scope))
        self.active += counted
        try:
            await self.app(scope, self._limited(receive), send_safely)
        finally:
            self.active -= counted

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = _host_name(headers.get("host", ""))
        if self.access.hosts and host not in self.access.hosts:
            # Otherwise a web page whose name resolves to this machine could read answers (DNS rebinding).
            raise Refusal(421, f"This server does not answer for the host {host!r}; open it by its address.")
        if self.access.needs_token(scope["method"], scope["path"]) and not self.access.accepts(headers, scope["path"]):
            raise Refusal(
                401,
                "This needs the server's token, as the header 'Authorization: Bearer TOKEN'.",
                WWW_Authenticate="Bearer",
            )
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit() and len(length) < 20):
            raise Refusal(400, "The Content-Length header is not a number.")
        if int(length) > self.limits.upload:
            raise self._too_large()
        if self.active >= self.limits.requests and not _always(scope):
            raise Refusal(503, "Too many requests at the same time; try again.", Retry_After="1")

    def _limited(self, receive: Receive) -> Receive:
        """The request's body, with an error when it gets too long or stalls."""
        total, complete, start = 0, False, time.monotonic()

        async def receive_limited() -> Message:
            nonlocal total, complete
            if complete:  # the next message is the client's disconnect, at any time
                return await receive()
            allowed = self.limits.body_seconds + total / self.limits.body_rate - (time.monotonic() - start)
            try:
                message = await asyncio.wait_for(receive(), max(allowed, 0))
            except TimeoutError:
                raise Refusal(408, "The request's body was not sent completely; send it again.") from None
            complete = not message.get("more_body", False)
            total += len(message.get("body", b""))
            if total > self.limits.upload:
                raise self._too_large()
            return message

        return receive_limited

    def _too_large(self) -> Refusal:
        return Refusal(413, f"The request is larger than {self.limits.upload // MIB} MiB, this server's limit.")


def _always(scope: Scope) -> bool:
    return scope["method"] in SAFE_METHODS and scope["path"] in ALWAYS


_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?", re.IGNORECASE)


def _host_name(host: str) -> str:
    """The name in a Host header, without the port; what is no name and port stays as it is."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2] if found else host).lower()


def page(name: str) -> HTMLResponse:
    """One of the package's pages; its own script and style are allowed by their hashes, nothing from other hosts."""
    text = _file(name)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(text, 'script')}",
            f"style-src {_hashes(text, 'style')}",
            "img-src 'self' data: blob:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return HTMLResponse(text, headers={"Content-Security-Policy": policy})


def _file(name: str) -> str:
    """One of the package's files, with the files that it names in double braces in their places."""
    text = files("tpl.serve").joinpath(name).read_text(encoding="utf-8")
    return re.sub(r"\{\{ ([\w. ]+) \}\}", lambda found: "\n".join(map(_file, found[1].split())), text)


def _hashes(text: str, tag: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in found)
