"""A tiny model of digits, a client of the application over it, and a server in a process of its own."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image
from sklearn.datasets import load_digits

from tpl import Learner
from tpl.serve.app import create_app
from tpl.serve.model import ModelSource
from tpl.serve.security import Access
from tpl.serve.server import Settings

TOKEN = "a-token-for-the-tests"
KEY = {"Authorization": f"Bearer {TOKEN}"}
HOSTS = ("127.0.0.1", "localhost", "::1")
ADDRESS = "http://127.0.0.1"
DIGITS = load_digits()


def digit(c: int, i: int) -> bytes:
    """The i-th picture of a digit, as a PNG file."""
    pixels = DIGITS.images[DIGITS.target == c][i]
    image = Image.fromarray(np.rint(pixels * (255 / 16)).astype(np.uint8)).resize((32, 32), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def archive(files: dict[str, bytes]) -> bytes:
    """A zip of some files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as target:
        for name, content in files.items():
            target.writestr(name, content)
    return buffer.getvalue()


def classes(*digits: int, images: int = 6) -> dict[str, bytes]:
    """Class folders with pictures of digits, the class's name being the digit."""
    return {f"{c}/{i}.png": digit(c, i) for c in digits for i in range(images)}


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory: two tasks of two digits."""
    path = tmp_path_factory.mktemp("learned") / "model"
    learner = Learner(latent=8, epochs=1, memory=16, batch_size=8, device="cpu")
    for number, task in enumerate(((0, 1), (2, 3)), start=1):
        pictures = [(Image.open(io.BytesIO(digit(c, i))), str(c)) for c in task for i in range(12)]
        learner.learn([image for image, _ in pictures], [name for _, name in pictures], name=f"task {number}")
    learner.save(path)
    return path


@pytest.fixture
def model(learned: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may change."""
    return Path(shutil.copytree(learned, tmp_path / "model"))


@pytest.fixture(scope="session")
def learner(learned: Path) -> Learner:
    """The same model in Python."""
    return Learner.load(learned, device="cpu")


@pytest.fixture(scope="session")
def client(learned: Path) -> Iterator[TestClient]:
    """A client of a server that nobody changes."""
    app = create_app(ModelSource(learned, "cpu", epochs=1), Settings(Access(TOKEN, hosts=HOSTS)))
    with TestClient(app, base_url=ADDRESS, raise_server_exceptions=False) as opened:
        yield opened


Opener = Callable[..., TestClient]


@pytest.fixture
def opened(model: Path) -> Iterator[Opener]:
    """Opens clients of servers with other settings, over a model that may change."""
    clients: list[TestClient] = []

    def open_client(access: Access | None = None, **settings: object) -> TestClient:
        chosen = Settings(access or Access(TOKEN, hosts=HOSTS), **settings)  # type: ignore[arg-type]
        app = create_app(ModelSource(model, "cpu", epochs=1), chosen)
        client = TestClient(app, base_url=ADDRESS, raise_server_exceptions=False)
        client.__enter__()
        clients.append(client)
        return client

    yield open_client
    for client in clients:
        client.__exit__(None, None, None)


def workers(pid: int) -> list[int]:
    """The worker processes of a server."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            command = (entry / "cmdline").read_text()
        except OSError:
            continue
        if parent == pid and "tpl.serve.worker" in command:
            found.append(int(entry.name))
    return found


@dataclass
class Running:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    url: str
    token: str | None


@contextmanager
def serving(model: Path, *options: str) -> Iterator[Running]:
    """`tpl serve MODEL` with some options, for a while."""
    command = [
        sys.executable,
        "-m",
        "tpl",
        "serve",
        str(model),
        "--port",
        "0",
        "--device",
        "cpu",
        "--epochs",
        "1",
        "--json",
        *options,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TPL_TOKEN"}
    # A shell that runs the tests in the background has its children ignore Ctrl-C: not this one.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=heed)
    try:
        assert process.stdout is not None
        said = "".join(iter(process.stdout.readline, "}\n")) + "}"
        hello: dict[str, Any] = json.loads(said)
        yield Running(process, hello["url"], hello["token"])
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
