"""One running server: its settings, metrics, model, decoders and learning jobs."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from fastapi import FastAPI, UploadFile
from filelock import FileLock, Timeout
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tpl.engine import uses_cuda_graphs
from tpl.errors import TplError
from tpl.learner import Learner
from tpl.serve.advice import Advice
from tpl.serve.errors import Refusal, log
from tpl.serve.jobs import STATES, JobQueue, LearningJob, new_id, without_paths
from tpl.serve.model import Batcher, CurrentModel, ImageQuery, ModelSource, ServedModel, executor
from tpl.serve.security import Access
from tpl.serve.uploads import Limits, check_archive, prepare, shown_name
from tpl.stream import UnreadableImage
from tpl.stream.labelled import labelled_images

if TYPE_CHECKING:
    from tpl.serve.label_studio import LabelStudio

DECODERS = 4  # images decoded at the same time: each may take as much memory as its pixels need
CPU_BATCH, GPU_BATCH = 32, 256  # images in one forward pass; a GPU pads every batch to 256 anyway
MAX_TASK_NAME = 100


METHODS = ("GET", "HEAD", "POST")
SPOOL, LOCK = "tpl-serve-", ".lock"  # the folder of uploads in the temporary folder, and its owner's lock
NEW_SPOOL = 60.0  # seconds in which a server takes the lock of its folder


class Metrics:
    """The metrics for Prometheus, in a registry of their own: a process may have several servers."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        by_route = ("method", "route", "status")
        self.requests = Counter("tpl_requests", "Requests by route and status.", by_route, registry=own)
        self.seconds = Histogram("tpl_request_seconds", "Time to answer, by route.", ("route",), registry=own)
        self.images = Counter("tpl_images", "Images by outcome: answered or unreadable.", ("outcome",), registry=own)
        sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
        self.batch = Histogram("tpl_batch_images", "Images in one forward pass.", buckets=sizes, registry=own)

    def add_gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a number that is computed when the metrics are read."""
        Gauge(name, text, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self.registry)


class TimingMiddleware:
    """Counts and times every request, including refused ones."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and measure the time."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_noting_status)
        finally:
            # The route's pattern, not the path: unknown paths must not create new series.
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.metrics.requests.labels(method, route, status).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - start)


@dataclass(frozen=True)
class Settings:
    """Settings of a server."""

    access: Access
    limits: Limits = field(default_factory=Limits)
    read_only: bool = False  # learns nothing, even with the token
    examples: bool = True  # whether stored images are shown
    label_studio: LabelStudio | None = None  # the one whose images and annotations are read
    poll_seconds: float = 2.0  # between checks for a model committed by another process


def _delete_abandoned_spools() -> None:
    """Delete the uploads of servers that were killed: those whose lock is free."""
    for folder in Path(tempfile.gettempdir()).glob(f"{SPOOL}*"):
        with suppress(OSError, Timeout):
            status = folder.lstat()
            mine = not hasattr(os, "getuid") or status.st_uid == os.getuid()
            if stat.S_ISDIR(status.st_mode) and mine and time.time() - status.st_mtime > NEW_SPOOL:
                with FileLock(folder / LOCK).acquire(timeout=0):
                    shutil.rmtree(folder, ignore_errors=True)


