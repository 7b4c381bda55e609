"""A machine learning backend for Label Studio: it labels images in advance, and learns new classes from annotations.

The messages are those of Label Studio's ML backends: GET health, POST setup, predict and webhook, here below
/label-studio. Images come as `data:` URLs or from the one Label Studio that the server was started for; no other host
is ever asked. They pass the same limits as uploads, and new classes are learned by the same queue as POST /tasks.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import json
import os
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, NoReturn
from urllib.parse import quote, unquote_to_bytes, urljoin, urlsplit
from xml.etree import ElementTree

from fastapi import FastAPI, Request, UploadFile
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from tpl.errors import TplError
from tpl.learner import check_stored_names
from tpl.serve.errors import Refusal, log
from tpl.serve.security import LABEL_STUDIO
from tpl.serve.server import Server
from tpl.serve.uploads import CLIENT_LEFT, MIB, Limits, check_request
from tpl.stream import is_image_name

MAX_MESSAGE = 32 * MIB  # bytes of JSON; images usually come by address
MAX_EXPORT = 64 * MIB  # bytes of a project's annotations
MAX_VALUES = 2_000_000  # in JSON: each takes far more memory than it has bytes
MAX_CONFIG = MIB  # characters of a labelling configuration
MAX_SHOWN = 10  # classes in a message
MAX_TASKS = 1000  # in one request
AT_ONCE = 4  # images of a request in memory at the same time: not more bytes than an upload may have
READERS = 2  # requests that read images at the same time
FEWEST = 5  # annotated images that a new class needs
SECONDS = 20.0  # for one answer of Label Studio, all of it
CHUNK = 64 << 10  # bytes of an answer read at a time
START = "START_TRAINING"
ANNOTATED = ("ANNOTATION_CREATED", "ANNOTATION_UPDATED", "ANNOTATION_DELETED")
TOKEN_VARIABLE = "LABEL_STUDIO_API_KEY"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect might lead to another host."""

    def redirect_request(self, request: Any, answer: Any, *_: Any) -> NoReturn:
        answer.close()
        raise Refusal(422, "Label Studio redirects to another address; give that one to --label-studio.")


