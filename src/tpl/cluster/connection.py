"""Connecting to a Ray cluster: one that is there, or a small one of this machine's own."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from typing import Any

from tpl.errors import TplError

PATIENCE = 10.0  # seconds for an address to answer
OWN = "local"  # what Ray calls a cluster that is started for this process and ends with it
# Ray prints what its machines report on stdout, where answers belong; lines like this are left out.
_SILENCE = ("RAY_DEDUP_LOGS_SKIP_REGEX", ".")


def load_ray() -> Any:
    """The module ray, or an error that says how to get it."""
    os.environ.setdefault(*_SILENCE)  # read when Ray is imported
    try:
        import ray
    except ImportError:
        raise TplError("--engine ray needs Ray, which is not installed: pip install 'tpl-cil[ray]'.") from None
    return ray


def connect(address: str | None) -> bool:
    """Connect this process to a cluster; without an address (nor RAY_ADDRESS), to a new one of this machine alone.

    True if it was not connected before: who called then disconnects with `ray.shutdown()`.
    """
    ray = load_ray()
    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS") or OWN
    _check(ray, address)
    more = {"include_dashboard": False} if address == OWN else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Ray's own future
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **more)
    except Exception as error:  # it raises nearly anything: no such cluster, another version of Ray or Python, ...
        ray.shutdown()
        what = "No Ray cluster could be started here" if address == OWN else f"The Ray cluster {address} refuses"
        raise TplError(f"{what}: {_short(error)} {_HINT}") from error
    return True


_HINT = (
    "This machine must be one of the cluster's: `ray start --address=HEAD:6379` on it, and give that --address; "
    "see docs/suites.md."
)


def _check(ray: Any, address: str) -> None:
    """Find out at once that nobody answers: Ray itself would wait for a minute."""
    if address.startswith("ray://"):
        raise TplError(f"{address} is an address of Ray's client, which cannot be used here. {_HINT}")
    if address in (OWN, "auto"):
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise TplError(f"--address takes HOST:PORT, such as 10.0.0.1:6379, or auto; got '{address}'.")
    host = host.strip("[]")
    if host in ("localhost", "127.0.0.1", "::1"):
        host = ray.util.get_node_ip_address()  # as Ray does: to itself, this machine is what others call it
    try:
        socket.create_connection((host, int(port)), PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise TplError(f"The Ray cluster {address} does not answer ({error}). {_HINT}") from error


def _short(error: Exception) -> str:
    """The first sentence or so of an error of Ray, which may be pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:4]) or type(error).__name__
    return text if text.endswith(".") else f"{text}."
