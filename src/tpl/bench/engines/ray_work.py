"""What a worker of the Ray engine does, wherever its machine is: carry a job out, and tell of it as it goes.

If the machine sees the suite's directory, the run is made there. If not, it is made in a temporary directory: what an
earlier attempt has left comes along, and files that changed are sent back after every task and at the end.
"""

from __future__ import annotations

import os
import queue
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpl._version import __version__
from tpl.bench.engines.base import FAILED, FINISHED, Job
from tpl.bench.engines.process import output_kept
from tpl.bench.engines.work import CarryOut
from tpl.cluster import Baggage, Parcel, load_ray, unpack, use_threads
from tpl.errors import TplError

ARRIVED, FILES = "arrived", "files"  # words of a worker to its engine, beside those of a job
LOG = "events.jsonl"  # others look into it to see how far a run is
PAUSE = 5.0  # seconds between two copies of it

Word = tuple[str, Any]


@dataclass(frozen=True)
class Errand:
    """What a worker has to know beside its job."""

    threads: int
    folder: str  # the suite's current one: a class-order file may be named relative to it
    mark: str | None  # a file in the suite's directory; who sees it works there
    baggage: tuple[Any, ...] = ()  # where Ray keeps the Parcel that an earlier attempt has left, if any
    version: str = __version__


def work(text: str, carry_out: CarryOut, errand: Errand) -> Iterator[Word]:
    """Carry out a job. Its words come while it works; the last is whether it finished or failed."""
    job = Job.from_json(text)
    away = errand.mark is None or not Path(errand.mark).exists()
    yield ARRIVED, {"pid": os.getpid(), "node": socket.gethostname(), "away": away}
    if os.path.isdir(errand.folder):
        os.chdir(errand.folder)
    if problem := _missing(job, errand):
        yield FAILED, {"error": problem, "final": True}
        return
    with _directory(job, away, errand) as place:
        words: queue.SimpleQueue[Word | None] = queue.SimpleQueue()
        # Ray takes words from this thread alone, so that the run gets one of its own.
        arguments = (replace(job, directory=str(place)), carry_out, away, errand.threads, words)
        threading.Thread(target=_run, args=arguments, name=job.name, daemon=True).start()
        while (word := words.get()) is not None:
            yield word


def _run(job: Job, carry_out: CarryOut, away: bool, threads: int, words: queue.SimpleQueue[Word | None]) -> None:
    use_threads(threads)
    place = Path(job.directory)
    baggage = Baggage(place) if away else None
    quiet_until = 0.0

    def tell(kind: str, data: dict[str, Any]) -> None:
        nonlocal quiet_until
        whole = kind in ("stage", FINISHED, FAILED)
        if baggage is not None and (whole or time.monotonic() >= quiet_until):
            quiet_until = time.monotonic() + PAUSE
            sys.stdout.flush()
            words.put((FILES, baggage.changes(None if whole else [LOG])))  # they arrive before what tells of them
        words.put((kind, data))

    try:
        with output_kept(place):
            carry_out(job, tell)
    except BaseException as error:  # not the job's own, which it tells itself: a full disk, say
        words.put((FAILED, {"error": f"{type(error).__name__}: {error}", "final": False}))
    finally:
        words.put(None)


def _missing(job: Job, errand: Errand) -> str | None:
    """What this machine lacks."""
    here = socket.gethostname()
    if errand.version != __version__:
        return f"{here} has tpl {__version__}, the suite {errand.version}: install the same on all machines."
    wanted = {name: job.spec[name] for name in ("data", "weights") if job.spec[name] is not None}
    file, _, _ = job.spec["order"].rpartition(":")
    if file.lower().endswith(".json"):
        wanted["order"] = file
    for name, path in wanted.items():
        if not Path(path).expanduser().exists() and not (name == "data" and job.spec["download"]):
            return (
                f"{name} = {path} is not on {here}: put it at the same place on every machine of the cluster, "
                "or on a file system that all of them see."
            )
    return None


@contextmanager
def _directory(job: Job, away: bool, errand: Errand) -> Iterator[Path]:
    """Where the run is made."""
    if not away:
        yield Path(job.directory)
        return
    root = Path(tempfile.gettempdir()) / f"tpl-ray-{os.getuid() if hasattr(os, 'getuid') else ''}"
    mine = f"{socket.gethostname()}-{os.getpid()}"
    place = root / mine / job.name
    try:
        _sweep(root)
        shutil.rmtree(place.parent, ignore_errors=True)
        place.mkdir(parents=True)
        if errand.baggage:
            parcel: Parcel = load_ray().get(errand.baggage[0])
            unpack(parcel, place)
    except OSError as error:
        raise TplError(f"{place} on {socket.gethostname()} cannot be written: {error}.") from error
    try:
        yield place
    finally:
        shutil.rmtree(place.parent, ignore_errors=True)


def _sweep(root: Path) -> None:
    """Remove what killed workers of this machine have left."""
    from tpl.bench.results import is_alive

    for left in root.glob(f"{socket.gethostname()}-*"):
        pid = left.name.rpartition("-")[2]
        if pid.isdecimal() and not is_alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
