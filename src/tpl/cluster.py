"""Several machines through Ray: connecting to them, dividing them among jobs, and sending directories between them.

Ray itself is imported when it is asked for: everything else works without it.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpl.errors import TplError
from tpl.files import replace_atomically

TIMEOUT = 10.0  # seconds for an address to answer
OWN = "local"  # what Ray calls a cluster that is started for this process and ends with it
# Ray prints what its machines report on stdout, where answers belong; lines that match this are left out.
_QUIET = ("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
_HINT = (
    "This machine must be one of the cluster's: `ray start --address=HEAD:6379` on it, and give that --address; "
    "see docs/suites.md."
)
MOST_ON_CPU = 8  # jobs on one machine: each takes the memory of a whole run
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# A lock belongs to one machine, and a half-written file to nobody: neither is sent.
_LOCKS = (".lock", ".lock.json")
_PARTIAL = ".partial"


# Connecting


def load_ray() -> Any:
    """The module ray, or an error that says how to get it."""
    os.environ.setdefault(*_QUIET)  # read when Ray is imported
    try:
        import ray
    except ImportError:
        raise TplError("--engine ray needs Ray, which is not installed: pip install 'tpl-cil[ray]'.") from None
    return ray


def connect(address: str | None) -> bool:
    """Connect this process to a cluster; without an address (nor RAY_ADDRESS), to a new one of this machine alone.

    True if it was not connected before: the caller then disconnects with `ray.shutdown()`.
    """
    ray = load_ray()
    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS") or OWN
    _check(ray, address)
    more = {"include_dashboard": False} if address == OWN else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about later versions of Ray
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **more)
    except Exception as error:  # it raises nearly anything: no such cluster, another version of Ray or Python, ...
        ray.shutdown()
        what = "No Ray cluster could be started here" if address == OWN else f"The Ray cluster {address} refuses"
        raise TplError(f"{what}: {_short(error)} {_HINT}") from error
    return True


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
        host = ray.util.get_node_ip_address()  # Ray listens at the address by which others reach this machine
    try:
        socket.create_connection((host, int(port)), TIMEOUT).close()
    except (OSError, OverflowError) as error:
        raise TplError(f"The Ray cluster {address} does not answer ({error}). {_HINT}") from error


def _short(error: Exception) -> str:
    """The first sentence or so of an error of Ray, which may be pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:4]) or type(error).__name__
    return text if text.endswith(".") else f"{text}."


# Dividing machines


@dataclass(frozen=True)
class Machine:
    """The resources of one machine, whoever uses them now."""

    cpus: float
    gpus: float
    node: str = ""  # its id in Ray

    @classmethod
    def all(cls, ray: Any) -> list[Machine]:
        """Every machine of the cluster that is alive."""
        alive = [(node["Resources"], node["NodeID"]) for node in ray.nodes() if node["Alive"]]
        return [cls(offer.get("CPU", 0.0), offer.get("GPU", 0.0), node) for offer, node in alive]


