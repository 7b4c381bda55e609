"""The application: routes over the parts."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response, Security, UploadFile
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.security import HTTPBearer

from tpl._version import __version__
from tpl.engine import uses_cuda_graphs
from tpl.errors import TplError
from tpl.serve import schema
from tpl.serve.batching import Batcher
from tpl.serve.errors import Refusal, handle_errors, log
from tpl.serve.jobs import LEARNING, STATES, Job, Jobs
from tpl.serve.limits import Limits, check_archive
from tpl.serve.metrics import CONTENT_TYPE_LATEST, Metrics, Timed
from tpl.serve.pages import page
from tpl.serve.security import Access, Gate
from tpl.serve.served import Holder, Place, Question, Served
from tpl.serve.uploads import files_of, prepare, read_form, shown_name
from tpl.stream import UnreadableImage
from tpl.stream.inputs import labelled_images

DECODERS = 4  # images decoded at the same time: each may take as much memory as its pixels need
ON_CPU, ON_GPU = 32, 256  # images in one pass; a GPU fills every pass up to 256 anyway
MOST_EXAMPLES = 24
LONGEST_NAME = 100
TOKEN = HTTPBearer(scheme_name="token", auto_error=False)  # for the description alone: the gate checks it


@dataclass(frozen=True)
class Settings:
    """How a server behaves."""

    access: Access
    limits: Limits = field(default_factory=Limits)
    read_only: bool = False  # learns nothing, whatever token comes
    examples: bool = True  # whether stored images are shown
    watch: float = 2.0  # seconds between looks for a model that somebody else has committed


class Server:
    """The parts of one running server."""

    def __init__(self, place: Place, settings: Settings) -> None:
        self.settings = settings
        self.holder = Holder(place)
        self.metrics = Metrics()
        self.batcher = Batcher(ON_GPU if self._on_gpu() else ON_CPU, told=self.metrics.batch.observe)
        self.jobs = Jobs(place, settings.limits, self.swap)
        self.decoders = ThreadPoolExecutor(max_workers=DECODERS, thread_name_prefix="decode")
        self.spool = Path()
        self._watch_numbers()

    def _watch_numbers(self) -> None:
        def jobs(state: str) -> Callable[[], int]:
            return lambda: sum(job.state == state for job in self.jobs.all())

        watch = self.metrics.watch
        watch("tpl_classes", "Classes the model knows.", lambda: len(self.holder.current.owner))
        watch("tpl_tasks", "Tasks the model has learned.", lambda: len(self.holder.current.task_names))
        watch("tpl_waiting_images", "Images that wait for a pass.", lambda: self.batcher.waiting)
        for state in STATES:
            watch(f"tpl_jobs_{state}", f"Tasks sent to this server that are {state}.", jobs(state))

    @asynccontextmanager
    async def running(self, app: FastAPI) -> AsyncIterator[None]:
        """Everything that works in the background."""
        with tempfile.TemporaryDirectory(prefix="tpl-serve-") as folder:
            self.spool = Path(folder)
            self.batcher.start()
            self.jobs.start()
            watching = asyncio.create_task(self._watch())
            try:
                yield
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                await self.jobs.stop()
                await self.batcher.stop()
                self.decoders.shutdown(wait=False, cancel_futures=True)

    async def swap(self) -> None:
        """Serve the directory's newest model. Requests that are under way finish with the one they began with."""
        # While one thread captures a pass on a GPU, no other may touch it: loading takes its turn there.
        await (self.batcher.call(self.holder.refresh) if self._on_gpu() else asyncio.to_thread(self.holder.refresh))

    def _on_gpu(self) -> bool:
        return uses_cuda_graphs(self.holder.current.learner.method.compute.device)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.settings.watch)
            try:
                if self.holder.is_stale():
                    await self.swap()
            except Exception as error:  # half a copy, other weights: the old model goes on answering
                log.warning("the new model cannot be loaded yet: %s", error)

    async def answer(self, served: Served, upload: UploadFile, question: dict[str, Any]) -> dict[str, Any]:
        """What the model says of one file, or why it cannot be read."""
        name = shown_name(upload)
        loop = asyncio.get_running_loop()
        try:
            pixels = await loop.run_in_executor(
                self.decoders, prepare, served.learner, upload.file, name, self.settings.limits
            )
        except UnreadableImage as error:
            self.metrics.images.labels("unreadable").inc()
            return {"path": name, "error": str(error)}
        reply = await self.batcher.ask(served, Question(pixels, **question))
        self.metrics.images.labels("answered").inc()
        return {"path": name} | reply.to_dict()

    def take_archive(self, upload: UploadFile, given: object) -> Job:
        """A zip of class folders as a job, checked as far as can be done without decoding images."""
        title, method = shown_name(upload), self.holder.current.learner.method
        if method.cumulative:
            raise Refusal(409, f"The method {method.name!r} needs all images at once; it cannot learn more from here.")
        job = Job(self.spool, title, self._task_name(given, title))
        job.archive = self.spool / f"{job.id}.zip"  # never a name that came from outside
        try:
            with job.archive.open("xb") as target:
                shutil.copyfileobj(upload.file, target)
            check_archive(job.archive, self.settings.limits)
            try:
                job.classes = labelled_images(job.archive).class_names
            except TplError as error:
                raise Refusal(422, str(error).replace(str(job.archive), title)) from error
            known = set(self.holder.current.learner.classes_)
            if twice := sorted(known & set(job.classes)):
                raise Refusal(409, f"Already learned: {', '.join(twice)}. A task must bring new classes only.")
        except BaseException:
            job.archive.unlink(missing_ok=True)
            raise
        return job

    def _task_name(self, given: object, title: str) -> str:
        """The name that was given, which must be new; else one after the file."""
        name = given.strip() if isinstance(given, str) else ""
        if len(name) > LONGEST_NAME or not name.isprintable():
            raise Refusal(422, f"A task's name is one line of at most {LONGEST_NAME} letters.")
        taken = self.jobs.names() | set(self.holder.current.task_names)
        if name in taken:
            raise Refusal(409, f"There is a task {name!r} already; choose another name.")
        stem = Path(title).stem[:LONGEST_NAME]
        free = (candidate for n in count(1) if (candidate := stem if n == 1 else f"{stem} {n}") not in taken)
        return name or next(free)


