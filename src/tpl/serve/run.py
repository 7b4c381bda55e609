"""Binds the port, says where the server is, and serves until it is told to stop."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable

import uvicorn

from tpl.errors import TplError
from tpl.serve.app import Settings, create_app
from tpl.serve.served import Place

BACKLOG = 512


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise TplError(
            f"Cannot listen on {host}, port {port} ({why}); choose another with --host or --port."
        ) from error


def address_of(listening: socket.socket) -> str:
    """What to type into a browser."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(place: Place, settings: Settings, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until interrupted; `ready` is called when the model is loaded and requests are taken."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    app = create_app(place, settings)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nobody's X-Forwarded-For is believed
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=64 << 10,
    )
    ready()
    with contextlib.suppress(KeyboardInterrupt):  # the usual way to stop a server
        uvicorn.Server(config).run(sockets=[listening])