@dataclass(frozen=True)
class Share:
    """What one job takes of a machine."""

    cpus: float
    gpus: float
    threads: int

    def fits(self, machines: Sequence[Machine]) -> int:
        """How many such shares the machines hold."""
        if self.gpus:
            return sum(int(machine.gpus) * _per_gpu(self.gpus) for machine in machines)
        return sum(int(machine.cpus // self.cpus) for machine in machines)

    def __str__(self) -> str:
        return f"{self.gpus:g} GPU" if self.gpus else f"{self.cpus:g} CPU"


def share_out(
    machines: Sequence[Machine], device: str, jobs: int, workers: int | None = None, gpu_share: float | None = None
) -> Share:
    """What each job takes: a part of a GPU; without GPUs, the cores divided by the number of jobs at a time."""
    if device not in ("auto", "cpu", "cuda"):
        raise TplError(f"On a cluster the device is auto, cpu or cuda; got '{device}'. Ray chooses the GPU.")
    if gpu_share is not None and not 0 < gpu_share <= 1:
        raise TplError(f"--gpu-share takes a part of a GPU, above 0 and at most 1, such as 0.5; got {gpu_share:g}.")
    with_gpu = [] if device == "cpu" else [machine for machine in machines if machine.gpus >= 1]
    if not with_gpu and (device == "cuda" or gpu_share is not None):
        reason = "--device cpu was given" if device == "cpu" else "no machine of the cluster has a GPU"
        raise TplError(f"There is no GPU to share: {reason}. Leave out --gpu-share and --device cuda.")
    if with_gpu:
        share = gpu_share or 1.0
        cores = min(machine.cpus / (int(machine.gpus) * _per_gpu(share)) for machine in with_gpu)
        return Share(0, share, max(1, int(cores)))
    usual = sum(int(min(machine.cpus, MOST_ON_CPU)) for machine in machines)
    at_a_time = max(1, min(jobs, workers or usual))
    # The most cores that as many jobs can have; machines differ, and none lends a core to another.
    most = int(max((machine.cpus for machine in machines), default=1))
    cores = next((n for n in range(most, 1, -1) if Share(n, 0, n).fits(machines) >= at_a_time), 1)
    return Share(cores, 0, int(cores))


def _per_gpu(share: float) -> int:
    return math.floor(1 / share + 1e-6)


def chosen_threads(usual: int) -> int:
    """The number of threads set for this process by the environment, or else `usual`."""
    given = (os.environ[name] for name in THREADS if os.environ.get(name, "").isdecimal())
    return max(1, int(next(given, usual)))


def use_threads(number: int) -> None:
    """Compute with this number of threads from here on: this process may have computed with another one before."""
    os.environ.update(dict.fromkeys(THREADS, str(number)))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(number)


# Sending directories: files as bytes, and only those that changed


@dataclass(frozen=True)
class Payload:
    """Files by their path below a directory, and the paths of files that were removed."""

    files: dict[str, bytes] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


class ChangedFiles:
    """A directory whose changes are sent, time after time. What it holds at first is where it is sent already."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._sent = self._status()

    def take(self, only: Sequence[str] | None = None) -> Payload:
        """What changed since the last call, in all files or `only` some. To be called while nobody writes."""
        now = self._status()
        if only is not None:
            now = self._sent | {name: now[name] for name in only if name in now}
        new = [name for name in now if now[name] != self._sent.get(name)]
        removed = tuple(name for name in self._sent if name not in now)
        self._sent = now
        return Payload({name: (self.root / name).read_bytes() for name in new}, removed)

    def _status(self) -> dict[str, tuple[int, int]]:
        status = {name: (self.root / name).stat() for name in _names(self.root)}
        return {name: (found.st_size, found.st_mtime_ns) for name, found in status.items()}


def pack(root: Path) -> Payload:
    """All of a directory, which may not be there."""
    return Payload({name: (root / name).read_bytes() for name in _names(root)})


def unpack(payload: Payload, root: Path, last: Sequence[str] = ()) -> None:
    """Write files into a directory, each in one step. Those in `last`, which refer to others, are written after them.

    Wherever this is cut short, what the files in `last` refer to is there.
    """
    root.mkdir(parents=True, exist_ok=True)
    for name in sorted(payload.files, key=lambda name: last.index(name) if name in last else -1):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(root / name, payload.files[name])
    for name in payload.removed:
        (root / name).unlink(missing_ok=True)
        with suppress(OSError):  # other files are in there
            (root / name).parent.rmdir()


def _names(root: Path) -> list[str]:
    return sorted(
        (Path(folder) / name).relative_to(root).as_posix()
        for folder, _, names in os.walk(root)
        if not folder.endswith(_PARTIAL)
        for name in names
        if name not in _LOCKS and not name.endswith(_PARTIAL)
    )