@dataclass(frozen=True)
class LabelStudio:
    """A running Label Studio: its address, and the access token of a user for its images and annotations."""

    url: str
    token: str = ""

    @classmethod
    def at(cls, url: str) -> LabelStudio:
        """The Label Studio at an address; the access token is that of the environment."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise TplError(f"--label-studio needs an address such as http://localhost:8080; got '{url}'.")
        return cls(url.rstrip("/") + "/", os.environ.get(TOKEN_VARIABLE, "").strip())

    def read(self, address: str, most: int) -> bytes:
        """The content of a `data:` URL, or of an address of this Label Studio, of at most so many bytes."""
        if address.startswith("data:"):
            return _data_of(address, most)
        try:
            full = quote(urljoin(self.url, address.lstrip("/")), safe="%/:=&?~#+!$,;'@()*[]")
            urlsplit(full)
        except ValueError as error:  # no text in UTF-8, or brackets that are not closed
            raise Refusal(422, f"{address[:200]!r} is no address ({error}).") from error
        if not full.startswith(self.url):
            raise Refusal(
                422, f"{address[:200]!r} is not an address of Label Studio ({self.url}): nothing is read there."
            )
        request = urllib.request.Request(full, headers={"Authorization": f"Token {self.token}"} if self.token else {})
        opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
        try:
            with closing(opener.open(request, timeout=SECONDS)) as answer:
                content = _all_of(answer, most)
        except urllib.error.HTTPError as error:
            error.close()
            hint = f" Is {TOKEN_VARIABLE} set?" if error.code in (401, 403) else ""
            raise Refusal(422, f"Label Studio answers {error.code} for {address[:200]!r}.{hint}") from error
        except (OSError, ValueError, HTTPException) as error:
            raise Refusal(422, f"Label Studio cannot be reached for {address[:200]!r} ({error}).") from error
        if len(content) > most:
            raise Refusal(413, f"{address[:200]!r} is larger than {most // MIB} MiB, this server's limit.")
        return content


def _all_of(answer: Any, most: int) -> bytes:
    """The bytes of an answer, up to one more than `most`; TimeoutError if they come too slowly."""
    parts, total, end = [], 0, time.monotonic() + SECONDS
    while total <= most and (part := answer.read1(min(CHUNK, most + 1 - total))):
        if time.monotonic() > end:
            raise TimeoutError(f"it takes more than {SECONDS:g} seconds")
        parts.append(part)
        total += len(part)
    return b"".join(parts)


def _data_of(address: str, most: int) -> bytes:
    head, comma, body = address.partition(",")
    shown = head[:100]
    try:
        content = base64.b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise Refusal(422, f"The data: URL {shown!r} cannot be decoded ({error}).") from error
    if not comma or len(content) > most:
        raise Refusal(413, f"The data: URL {shown!r} is empty or larger than {most // MIB} MiB.")
    return content


@dataclass(frozen=True)
class Labelling:
    """What a labelling configuration asks: one choice about one image."""

    control: str  # name of the Choices
    image: str  # name of the Image
    key: str  # of the task's data
    choices: tuple[str, ...]

    @classmethod
    def of(cls, config: object) -> Labelling | None:
        """The first single choice about an image in a configuration; None if there is none."""
        if not isinstance(config, str) or len(config) > MAX_CONFIG or "<!DOCTYPE" in config.upper():
            raise Refusal(422, "The labelling configuration is not XML of at most a million characters.")
        try:
            root = ElementTree.fromstring(config)
        except (ElementTree.ParseError, RecursionError, ValueError) as error:  # a ValueError for what is no UTF-8
            raise Refusal(422, f"The labelling configuration cannot be read ({error}).") from error
        images = {each.get("name"): each.get("value", "") for each in root.iter("Image")}
        for control in root.iter("Choices"):
            name, image = control.get("name"), control.get("toName")
            value = images.get(image, "")
            if name and image and value.startswith("$"):
                choices = [each.get("alias") or each.get("value") or "" for each in control.iter("Choice")]
                return cls(name, image, value.removeprefix("$"), tuple(filter(None, choices)))
        return None

    def address(self, task: object) -> str:
        """Where the image of a task is."""
        data = task.get("data") if isinstance(task, dict) else None
        address = data.get(self.key) if isinstance(data, dict) else None
        if not isinstance(address, str) or not address:
            raise Refusal(422, f"A task has no image in its data[{self.key!r}].")
        return address

    def chosen(self, task: dict[str, Any]) -> str | None:
        """The one choice of a task's newest annotation that was not skipped."""
        for annotation in reversed(task.get("annotations") or []):
            if annotation.get("was_cancelled"):
                continue
            found = [
                choice
                for part in annotation.get("result") or []
                if part.get("type") == "choices" and part.get("from_name") == self.control
                for choice in part["value"]["choices"]
            ]
            return str(found[0]) if len(found) == 1 else None
        return None

    def prediction(self, answer: dict[str, Any], version: str) -> dict[str, Any]:
        """A model's answer as a prediction: the most probable class that can be chosen, or nothing."""
        offered = [entry for entry in answer.get("top", ()) if entry["class"] in self.choices]
        if not offered:
            return {"result": [], "score": 0.0, "model_version": version}
        value = {"choices": [offered[0]["class"]]}
        part = {"from_name": self.control, "to_name": self.image, "type": "choices", "value": value}
        return {"result": [part], "score": offered[0]["probability"], "model_version": version}


