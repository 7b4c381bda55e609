"""Messages as Label Studio sends them, with anything in them, and a Label Studio that answers with anything.

No address but Label Studio's own may be asked, whatever a message names.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import logging
import random
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.error import HTTPError
from urllib.request import OpenerDirector, Request

from torture.asgi import running
from torture.fuzz import Case, run_attempts
from torture.fuzz_images import KINDS, some
from torture.fuzz_requests import TOKEN, answered
from torture.mutations import mutate_json, mutated_bytes
from torture.small_models import learned
from torture.tally import Tally
from tpl.serve.app import create_app
from tpl.serve.jobs import JobQueue
from tpl.serve.label_studio import LabelStudio
from tpl.serve.model import ModelSource
from tpl.serve.security import Access
from tpl.serve.server import Settings
from tpl.serve.uploads import Limits

URL = "http://studio.example/"
CONFIG = (
    '<View><Image name="i" value="$image"/><Choices name="c" toName="i">'
    '<Choice value="zero"/><Choice value="new"/></Choices></View>'
)
ADDRESSES = (
    "/data/upload/1/a.png", "data/1.png", "file:///etc/passwd", "/etc/passwd", "http://169.254.169.254/latest",
    "//elsewhere.example/a.png", "http://studio.example@elsewhere.example/a.png", "http://studio.example.evil/a.png",
    "\\\\elsewhere\\a.png", "../../../etc/passwd", "http://studio.example/a b\r\nX: y", "ftp://studio.example/a",
    "gopher://x", "data:", "data:,", "data:image/png;base64,####", "http://[::1", "http://studio.example:99999/a.png",
    "?x=\ud800", "HTTP://STUDIO.EXAMPLE/a.png", "javascript:1", "\x00", "http:///a", "data:" + "x" * 10_000,
)  # fmt: skip


def run(seed: int, cases: int, place: Path) -> Tally:
    """Send messages to a server in this process; Label Studio is played."""
    learned(place / "model")
    tally = Tally("messages of Label Studio", seed)
    settings = Settings(Access(TOKEN), Limits(upload=1 << 20), label_studio=LabelStudio(URL, "its-token"))
    logging.getLogger("tpl.serve").setLevel(logging.CRITICAL)
    now: list[random.Random] = []

    def answer(opener: object, request: Request, *_: object, **__: object) -> Any:
        assert request.full_url.startswith(URL), f"{request.full_url} was asked"
        return _answer(now[-1], request.full_url)

    with (
        mock.patch.object(OpenerDirector, "open", answer),
        mock.patch.object(JobQueue, "submit", lambda queue, job: job.archive.unlink()),
        running(create_app(ModelSource(place / "model", "cpu"), settings)) as application,
    ):

        def attempt(draw: random.Random) -> str:
            now[:] = [draw]
            route, message = _message(draw)
            body = json.dumps(message).encode()
            body = mutated_bytes(body, draw) if draw.random() < 0.1 else body
            Case.text = f"{route} {body[:300]!r}"
            headers = {"authorization": f"Bearer {TOKEN}".encode(), "content-type": b"application/json"}
            return answered(application, "POST", f"/label-studio/{route}", "", headers, body)

        return run_attempts(tally, cases, attempt)


def _message(draw: random.Random) -> tuple[str, dict[str, Any]]:
    route = draw.choice(("predict", "predict", "webhook", "setup"))
    config = CONFIG if draw.random() < 0.8 else mutated_bytes(CONFIG.encode(), draw).decode("utf-8", "surrogateescape")
    if route == "setup":
        message: dict[str, Any] = {"schema": config, "hostname": URL, "project": "1.1"}
    elif route == "webhook":
        message = {"action": "START_TRAINING", "project": {"id": 1, "label_config": config}}
    else:
        tasks = [{"id": n, "data": {"image": _address(draw)}} for n in range(draw.choice((1, 1, 1, 2, 9)))]
        message = {"tasks": tasks, "label_config": config, "params": {"context": None}}
    if draw.random() < 0.5:
        mutate_json(message, draw)
    return route, message


def _address(draw: random.Random) -> str:
    if draw.random() < 0.6:
        return draw.choice(ADDRESSES)
    content = some(draw, draw.choice(KINDS))
    content = mutated_bytes(content, draw) if draw.random() < 0.5 else content
    return "data:image/png;base64," + base64.b64encode(content).decode()


def _answer(draw: random.Random, url: str) -> Any:
    """What Label Studio answers: an image or an export, perhaps damaged, or an error."""
    kind = draw.random()
    if kind < 0.1:
        raise draw.choice((OSError("reset"), HTTPError(url, 404, "no", None, None), ValueError("bad"), TimeoutError()))  # type: ignore[arg-type]
    if "/export" not in url:
        content = some(draw, draw.choice(KINDS))
        return io.BytesIO(mutated_bytes(content, draw) if kind < 0.5 else content)
    result = [{"value": {"choices": ["new"]}, "from_name": "c", "to_name": "i", "type": "choices"}]
    task = {"data": {"image": "/a.png"}, "annotations": [{"result": result, "was_cancelled": False}]}
    exported = {"tasks": [copy.deepcopy(task) for _ in range(6)]}
    if draw.random() < 0.7:
        mutate_json(exported, draw)
    content = json.dumps(exported.get("tasks")).encode()
    return io.BytesIO(mutated_bytes(content, draw) if draw.random() < 0.3 else content)
