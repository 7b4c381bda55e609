"""A process for one job: how it is started, and what it does."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tpl.bench.engines.base import Job
from tpl.bench.engines.work import CarryOut

LOG = "worker.log"  # in the run directory: what its processes have printed
_SPAWN = multiprocessing.get_context("spawn")


def start(job: Job, carry_out: CarryOut, environment: Mapping[str, str]) -> tuple[Connection, BaseProcess]:
    """Start a process that carries out a job under some variables of its own. It tells of it through the connection.

    To be called `without_interrupts`: the process never hears Ctrl-C then. It is for the suite to end its workers.
    """
    ear, mouth = _SPAWN.Pipe(duplex=False)
    process = _SPAWN.Process(target=_work, args=(job.to_json(), carry_out, mouth), name=job.name)
    with _environment(environment):
        process.start()
    mouth.close()  # the process holds the only one: its death is heard
    return ear, process


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Variables for a process that starts now: torch reads them once, when it is imported."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back; it comes through afterwards. A process that is started meanwhile never hears it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # else the first process starts it, and that undoes the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In the worker's process


def _work(text: str, carry_out: CarryOut, mouth: Connection) -> None:
    job = Job.from_json(text)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def tell(kind: str, data: dict[str, Any]) -> None:
        mouth.send_bytes(json.dumps({"kind": kind, "data": data}).encode())

    with output_kept(Path(job.directory)):
        carry_out(job, tell)
        mouth.close()
        os._exit(0)  # threads of libraries may still be at work; the run is on disk


@contextmanager
def output_kept(place: Path) -> Iterator[None]:
    """Whatever is printed meanwhile goes into a file: the terminal is the suite's."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        log = os.open(place / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        log = os.open(os.devnull, os.O_WRONLY)  # the run will say what is wrong with its directory
    before = [os.dup(stream) for stream in (1, 2)]
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    try:
        yield
    finally:
        sys.stdout.flush()
        for stream, old in enumerate(before, start=1):
            os.dup2(old, stream)
            os.close(old)


def _end_with_parent() -> None:
    """End as soon as the suite has gone, even by kill -9."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(3)
