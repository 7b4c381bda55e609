"""Runs on this machine: a process each, one to a GPU, or several on the CPU with its cores divided among them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

from tpl import program
from tpl.bench.engines.base import (
    ATTEMPTS,
    FAILED,
    FINISHED,
    LOG,
    RETRIED,
    STARTED,
    CarryOut,
    Engine,
    Job,
    JobEvent,
    carry_out,
    output_kept,
    try_job,
    without_interrupts,
)
from tpl.cluster import MOST_ON_CPU, THREADS
from tpl.errors import TplError

GRACE = 10.0  # seconds for a process to be gone
_SPAWN = multiprocessing.get_context("spawn")


@dataclass
class _Worker:
    """A process that carries out one job."""

    job: Job
    attempt: int
    slot: int
    process: BaseProcess
    verdict: JobEvent | None = None

    def crash(self) -> str:
        """How the process ended without a last message."""
        code = self.process.exitcode
        if code is not None and code < 0:
            hint = ": it may have run out of memory" if -code == getattr(signal, "SIGKILL", 9) else ""
            return f"its process was killed by signal {-code}{hint}"
        return f"its process ended with exit code {code}; {Path(self.job.directory) / LOG} may say why"


class LocalEngine(Engine):
    """Worker processes on this machine."""

    name: ClassVar[str] = "local"

    def __init__(self, device: str = "auto", workers: int | None = None) -> None:
        if device not in ("auto", "cpu", "cuda"):
            raise TplError(
                f"The device of a suite is auto, cpu or cuda; got '{device}'. A suite takes all GPUs it can see: "
                "choose some with CUDA_VISIBLE_DEVICES=0,1."
            )
        self.gpus = [] if device == "cpu" else visible_gpus()
        if device == "cuda" and not self.gpus:
            raise TplError("There is no GPU here; use --device cpu or auto.")
        self.workers = workers
        self.carry_out: CarryOut = carry_out  # what a worker does with a job

    def slots(self, jobs: int) -> int:
        """One a GPU; without one, one a core, but no more than MOST_ON_CPU."""
        return max(1, min(jobs, self.workers or len(self.gpus) or min(cores(), MOST_ON_CPU)))

    def environment(self, slot: int, slots: int) -> dict[str, str]:
        """What sets a worker's process apart: its GPU, or its share of the cores. Threads that you have set stay."""
        mine = {"CUDA_VISIBLE_DEVICES": self.gpus[slot % len(self.gpus)]} if self.gpus else {}
        if not any(name in os.environ for name in THREADS):
            mine |= dict.fromkeys(THREADS, str(max(1, cores() // slots)))
        return mine

    def run(self, jobs: Sequence[Job]) -> Generator[JobEvent]:
        """Carry out all jobs, each in a process of its own."""
        waiting = deque((job, 1) for job in jobs)
        slots = self.slots(len(jobs))
        free = list(range(slots))
        working: dict[Connection, _Worker] = {}
        try:
            while waiting or working:
                while waiting and free:
                    (job, attempt), slot = waiting.popleft(), free.pop(0)
                    with without_interrupts():  # no process without its entry: it would never be ended
                        messages, process = _start(job, self.carry_out, self.environment(slot, slots))
                        working[messages] = _Worker(job, attempt, slot, process)
                    yield JobEvent(job.name, STARTED, {"attempt": attempt, "pid": process.pid})
                for messages in [one for one in wait(list(working)) if isinstance(one, Connection)]:
                    worker = working[messages]
                    event = _receive(messages, worker.job)
                    if event is not None:
                        if event.kind in (FINISHED, FAILED):
                            worker.verdict = event  # it counts when the process has gone
                        else:
                            yield event
                        continue
                    del working[messages]
                    messages.close()
                    free.append(worker.slot)
                    end = _end(worker)
                    if end.kind == RETRIED:
                        waiting.appendleft((worker.job, worker.attempt + 1))
                    yield end
        finally:
            with without_interrupts():  # an impatient second Ctrl-C leaves nobody behind
                _stop(working)


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    count = torch.cuda.device_count()
    named = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    return named[:count] if named else [str(number) for number in range(count)]


def _start(job: Job, carry_out: CarryOut, environment: Mapping[str, str]) -> tuple[Connection, BaseProcess]:
    """Start a process that carries out a job under some variables of its own, and the connection with its messages.

    To be called `without_interrupts`: the process never gets Ctrl-C then. It is for the suite to end its workers.
    """
    messages, sender = _SPAWN.Pipe(duplex=False)
    process = _SPAWN.Process(target=_work, args=(job.to_json(), carry_out, sender), name=job.name)
    with _environment(environment):
        process.start()
    sender.close()  # the process holds the only one: its death ends the connection
    return messages, process


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


def _receive(messages: Connection, job: Job) -> JobEvent | None:
    """The next message of a worker; None when it has gone."""
    try:
        kind, data = json.loads(messages.recv_bytes())
    except (EOFError, OSError):
        return None
    return JobEvent(job.name, kind, data)


def _end(worker: _Worker) -> JobEvent:
    """What becomes of a job whose process has gone."""
    worker.process.join(GRACE)
    verdict = worker.verdict or JobEvent(worker.job.name, FAILED, {"error": worker.crash(), "final": False})
    if worker.process.exitcode is None:  # it has closed its end, and yet it stays
        worker.process.kill()
        worker.process.join()
    worker.process.close()
    if verdict.kind == FINISHED:
        return verdict
    again = not verdict.data["final"] and worker.attempt < ATTEMPTS
    return JobEvent(worker.job.name, RETRIED if again else FAILED, {"error": verdict.data["error"]})


def _stop(working: Mapping[Connection, _Worker]) -> None:
    """End all processes. They may be at anything: a run directory stands that."""
    for worker in working.values():
        worker.process.terminate()
    for messages, worker in working.items():
        worker.process.join(GRACE)
        if worker.process.exitcode is None:
            worker.process.kill()
            worker.process.join()
        worker.process.close()
        messages.close()


# In the worker's process


def _work(text: str, carry_out: CarryOut, sender: Connection) -> None:
    program.claim()
    job = Job.from_json(text)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def emit(kind: str, data: dict[str, Any]) -> None:
        sender.send_bytes(json.dumps((kind, data)).encode())

    with output_kept(Path(job.directory)):
        failure = try_job(carry_out, job, emit)
        emit(FAILED if failure else FINISHED, failure or {})
        sender.close()
        os._exit(0)  # threads of libraries may still be at work; the run is on disk


def _end_with_parent() -> None:
    """End as soon as the suite has gone, even by kill -9."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(3)
