"""New tasks, learned one after the other beside the predictions."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpl.serve.errors import Refusal, log
from tpl.serve.limits import Limits
from tpl.serve.served import Place
from tpl.serve.worker import Order

QUEUED, LEARNING, DONE, FAILED = "queued", "learning", "done", "failed"
STATES = (QUEUED, LEARNING, DONE, FAILED)
REMEMBERED = 200  # finished jobs, so that a server that runs for years does not grow
AS_IT_WAS = "The model is as it was."
LONGEST_REPORT = 1 << 20


@dataclass
class Job:
    """One task on its way into the model."""

    archive: Path
    title: str
    name: str
    classes: tuple[str, ...] = ()
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: str = QUEUED
    progress: float = 0.0
    message: str = "waiting for its turn"
    warnings: list[str] = field(default_factory=list)
    created: float = field(default_factory=time.time)
    finished: float | None = None
    task: dict[str, Any] | None = None

    @property
    def over(self) -> bool:
        """Whether it will not change any more."""
        return self.state in (DONE, FAILED)

    def to_dict(self) -> dict[str, Any]:
        """What GET /tasks/{id} says."""
        shown = ("id", "name", "classes", "state", "progress", "message", "warnings", "created", "finished", "task")
        return {key: getattr(self, key) for key in shown}


class Jobs:
    """The queue, and the one process that learns."""

    def __init__(self, place: Place, limits: Limits, swap: Callable[[], Awaitable[None]]) -> None:
        self.place, self.limits, self.swap = place, limits, swap
        self._jobs: dict[str, Job] = {}
        self._queue: asyncio.Queue[Job] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to learn; to be called in the event loop."""
        self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Give up the task in hand: nothing of it is in the model."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def find(self, id: str) -> Job:
        """A job by its number."""
        if id not in self._jobs:
            raise Refusal(404, f"There is no task {id!r}; it may be long over, or of an earlier server.")
        return self._jobs[id]

    def all(self) -> list[Job]:
        """The jobs that are remembered, oldest first."""
        return list(self._jobs.values())

    def names(self) -> set[str]:
        """What the tasks under way are called."""
        return {job.name for job in self.all() if not job.over}

    def check_room(self) -> None:
        """Refuse one more task where too many wait."""
        if sum(not job.over for job in self.all()) > self.limits.queue:
            raise Refusal(429, "Too many tasks are waiting to be learned; try again later.", Retry_After="60")

    def submit(self, job: Job) -> None:
        """Put a task in the queue. Its classes must not be under way already."""
        self.check_room()
        expected = {name for other in self.all() if not other.over for name in other.classes}
        if twice := sorted(expected & set(job.classes)):
            raise Refusal(409, f"Already being learned: {', '.join(twice)}.")
        if job.name in self.names():
            raise Refusal(409, f"A task {job.name!r} is being learned already; choose another name.")
        for old in [other for other in self.all() if other.over][:-REMEMBERED]:
            del self._jobs[old.id]
        self._jobs[job.id] = job
        self._queue.put_nowait(job)

    async def _work(self) -> None:
        while True:
            job = await self._queue.get()
            try:
                job.state, job.message = LEARNING, "starting"
                await self._learn(job)
            except asyncio.CancelledError:
                self._fail(job, f"The server was stopped. {AS_IT_WAS}")
                raise
            except Exception as error:
                log.error("task %s failed", job.id, exc_info=error)
                self._fail(job, f"Something went wrong in the server; its log says what. {AS_IT_WAS}")
            finally:
                job.archive.unlink(missing_ok=True)

    async def _learn(self, job: Job) -> None:
        place = self.place
        order = Order(
            str(place.path.resolve()),
            str(job.archive),
            job.title,
            job.name,
            place.device,
            place.precision,
            str(place.weights.resolve()) if place.weights else None,
            self.limits.pixels,
            place.epochs,
        )
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-P",
                "-m",
                "tpl.serve.worker",
            ),  # -P: nothing in the current folder is taken for a module
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_REPORT,
        )
        assert process.stdin is not None and process.stdout is not None
        verdict: dict[str, Any] = {}
        try:
            process.stdin.write(order.to_json().encode())  # stays open: its end tells the process to end
            async for line in process.stdout:
                verdict |= self._note(job, json.loads(line))
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if "done" in verdict:
            job.message = await self._exchange(job)
            job.task = verdict["done"] | {"source": job.title}
            job.state, job.progress, job.finished = DONE, 1.0, time.time()
        elif "failed" in verdict:
            self._fail(job, f"{verdict['failed']} {AS_IT_WAS}")
        else:
            hint = " (it may have run out of memory)" if process.returncode == -9 else ""
            self._fail(job, f"Learning ended with exit code {process.returncode}{hint}; see the log. {AS_IT_WAS}")

    async def _exchange(self, job: Job) -> str:
        """Serve what was learned, and say so."""
        try:
            await self.swap()
        except Exception as error:  # committed all the same: the server looks for it again and again
            log.error("task %s is learned, but cannot be loaded", job.id, exc_info=error)
            return "learned, but not served yet: the server cannot load the model; its log says why"
        return "learned"

    def _note(self, job: Job, report: dict[str, Any]) -> dict[str, Any]:
        job.progress, job.message = report.get("progress", job.progress), report.get("message", job.message)
        job.warnings += [report["warning"]] if "warning" in report else []
        return report

    def _fail(self, job: Job, message: str) -> None:
        job.state, job.message, job.finished = FAILED, message, time.time()
        log.warning("task %s: %s", job.id, message)