async def _message(request: Request) -> dict[str, Any]:
    """The JSON object in a request's body."""
    if not request.headers.get("content-type", "").startswith("application/json"):
        raise Refusal(415, "Send JSON, with Content-Type: application/json.")
    parts, total = [], 0
    try:
        async for part in request.stream():
            total += len(part)
            if total > MAX_MESSAGE:
                raise Refusal(413, f"The message is larger than {MAX_MESSAGE // MIB} MiB.")
            parts.append(part)
    except ClientDisconnect as error:
        raise Refusal(CLIENT_LEFT, "The client left before the end of its request.") from error
    return _object(await asyncio.to_thread(_parsed, b"".join(parts)), "The message")


def _parsed(content: bytes) -> Any:
    if sum(map(content.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise Refusal(413, f"The JSON has more than {MAX_VALUES} values.")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"The JSON cannot be read ({type(error).__name__}).") from error


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refusal(422, f"{what} must be a JSON object.")
    return value


def add_label_studio(app: FastAPI, server: Server, studio: LabelStudio) -> None:
    """Add the routes of the backend."""
    reading = asyncio.Semaphore(READERS)

    def version() -> str:
        return f"tpl-{server.model.current.commits}"

    @app.get(f"{LABEL_STUDIO}/health", tags=["label studio"])
    async def label_studio_health() -> JSONResponse:
        """Whether the backend is up."""
        return JSONResponse({"status": "UP", "model_class": server.model.current.learner.method.name})

    @app.post(f"{LABEL_STUDIO}/setup", tags=["label studio"])
    async def label_studio_setup(request: Request) -> JSONResponse:
        """The model's version; the labelling configuration is checked."""
        if Labelling.of((await _message(request)).get("schema")) is None:
            log.warning("label studio: the project has no <Choices> about an <Image> yet, so nothing can be predicted")
        return JSONResponse({"model_version": version()})

    @app.post(f"{LABEL_STUDIO}/predict", tags=["label studio"])
    async def label_studio_predict(request: Request) -> JSONResponse:
        """One prediction for each task, in their order."""
        message = await _message(request)
        labelling, tasks = Labelling.of(message.get("label_config")), message.get("tasks")
        tasks = tasks if isinstance(tasks, list) else [tasks]
        if len(tasks) > MAX_TASKS:
            raise Refusal(413, f"At most {MAX_TASKS} tasks a request; send them in several.")
        if labelling is None:
            return JSONResponse({"results": []})
        results: list[dict[str, Any]] = []
        for start in range(0, len(tasks), AT_ONCE):
            async with reading:
                results += await _predicted(server, studio, labelling, tasks[start : start + AT_ONCE], version())
        return JSONResponse({"results": results})

    @app.post(f"{LABEL_STUDIO}/webhook", tags=["label studio"], status_code=201)
    async def label_studio_webhook(request: Request) -> JSONResponse:
        """Learn the new classes of a project when training is started; other events are acknowledged."""
        message = await _message(request)
        event = message.get("action")
        if event in ANNOTATED:  # one annotation is no task: they are read when training is started
            return JSONResponse({"status": "ok", "result": None}, 201)
        if event != START:
            return JSONResponse({"status": "Unknown event"})
        server.check_writable()
        server.jobs.check_room()
        project = _object(message.get("project"), "The project")
        upload = await asyncio.to_thread(_annotated, server, studio, project)
        with closing(upload.file):
            job = await asyncio.to_thread(server.make_job, upload, None)
        try:
            server.jobs.submit(job)
        except Refusal:
            job.archive.unlink(missing_ok=True)
            raise
        return JSONResponse({"status": "ok", "result": {"job": job.id, "classes": job.classes}}, 201)


async def _predicted(
    server: Server, studio: LabelStudio, labelling: Labelling, tasks: list[Any], version: str
) -> list[dict[str, Any]]:
    """The predictions for a few tasks; those whose image cannot be read have no result."""
    model, limits = server.model.current, server.settings.limits
    loop = asyncio.get_running_loop()

    async def read(task: object) -> UploadFile | None:
        try:
            address = labelling.address(task)
            content = await loop.run_in_executor(server.decoders, studio.read, address, limits.image)
        except Refusal as refusal:
            log.warning("label studio: %s", refusal)
            return None
        return UploadFile(io.BytesIO(content), filename=_file_name(address))

    uploads = await asyncio.gather(*(read(task) for task in tasks))
    present = [upload for upload in uploads if upload is not None]
    await asyncio.to_thread(check_request, present, limits)
    options = {"top": max(len(model.task_of_class), 1)}
    given = iter(
        await asyncio.gather(*(server.answer(model, upload, options) for upload in present))
        if model.task_of_class
        else [{} for _ in present]
    )
    answers: list[dict[str, Any]] = [{} if upload is None else next(given) for upload in uploads]
    return [labelling.prediction(answer, version) for answer in answers]


def _file_name(address: str) -> str:
    """The image's file name, which ends as an image's does."""
    name = "image.png" if address.startswith("data:") else urlsplit(address).path.rsplit("/", 1)[-1][-100:]
    return name if is_image_name(name) else f"{name or 'image'}.png"


def _annotated(server: Server, studio: LabelStudio, project: dict[str, Any]) -> UploadFile:
    """A zip of the project's annotated images of classes that the model does not know."""
    labelling, number = Labelling.of(project.get("label_config")), project.get("id")
    if labelling is None or not isinstance(number, int):
        raise Refusal(422, "The project has no id, or no <Choices> about an <Image>.")
    limits = server.settings.limits
    exported = _parsed(studio.read(f"api/projects/{quote(str(number))}/export?exportType=JSON", MAX_EXPORT))
    found: dict[str, list[dict[str, Any]]] = {}
    for task, name in _labels(labelling, exported):
        if name not in server.model.current.task_of_class:
            found.setdefault(name, []).append(task)
    enough = {name: tasks for name, tasks in found.items() if len(tasks) >= FEWEST}
    if not enough:
        few = ", ".join(f"{name} ({len(tasks)})" for name, tasks in sorted(found.items())[:MAX_SHOWN])
        raise Refusal(
            409,
            f"There is nothing to learn: a new class needs {FEWEST} annotated images; there are: {few or 'none'}.",
        )
    file = tempfile.TemporaryFile(dir=server.spool)  # noqa: SIM115 (closed with the upload)
    try:
        _write_zip(file, studio, labelling, enough, limits)
    except BaseException:
        file.close()
        raise
    file.seek(0)
    return UploadFile(file, filename=f"Label Studio project {number}.zip")


def _labels(labelling: Labelling, exported: object) -> Iterator[tuple[dict[str, Any], str]]:
    """Exported tasks and their classes."""
    for task in exported if isinstance(exported, list) else ():
        try:
            name = labelling.chosen(task)
        except (AttributeError, KeyError, TypeError, IndexError) as error:
            raise Refusal(422, "Label Studio's export is not the JSON that its documentation describes.") from error
        if name is not None:
            check_stored_names("class", [name])
            yield task, name


def _write_zip(
    file: Any, studio: LabelStudio, labelling: Labelling, classes: dict[str, list[dict[str, Any]]], limits: Limits
) -> None:
    """Class folders in a zip; `Server.make_job` checks it as it checks an uploaded one."""
    if sum(map(len, classes.values())) > limits.zip_members:
        raise Refusal(413, f"More than {limits.zip_members} annotated images; use `tpl learn` with an export.")
    total = 0
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, tasks in classes.items():
            if "/" in name or "\\" in name or name.startswith("."):
                raise Refusal(422, f"The choice {name!r} cannot be a class: it is no name of a folder.")
            for row, task in enumerate(tasks):
                address = labelling.address(task)
                content = studio.read(address, limits.image)
                total += len(content)
                if total > limits.upload:
                    raise Refusal(413, f"The annotated images have more than {limits.upload // MIB} MiB together.")
                archive.writestr(f"{name}/{row}-{_file_name(address)}", content)