class Server:
    """The parts of one running server."""

    def __init__(self, source: ModelSource, settings: Settings) -> None:
        self.settings = settings
        threads = torch.get_num_threads()  # before a thread is told to use one: later threads do so, too
        self.model = CurrentModel(source)
        self.metrics = Metrics()
        batch = GPU_BATCH if self._on_gpu() else CPU_BATCH
        self.batcher = Batcher(batch, on_batch=self.metrics.batch.observe, threads=threads)
        self.jobs = JobQueue(source, settings.limits, self.reload)
        self.decoders = executor("decode", DECODERS)
        self.advice = Advice(self.batcher, settings.limits)
        self.spool = Path()  # the folder of uploads while the server runs
        self._add_gauges()

    def _add_gauges(self) -> None:
        def jobs(state: str) -> Callable[[], int]:
            return lambda: sum(job.state == state for job in self.jobs.all())

        add = self.metrics.add_gauge
        add("tpl_classes", "Classes the model knows.", lambda: len(self.model.current.task_of_class))
        add("tpl_tasks", "Tasks the model has learned.", lambda: len(self.model.current.task_names))
        add("tpl_waiting_images", "Images that wait for a forward pass.", lambda: self.batcher.waiting)
        for state in STATES:
            add(f"tpl_jobs_{state}", f"Tasks sent to this server that are {state}.", jobs(state))

    @asynccontextmanager
    async def running(self, app: FastAPI) -> AsyncIterator[None]:
        """Run the background work of the server: queries, learning, and checks for a newer model."""
        _delete_abandoned_spools()
        with (
            tempfile.TemporaryDirectory(prefix=SPOOL, ignore_cleanup_errors=True) as folder,
            FileLock(Path(folder) / LOCK),  # until this process ends, in whatever way
        ):
            self.spool = Path(folder) / "uploads"
            self.spool.mkdir()
            self.batcher.start()
            self.jobs.start()
            polling = asyncio.create_task(self._poll())
            try:
                yield
            finally:
                polling.cancel()
                await asyncio.gather(polling, return_exceptions=True)
                await self.jobs.stop()
                await self.batcher.stop()
                self.decoders.shutdown(wait=False, cancel_futures=True)
                self.model.close()

    async def reload(self) -> None:
        """Serve the directory's newest model. Requests in progress finish with the model they began with."""
        # While a CUDA graph is captured, no other thread may use the GPU: the model is loaded in the batcher's thread.
        await (self.batcher.call(self.model.refresh) if self._on_gpu() else asyncio.to_thread(self.model.refresh))

    def _on_gpu(self) -> bool:
        return uses_cuda_graphs(self.model.current.learner.method.compute.device)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self.settings.poll_seconds)
            try:
                if self.model.is_stale():
                    await self.reload()
            except Exception as error:  # e.g. an incomplete copy: the old model goes on answering
                log.warning("the new model cannot be loaded yet: %s", error)

    async def answer(self, model: ServedModel, upload: UploadFile, options: dict[str, Any]) -> dict[str, Any]:
        """The model's answer for one file, or why it cannot be read; `options` are those of ImageQuery."""
        name = shown_name(upload)
        loop = asyncio.get_running_loop()
        try:
            pixels = await loop.run_in_executor(
                self.decoders, prepare, model.learner, upload.file, name, self.settings.limits
            )
        except UnreadableImage as error:
            self.metrics.images.labels("unreadable").inc()
            return {"path": name, "error": str(error)}
        reply = await self.batcher.answer(model, ImageQuery(pixels, **options))
        self.metrics.images.labels("answered").inc()
        return {"path": name} | reply.to_dict()

    def check_writable(self) -> None:
        """Refuse to change the model of a read-only server."""
        if self.settings.read_only:
            raise Refusal(403, "This server is read-only: it was started with --read-only.")

    async def change(self, edit: Callable[[Learner], object]) -> None:
        """Change the model without training, in one commit, and serve it; not while something is being learned."""
        self.check_writable()
        if self.jobs.writing.locked() or self.jobs.names():
            raise Refusal(409, "The model is being changed; do this when that is done.", Retry_After="10")
        async with self.jobs.writing:
            await asyncio.to_thread(self._change, edit)
            await self.reload()

    def _change(self, edit: Callable[[Learner], object]) -> None:
        source = self.model.source
        try:
            with Learner.changing(source.path, weights=source.weights, device="cpu") as learner:
                edit(learner)
        except TplError as error:
            raise Refusal(409, without_paths(str(error))) from error

    def make_job(self, upload: UploadFile, given: object, update: bool = False) -> LearningJob:
        """A job from an uploaded zip of class folders, checked as far as possible without decoding images.

        With `update`, images of known classes may be among them.
        """
        title, method = shown_name(upload), self.model.current.learner.method
        if method.cumulative:
            raise Refusal(409, f"The method {method.name!r} needs all images at once; it cannot learn more from here.")
        job_id = new_id()
        archive = self.spool / f"{job_id}.zip"  # never a name sent by a client
        try:
            with archive.open("xb") as target:
                shutil.copyfileobj(upload.file, target)
            check_archive(archive, self.settings.limits)
            try:
                classes = labelled_images(archive).class_names
            except TplError as error:
                raise Refusal(422, str(error).replace(str(archive), title)) from error
            known = sorted(set(self.model.current.learner.classes_) & set(classes))
            if known and not update:
                raise Refusal(
                    409,
                    f"Already learned: {', '.join(known)}. A task must have new classes only; with update=true, "
                    "images of known classes are added to them.",
                )
            if known and not method.can_update:
                raise Refusal(409, f"The method {method.name!r} cannot learn more images of known classes.")
            name = self._task_name(given, title)  # after the classes: who sends a task again has both in use
        except BaseException:
            archive.unlink(missing_ok=True)
            raise
        return LearningJob(job_id, archive, title, name, classes, tuple(known))

    def _task_name(self, given: object, title: str) -> str:
        """The given name, which must be new; without one, the name of the file."""
        name = given.strip() if isinstance(given, str) else ""
        if len(name) > MAX_TASK_NAME or not name.isprintable():
            raise Refusal(422, f"A task's name is one line of at most {MAX_TASK_NAME} letters.")
        taken = self.jobs.names() | set(self.model.current.task_names)
        if name in taken:
            raise Refusal(409, f"There is a task {name!r} already; choose another name.")
        stem = Path(title).stem[:MAX_TASK_NAME]
        free = (candidate for n in count(1) if (candidate := stem if n == 1 else f"{stem} {n}") not in taken)
        return name or next(free)
