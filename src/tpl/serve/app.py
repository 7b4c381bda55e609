"""The application: routes over the parts of the server, and the process that serves it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Query, Request, Response, Security, UploadFile
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.security import HTTPBearer
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from tpl._version import __version__
from tpl.errors import TplError
from tpl.serve import schema
from tpl.serve.advice import MAX_SUGGESTED
from tpl.serve.connections import BACKLOG, set_up_log, uvicorn_settings
from tpl.serve.errors import ERROR_HANDLERS, Refusal
from tpl.serve.jobs import LEARNING
from tpl.serve.label_studio import add_label_studio
from tpl.serve.model import ModelSource
from tpl.serve.security import AccessMiddleware, page
from tpl.serve.server import Server, Settings, TimingMiddleware
from tpl.serve.uploads import check_request, files_of, read_form, text_of

MAX_EXAMPLES = 24
MAX_REASONS = 5  # why files cannot be read, in one error
TOKEN = HTTPBearer(scheme_name="token", auto_error=False)  # for the OpenAPI description: AccessMiddleware checks it


def create_app(source: ModelSource, settings: Settings) -> FastAPI:
    """The application for one model directory; loads the model."""
    server = Server(source, settings)
    app = FastAPI(
        title="tpl",
        version=__version__,
        description="An image classifier that keeps learning.",
        lifespan=server.running,
        docs_url=None,  # the usual pages load scripts from another host
        redoc_url=None,
        exception_handlers=ERROR_HANDLERS,
    )
    app.state.server = server
    _add_pages_and_status(app, server)
    _add_predict(app, server)
    _add_tasks(app, server)
    _add_classes(app, server)
    _add_advice(app, server)
    if settings.label_studio is not None:
        add_label_studio(app, server, settings.label_studio)
    app.add_middleware(AccessMiddleware, access=settings.access, limits=settings.limits)
    app.add_middleware(TimingMiddleware, metrics=server.metrics)
    return app


def _add_pages_and_status(app: FastAPI, server: Server) -> None:
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
        learner = server.model.current.learner
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
        pictures: Annotated[bool, Query(description="add one stored image of each class")] = False,
    ) -> JSONResponse:
        """Tasks, classes, encoder and sizes of the current model."""
        current = server.model.current
        content = current.description | {"read_only": server.settings.read_only}
        if pictures and server.settings.examples:
            content["pictures"] = await asyncio.to_thread(lambda: current.pictures)
        return JSONResponse(content)


def _add_predict(app: FastAPI, server: Server) -> None:
    @app.post(
        "/predict",
        tags=["model"],
        responses=schema.answers(200, schema.Answers, 401, 409, 413, 415, 422, 503),
        openapi_extra=schema.form(
            "Images, one or several.",
            files={"type": "array", "items": schema.FILE},
            reject={"type": "number", "description": "the same as in the address"},
        ),
    )
    async def predict(
        request: Request,
        top: Annotated[int, Query(ge=1, le=1000, description="classes to name for each image")] = 5,
        tasks: Annotated[bool, Query(description="add the probability of every task")] = False,
        examples: Annotated[int, Query(ge=0, le=MAX_EXAMPLES, description="nearest stored images to add")] = 0,
        reject: Annotated[
            float | None, Query(gt=0, lt=1, description="share of known images that may be called unknown, e.g. 0.05")
        ] = None,
    ) -> JSONResponse:
        """Classes of the uploaded images, most probable first; an error if none of them can be read."""
        form = await read_form(request, server.settings.limits.files)
        try:
            uploads = files_of(form)
            if not uploads:
                raise Refusal(422, "There is no file in the form; send one with: curl -F files=@IMAGE")
            if misplaced := [name for name in ("top", "tasks", "examples") if text_of(form, name) is not None]:
                raise Refusal(422, f"{misplaced[0]} belongs in the address, not in the form: /predict?{misplaced[0]}=1")
            model = server.model.current
            if not model.task_of_class:
                raise Refusal(409, "Nothing was learned yet: send a task first.")
            await asyncio.to_thread(check_request, uploads, server.settings.limits)
            shown = examples if server.settings.examples else 0
            reject = _share(text_of(form, "reject")) if reject is None else reject
            if reject is not None:
                model.learner.method.check_unknown_score()
            options = {"top": top, "tasks": tasks, "examples": shown, "reject": reject}
            answers = await asyncio.gather(*(server.answer(model, upload, options) for upload in uploads))
        finally:
            await form.close()
        _refuse_unreadable(answers)
        return JSONResponse({"answers": answers})


def _share(text: str | None) -> float | None:
    """A share from a field of a form, between 0 and 1."""
    try:
        share = None if text is None else float(text)
    except ValueError:
        share = math.nan
    if share is not None and not 0 < share < 1:
        raise Refusal(422, f"reject: a share between 0 and 1, such as 0.05, and not {text!r}.")
    return share


def _refuse_unreadable(answers: list[dict[str, Any]]) -> None:
    """Refuse a request of which no file can be read, with the reasons."""
    errors = [answer["error"] for answer in answers if "error" in answer]
    if len(errors) == len(answers):
        more = f" And {len(errors) - MAX_REASONS} more." if len(errors) > MAX_REASONS else ""
        raise Refusal(422, " ".join(errors[:MAX_REASONS]) + more)


def _add_tasks(app: FastAPI, server: Server) -> None:
    @app.post(
        "/tasks",
        tags=["tasks"],
        status_code=202,
        responses=schema.answers(202, schema.Job, 401, 403, 409, 413, 415, 422, 429),
        dependencies=[Security(TOKEN)],
        openapi_extra=schema.form(
            "A zip of class folders (CLASS/*.jpg).",
            file=schema.FILE,
            name={"type": "string", "description": "name of the task"},
            update={"type": "boolean", "description": "whether images of known classes may be among them"},
        ),
    )
    async def learn(request: Request) -> JSONResponse:
        """Learn a new task in the background; predictions go on, and include its classes once it is learned."""
        server.check_writable()
        server.jobs.check_room()
        form = await read_form(request, 1)
        try:
            uploads = files_of(form)
            if not uploads:
                raise Refusal(422, "There is no zip in the form; send one with: curl -F file=@CLASSES.zip")
            update = form.get("update") in ("true", "1", "on")
            job = await asyncio.to_thread(server.make_job, uploads[0], form.get("name"), update)
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
        """State and progress of a task."""
        return JSONResponse(server.jobs.find(id).to_dict())


def _add_classes(app: FastAPI, server: Server) -> None:
    async def names(request: Request, *fields: str) -> list[str]:
        """The named fields of a form."""
        form = await read_form(request, 0)
        try:
            given = [form.get(field) for field in fields]
        finally:
            await form.close()
        if lacking := [field for field, value in zip(fields, given, strict=True) if not isinstance(value, str)]:
            raise Refusal(422, f"The form has no {lacking[0]}.")
        return [value.strip() if isinstance(value, str) else "" for value in given]

    changed = schema.answers(200, schema.Classes, 401, 403, 409, 415, 422)
    text = {"type": "string"}

    @app.post(
        "/classes/rename",
        tags=["classes"],
        responses=changed,
        dependencies=[Security(TOKEN)],
        openapi_extra=schema.form("A known class and its new name.", **{"class": text, "name": text}),
    )
    async def rename(request: Request) -> JSONResponse:
        """Rename a class."""
        old, new = await names(request, "class", "name")
        await server.change(lambda learner: learner.rename(old, new))
        return JSONResponse({"classes": server.model.current.learner.classes_})

    @app.post(
        "/classes/remove",
        tags=["classes"],
        responses=changed,
        dependencies=[Security(TOKEN)],
        openapi_extra=schema.form("A known class.", **{"class": text}),
    )
    async def remove(request: Request) -> JSONResponse:
        """Remove a class, with its stored images and all older versions of the model."""
        (name,) = await names(request, "class")
        await server.change(lambda learner: learner.remove(name))
        return JSONResponse({"classes": server.model.current.learner.classes_})


def _add_advice(app: FastAPI, server: Server) -> None:
    async def advise(request: Request, work: Callable[[UploadFile], Awaitable[dict[str, Any]]]) -> JSONResponse:
        form = await read_form(request, 1)
        try:
            uploads = files_of(form)
            if not uploads:
                raise Refusal(422, "There is no zip in the form; send one with: curl -F file=@PHOTOS.zip")
            return JSONResponse(await work(uploads[0]))
        finally:
            await form.close()

    refusals = (401, 409, 413, 415, 422, 429)

    @app.post(
        "/check",
        tags=["advice"],
        responses=schema.answers(200, schema.Checked, *refusals),
        dependencies=[Security(TOKEN)],
        openapi_extra=schema.form("A zip of class folders (CLASS/*.jpg).", file=schema.FILE),
    )
    async def check(request: Request) -> JSONResponse:
        """Look for bad files, equal pictures and likely wrong labels, as `tpl check` does; nothing is learned."""
        return await advise(request, lambda up: server.advice.check(server.model.current, up, server.spool))

    @app.post(
        "/suggest",
        tags=["advice"],
        responses=schema.answers(200, schema.Suggested, *refusals),
        dependencies=[Security(TOKEN)],
        openapi_extra=schema.form("A zip of photos without labels.", file=schema.FILE),
    )
    async def suggest(
        request: Request, count: Annotated[int, Query(ge=1, le=MAX_SUGGESTED, description="photos to name")] = 20
    ) -> JSONResponse:
        """The photos most worth a label, as `tpl suggest` picks them."""
        return await advise(request, lambda up: server.advice.suggest(server.model.current, up, server.spool, count))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        # Its connections inherit it. Without it, an answer's body waits 40 ms until its header is acknowledged.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TplError(
            f"Cannot listen on {host}, port {port} ({reason}); choose another with --host or --port."
        ) from error


def address_of(listening: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(source: ModelSource, settings: Settings, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until interrupted; `ready` is called when the model is loaded."""
    set_up_log()
    app = create_app(source, settings)
    config = uvicorn.Config(
        app,
        server_header=False,
        proxy_headers=False,  # X-Forwarded-For is ignored
        timeout_graceful_shutdown=5,
        **uvicorn_settings(settings.limits),
    )
    ready()
    with contextlib.suppress(KeyboardInterrupt):  # the usual way to stop a server
        uvicorn.Server(config).run(sockets=[listening])