def create_app(place: Place, settings: Settings) -> FastAPI:
    """The application over one model directory; loads the model."""
    server = Server(place, settings)
    app = FastAPI(
        title="tpl",
        version=__version__,
        description="An image classifier that keeps learning.",
        lifespan=server.running,
        docs_url=None,  # the usual pages load their scripts from elsewhere
        redoc_url=None,
    )
    app.state.server = server
    handle_errors(app)
    _add_reading(app, server)
    _add_predicting(app, server)
    _add_learning(app, server)
    app.add_middleware(Gate, access=settings.access, limits=settings.limits)
    app.add_middleware(Timed, metrics=server.metrics)
    return app


def _add_reading(app: FastAPI, server: Server) -> None:
    index, docs = page("page.html"), page("docs.html")

    @app.get("/", include_in_schema=False)
    async def show_page() -> HTMLResponse:
        return index

    @app.get("/docs", include_in_schema=False)
    async def show_docs() -> HTMLResponse:
        return docs

    @app.get("/health", tags=["server"], responses=schema.answers(200, schema.Health))
    async def health() -> JSONResponse:
        """Whether the server is up."""
        learner = server.holder.current.learner
        learning = any(job.state == LEARNING for job in server.jobs.all())
        return JSONResponse(
            {
                "status": "ok",
                "version": __version__,
                "classes": len(learner.classes_),
                "tasks": len(learner.tasks_),
                "learning": learning,
            }
        )

    @app.get("/metrics", tags=["server"])
    async def metrics() -> Response:
        """Counts and times, for Prometheus."""
        return Response(server.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/model", tags=["model"], responses=schema.answers(200, schema.Model))
    async def model(
        pictures: Annotated[bool, Query(description="add one stored image a class")] = False,
    ) -> JSONResponse:
        """Tasks, classes, encoder and sizes of the model that answers now."""
        served = server.holder.current
        content = served.description | {"read_only": server.settings.read_only}
        if pictures and server.settings.examples:
            content["pictures"] = await asyncio.to_thread(lambda: served.pictures)
        return JSONResponse(content)


def _add_predicting(app: FastAPI, server: Server) -> None:
    @app.post(
        "/predict",
        tags=["model"],
        responses=schema.answers(200, schema.Answers, 401, 409, 413, 415, 422, 503),
        openapi_extra=schema.form("Images, one or several.", files={"type": "array", "items": schema.FILE}),
    )
    async def predict(
        request: Request,
        top: Annotated[int, Query(ge=1, le=1000, description="classes to name for each image")] = 5,
        tasks: Annotated[bool, Query(description="add the probability of every task")] = False,
        examples: Annotated[int, Query(ge=0, le=MOST_EXAMPLES, description="nearest stored images to add")] = 0,
    ) -> JSONResponse:
        """Classes of the images sent, most probable first."""
        form = await read_form(request, server.settings.limits.files)
        try:
            uploads = files_of(form)
            if not uploads:
                raise Refusal(422, "There is no file in the form; send one with: curl -F files=@IMAGE")
            served = server.holder.current
            if not served.owner:
                raise Refusal(409, "Nothing was learned yet: send a task first.")
            question = {"top": top, "tasks": tasks, "examples": examples if server.settings.examples else 0}
            answers = await asyncio.gather(*(server.answer(served, upload, question) for upload in uploads))
        finally:
            await form.close()
        return JSONResponse({"answers": answers})


def _add_learning(app: FastAPI, server: Server) -> None:
    @app.post(
        "/tasks",
        tags=["tasks"],
        status_code=202,
        responses=schema.answers(202, schema.Job, 401, 403, 409, 413, 415, 422, 429),
        dependencies=[Security(TOKEN)],
        openapi_extra=schema.form(
            "A zip of class folders (CLASS/*.jpg), all of them new.",
            file=schema.FILE,
            name={"type": "string", "description": "what to call the task"},
        ),
    )
    async def learn(request: Request) -> JSONResponse:
        """Learn a new task in the background; predictions go on, and know its classes once it is done."""
        if server.settings.read_only:
            raise Refusal(403, "This server is read-only: it was started with --read-only.")
        server.jobs.check_room()
        form = await read_form(request, 1)
        try:
            uploads = files_of(form)
            if not uploads:
                raise Refusal(422, "There is no zip in the form; send one with: curl -F file=@CLASSES.zip")
            job = await asyncio.to_thread(server.take_archive, uploads[0], form.get("name"))
        finally:
            await form.close()
        try:
            server.jobs.submit(job)
        except Refusal:
            job.archive.unlink(missing_ok=True)
            raise
        return JSONResponse(job.to_dict(), 202, {"Location": f"/tasks/{job.id}"})

    @app.get("/tasks", tags=["tasks"], responses=schema.answers(200, schema.JobList))
    async def tasks() -> JSONResponse:
        """The tasks sent to this server since it was started."""
        return JSONResponse({"tasks": [job.to_dict() for job in server.jobs.all()]})

    @app.get("/tasks/{id}", tags=["tasks"], responses=schema.answers(200, schema.Job, 404))
    async def task(id: str) -> JSONResponse:
        """How far a task has come."""
        return JSONResponse(server.jobs.find(id).to_dict())
