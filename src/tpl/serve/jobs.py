"""Jobs: new tasks and more images, learned one after the other in a process of their own while predictions go on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpl.serve.errors import Refusal, log
from tpl.serve.model import ModelSource
from tpl.serve.uploads import Limits
from tpl.serve.worker import READING, JobSpec

QUEUED, LEARNING, DONE, FAILED = "queued", "learning", "done", "failed"
STATES = (QUEUED, LEARNING, DONE, FAILED)
MAX_ENDED = 200  # ended jobs that are kept, so that the list does not grow for ever
MAX_LINE = 1 << 20  # bytes of one report from the worker
UNCHANGED = "The model is unchanged."


def new_id() -> str:
    """A random id for a job."""
    return secrets.token_hex(8)


def without_paths(text: str) -> str:
    """A message without the folders of this machine: of a path only the last name stays."""
    return re.sub(r"(?<![\w.:/])(?:[A-Za-z]:)?[/\\](?:[^\s/\\'\"]+[/\\])+", "", text)


@dataclass
class LearningJob:
    """One task to learn, and how far it has come."""

    id: str
    archive: Path
    title: str  # the file's name as the client gave it
    name: str
    classes: tuple[str, ...]
    known: tuple[str, ...] = ()  # those of them that the model knows: they are updated
    state: str = QUEUED
    progress: float = 0.0
    message: str = "waiting for its turn"
    warnings: list[str] = field(default_factory=list)
    created: float = field(default_factory=time.time)
    finished: float | None = None
    task: dict[str, Any] | None = None
    outcome: dict[str, Any] | None = None  # what it did to the model, in counts
    _first: tuple[float, float] | None = None  # when training began, and the progress then

    @property
    def seconds_left(self) -> float | None:
        """How long learning will go on; None before there is an estimate."""
        if self.state != LEARNING or self._first is None or self.progress <= self._first[1]:
            return None
        since, share = self._first
        return (time.monotonic() - since) * (1 - self.progress) / (self.progress - share)

    @property
    def ended(self) -> bool:
        """Whether it is done or has failed."""
        return self.state in (DONE, FAILED)

    def start(self) -> None:
        """The worker starts."""
        self.state, self.message = LEARNING, "starting"

    def update(self, report: dict[str, Any]) -> None:
        """Take over progress, message and warning from a report of the worker."""
        self.progress, self.message = report.get("progress", self.progress), report.get("message", self.message)
        self.warnings += [without_paths(report["warning"])] if "warning" in report else []
        self.outcome = report.get("outcome", self.outcome)
        if self._first is None and self.progress >= READING:
            self._first = time.monotonic(), self.progress

    def finish(self, task: dict[str, Any], message: str) -> None:
        """The task is learned; `task` describes it."""
        self.task, self.message = task | {"source": self.title}, message
        self.state, self.progress, self.finished = DONE, 1.0, time.time()

    def fail(self, message: str) -> None:
        """The task is not learned."""
        log.warning("task %s: %s", self.id, message)
        self.state, self.message, self.finished = FAILED, f"{without_paths(message)} {UNCHANGED}", time.time()

    def to_dict(self) -> dict[str, Any]:
        """The content of GET /tasks/{id}."""
        shown = ("id", "name", "classes", "known", "state", "progress", "seconds_left", "message", "warnings")
        return {key: getattr(self, key) for key in (*shown, "created", "finished", "task", "outcome")}


class JobQueue:
    """The queue of jobs, and the one worker process."""

    def __init__(self, source: ModelSource, limits: Limits, reload: Callable[[], Awaitable[None]]) -> None:
        self.source, self.limits, self.reload = source, limits, reload
        self._jobs: dict[str, LearningJob] = {}
        self._queue: asyncio.Queue[LearningJob] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self.writing = asyncio.Lock()  # held while the model directory is changed from here

    def start(self) -> None:
        """Begin to learn; to be called in the event loop."""
        self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Cancel the current job: nothing of it is in the model."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def find(self, id: str) -> LearningJob:
        """A job by its id."""
        if id not in self._jobs:
            raise Refusal(404, f"There is no task {id!r}; it may have ended long ago, or belong to an earlier server.")
        return self._jobs[id]

    def all(self) -> list[LearningJob]:
        """All jobs that are kept, oldest first."""
        return list(self._jobs.values())

    def names(self) -> set[str]:
        """The names of tasks that are waiting or being learned."""
        return {job.name for job in self.all() if not job.ended}

    def check_room(self) -> None:
        """Refuse another task if too many are waiting."""
        if sum(not job.ended for job in self.all()) > self.limits.queue:
            raise Refusal(429, "Too many tasks are waiting to be learned; try again later.", Retry_After="60")

    def submit(self, job: LearningJob) -> None:
        """Put a job in the queue; its classes and name must not be those of a job that has not ended."""
        self.check_room()
        expected = {name for other in self.all() if not other.ended for name in other.classes}
        if twice := sorted(expected & set(job.classes) - set(job.known)):
            raise Refusal(409, f"Already being learned: {', '.join(twice)}.")
        if job.name in self.names():
            raise Refusal(409, f"A task {job.name!r} is being learned already; choose another name.")
        for old in [other for other in self.all() if other.ended][:-MAX_ENDED]:
            del self._jobs[old.id]
        self._jobs[job.id] = job
        self._queue.put_nowait(job)

    async def _work(self) -> None:
        while True:
            job = await self._queue.get()
            try:
                async with self.writing:
                    job.start()
                    await self._learn(job)
            except asyncio.CancelledError:
                job.fail("The server was stopped.")
                raise
            except Exception as error:
                log.error("task %s failed", job.id, exc_info=error)
                job.fail("Something went wrong in the server; its log says what.")
            finally:
                job.archive.unlink(missing_ok=True)

    async def _learn(self, job: LearningJob) -> None:
        source = self.source
        spec = JobSpec(
            str(source.path.resolve()),
            str(job.archive),
            job.title,
            job.name,
            source.device,
            source.precision,
            str(source.weights.resolve()) if source.weights else None,
            self.limits.pixels,
            source.epochs,
        )
        command = sys.executable, "-P", "-m", "tpl.serve.worker"  # -P: no module is imported from the current folder
        pipe = asyncio.subprocess.PIPE
        # The server's threads have priority. A thread of the worker that waits for another should sleep: spinning, it
        # would use up the little time that the server leaves.
        environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, limit=MAX_LINE, env=environment
        )
        assert process.stdin is not None and process.stdout is not None
        reports: dict[str, Any] = {}
        try:
            process.stdin.write(spec.to_json().encode())  # stays open: the worker ends when it is closed
            async for line in process.stdout:
                report = json.loads(line)
                job.update(report)
                reports |= report
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if "done" in reports:
            message = await self._serve(job)
            job.finish(reports["done"], message)
        elif "failed" in reports:
            job.fail(reports["failed"])
        else:
            hint = " (it may have run out of memory)" if process.returncode == -9 else ""
            job.fail(f"Learning ended with exit code {process.returncode}{hint}; see the log.")

    async def _serve(self, job: LearningJob) -> str:
        """Serve the new model; returns the job's message."""
        try:
            await self.reload()
        except Exception as error:  # the task is committed; the server goes on trying to load it
            log.error("task %s is learned, but cannot be loaded", job.id, exc_info=error)
            return "learned, but not served yet: the server cannot load the model; its log says why"
        return "learned"
