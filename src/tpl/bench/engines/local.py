"""Runs on this machine: a process each, one to a GPU, or several on the CPU with its cores divided among them."""

from __future__ import annotations

import json
import os
import signal
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import ClassVar

from tpl.bench.engines.base import ATTEMPTS, FAILED, FINISHED, RETRIED, STARTED, Engine, Job, JobEvent
from tpl.bench.engines.process import LOG, start, without_interrupts
from tpl.bench.engines.work import CarryOut, carry_out
from tpl.cluster import THREADS
from tpl.errors import TplError

MOST_ON_CPU = 8  # each takes the memory of a whole run
GRACE = 10.0  # seconds for a process to be gone


@dataclass
class _Worker:
    """A process that carries out one job."""

    job: Job
    attempt: int
    slot: int
    process: BaseProcess
    verdict: JobEvent | None = None

    def crash(self) -> str:
        """How the process ended without a word."""
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
                        ear, process = start(job, self.carry_out, self.environment(slot, slots))
                        working[ear] = _Worker(job, attempt, slot, process)
                    yield JobEvent(job.name, STARTED, {"attempt": attempt, "pid": process.pid})
                for ear in [ear for ear in wait(list(working)) if isinstance(ear, Connection)]:
                    worker = working[ear]
                    event = _hear(ear, worker.job)
                    if event is not None:
                        if event.kind in (FINISHED, FAILED):
                            worker.verdict = event  # it counts when the process has gone
                        else:
                            yield event
                        continue
                    del working[ear]
                    ear.close()
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


def _hear(ear: Connection, job: Job) -> JobEvent | None:
    """The next word of a worker; None when it has gone."""
    try:
        word = json.loads(ear.recv_bytes())
    except (EOFError, OSError):
        return None
    return JobEvent(job.name, word["kind"], word["data"])


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
    for ear, worker in working.items():
        worker.process.join(GRACE)
        if worker.process.exitcode is None:
            worker.process.kill()
            worker.process.join()
        worker.process.close()
        ear.close()
