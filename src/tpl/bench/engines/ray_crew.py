"""The tasks of Ray that carry out jobs, as the machine that asked for them sees them."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpl.bench.engines.base import ATTEMPTS, FAILED, FINISHED, RETRIED, STARTED, Job, JobEvent
from tpl.bench.engines.process import without_interrupts
from tpl.bench.engines.ray_work import ARRIVED, FILES, Errand, work
from tpl.bench.engines.work import CarryOut
from tpl.cluster import Room, Share, chosen_threads, pack, unpack
from tpl.errors import TplError
from tpl.store import ModelStore

TICK = 1.0  # seconds: as often, machines that have come or gone are counted
GRACE = 10.0  # seconds for a cancelled task to be gone
# The files of a run directory that tell of others in it: see `tpl.bench.run`.
LAST = ("model/model.json", "results.json")


@dataclass
class _Worker:
    """A task that carries out one job, or waits for a machine that has room for it."""

    job: Job
    attempt: int
    node: str = ""
    verdict: JobEvent | None = None
    held: ExitStack = field(default_factory=ExitStack)  # the run directory, while another machine makes its files

    @property
    def place(self) -> Path:
        return Path(self.job.directory)


class Crew:
    """Who works on which job, and what they tell."""

    def __init__(
        self,
        ray: Any,
        jobs: Sequence[Job],
        share: Share,
        workers: int | None,
        carry_out: CarryOut,
        mark: Path | None,
    ) -> None:
        self.ray, self.share, self.workers, self.carry_out = ray, share, workers, carry_out
        self.errand = Errand(chosen_threads(share.threads), os.getcwd(), None if mark is None else str(mark))
        self.waiting = deque((job, 1) for job in jobs)
        self.working: dict[Any, _Worker] = {}  # by the stream of words that its task gives
        self.task = ray.remote(work).options(
            num_cpus=share.cpus,
            num_gpus=share.gpus,
            num_returns="streaming",
            max_retries=0,  # it is for us to start it again, with what it has left
            scheduling_strategy="SPREAD",
            name="tpl suite",
        )
        self._room, self._counted, self._warned = 0, -TICK, False

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.waiting or self.working)

    def engage(self) -> Iterator[JobEvent]:
        """Start what there is room for. Machines may come and go meanwhile."""
        if time.monotonic() - self._counted >= TICK:
            self._room, self._counted = self.share.fits(Room.of_all(self.ray)), time.monotonic()
        while self.waiting and len(self.working) < (self.workers or max(self._room, 1)):
            job, attempt = self.waiting.popleft()
            errand = self._errand(job)
            with without_interrupts():  # no task without its entry: it would never be cancelled
                words = self.task.remote(job.to_json(), self.carry_out, errand)
                self.working[words] = _Worker(job, attempt)
        if not self._room and not self._warned:
            self._warned = True
            text = f"no machine of the cluster has room for it now (it takes {self.share}); it waits for one"
            yield JobEvent(next(iter(self.working.values())).job.name, "warning", {"text": text})

    def _errand(self, job: Job) -> Errand:
        left = pack(Path(job.directory))
        if not left.files:
            return self.errand
        # A reference inside a tuple: it is fetched by those alone who need it.
        return Errand(self.errand.threads, self.errand.folder, self.errand.mark, (self.ray.put(left),))

    def hear(self) -> Iterator[JobEvent]:
        """The next word of anybody, if there is one soon."""
        for words in self.ray.wait(list(self.working), timeout=TICK)[0]:
            worker = self.working[words]
            try:
                kind, data = self.ray.get(next(words))
            except (StopIteration, self.ray.exceptions.RayError) as error:
                yield self._end(words, None if isinstance(error, StopIteration) else _reason(error, worker))
                continue
            self.working[words] = self.working.pop(words)  # the last in turn now: everybody is heard
            try:
                event = _take(worker, kind, data)
            except (TplError, OSError) as error:  # the directory is somebody else's, or cannot be written
                self._cancel([words])
                worker.verdict = JobEvent(worker.job.name, FAILED, {"error": str(error), "final": True})
                yield self._end(words, None)
            else:
                if event is not None:
                    yield event

    def _end(self, words: Any, lost: str | None) -> JobEvent:
        """What becomes of a job whose task is over."""
        worker = self.working.pop(words)
        worker.held.close()
        error = lost or "its task ended without a word"
        verdict = worker.verdict or JobEvent(worker.job.name, FAILED, {"error": error, "final": False})
        if verdict.kind == FINISHED:
            return verdict
        again = not verdict.data["final"] and worker.attempt < ATTEMPTS
        if again:
            self.waiting.appendleft((worker.job, worker.attempt + 1))
        return JobEvent(worker.job.name, RETRIED if again else FAILED, {"error": verdict.data["error"]})

    def dismiss(self) -> None:
        """Cancel all tasks, and wait until they are over. They may be at anything: a run directory stands that."""
        self._cancel(list(self.working))
        for worker in self.working.values():
            worker.held.close()
        self.working.clear()

    def _cancel(self, tasks: list[Any]) -> None:
        for words in tasks:
            self.ray.cancel(words, force=True)
        deadline = time.monotonic() + GRACE
        for words in tasks:
            while time.monotonic() < deadline:
                if not self.ray.wait([words], timeout=max(0.0, deadline - time.monotonic()))[0]:
                    break
                try:
                    self.ray.get(next(words))
                except (StopIteration, self.ray.exceptions.RayError):
                    break


def _take(worker: _Worker, kind: str, data: Any) -> JobEvent | None:
    """Do what a word asks for; the event to be passed on, if it is one."""
    if kind == ARRIVED:
        worker.node = data["node"]
        if data["away"]:  # that machine cannot hold the directory here: nobody else may write it, and all can see
            worker.held.enter_context(ModelStore(worker.place / "model").writing())
        return JobEvent(worker.job.name, STARTED, {"attempt": worker.attempt} | data)
    if kind == FILES:
        unpack(data, worker.place, LAST)
        return None
    if kind in (FINISHED, FAILED):
        worker.verdict = JobEvent(worker.job.name, kind, data)  # it counts when the task is over
        if worker.place.is_dir():
            os.listdir(worker.place)  # a network file system looks anew for what another machine has written
        return None
    return JobEvent(worker.job.name, kind, data)


def _reason(error: Exception, worker: _Worker) -> str:
    """Why a task is over, in a line; Ray's own texts are pages."""
    where = f" on {worker.node}" if worker.node else ""
    match type(error).__name__:
        case "WorkerCrashedError":
            return f"its process{where} died: it may have been killed, or run out of memory"
        case "OutOfMemoryError":
            return f"Ray ended its process{where}: the machine ran out of memory. Give each run a larger share"
        case "NodeDiedError" | "ObjectLostError" | "OwnerDiedError" | "ObjectFetchTimedOutError":
            return f"its machine{f' {worker.node}' if worker.node else ''} was lost"
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    text = lines[-1] if lines else type(cause).__name__
    if "No module named 'tpl" in str(error):
        return f"a machine of the cluster has no tpl: install the same version on all of them ({text})"
    return f"{type(cause).__name__}{where}: {text}"
