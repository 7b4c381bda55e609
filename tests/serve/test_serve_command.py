"""`tpl serve` as a process, and its page in a real browser."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from browser import CHROMIUM, Browser
from conftest import archive, classes, digit, workers
from tpl import Learner
from tpl.cli import app as commands
from tpl.errors import TplError

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: the page is not tried out")


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


@pytest.fixture(scope="module")
def server(learned: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all that happens on the page."""
    model = Path(shutil.copytree(learned, tmp_path_factory.mktemp("served") / "model"))
    with serving(model) as running:
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], list[Path]]:
    """Files with pictures of a digit."""
    folder = tmp_path_factory.mktemp("pictures")

    def make(c: int, count: int) -> list[Path]:
        files = [folder / f"{c}-{i}.png" for i in range(count)]
        for i, file in enumerate(files):
            file.write_bytes(digit(c, 50 + i))
        return files

    return make


Pictures = Callable[[int, int], list[Path]]


@needs_browser
def test_the_page_shows_what_is_known(server: Running, browser: Browser) -> None:
    browser.open(server.url)
    browser.wait("document.querySelectorAll('.chips li').length")
    shown = browser.evaluate("[...document.querySelectorAll('.chips li')].map((chip) => chip.textContent)")
    assert shown == ["0", "1", "2", "3"]
    assert browser.evaluate("document.getElementById('about').textContent") == (
        "This model knows 4 classes, learned in 2 tasks."
    )
    assert browser.evaluate("[...document.querySelectorAll('.chips img')].every((image) => image.naturalWidth === 32)")
    assert browser.console == []


@needs_browser
@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_an_image_chosen_on_the_page_is_answered(
    server: Running, browser: Browser, pictures: Pictures, width: int, dark: bool
) -> None:
    (file,) = pictures(2, 1)
    browser.open(server.url, width, 800, dark)
    browser.choose("#images", [file])
    browser.wait("document.querySelector('.result .verdict b')")
    answer = httpx2.post(f"{server.url}/predict", files={"files": (file.name, file.read_bytes())}).json()["answers"][0]
    assert browser.evaluate("document.querySelector('.result .verdict b').textContent") == answer["class"]
    classes = browser.evaluate(
        "[...document.querySelectorAll('.of-classes li > :first-child')].map((e) => e.textContent)"
    )
    assert classes == [entry["class"] for entry in answer["top"]]
    assert browser.evaluate("document.querySelectorAll('.of-tasks li').length") == 2
    assert browser.evaluate("document.querySelectorAll('.near img').length") == 12
    browser.wait("parseFloat(document.querySelector('.of-classes .fill').style.width) > 20")  # bars are drawn
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")  # nothing sticks out
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(background) < 60) is dark
    assert browser.console == []


@needs_browser
def test_the_page_can_be_used_with_the_keyboard(server: Running, browser: Browser) -> None:
    browser.open(server.url)
    browser.wait("document.querySelectorAll('.chips li').length")
    reached = []
    for _ in range(4):
        browser.press("Tab", 9)
        reached.append(browser.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert reached[:2] == ["images", "SUMMARY"]
    browser.evaluate("document.querySelector('summary').focus()")
    browser.press("Enter", 13)
    assert browser.evaluate("document.getElementById('add').open")
    outline = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


@needs_browser
def test_a_class_is_added_on_the_page(server: Running, browser: Browser, pictures: Pictures) -> None:
    """The zip is made by the page's own script; the token is asked for, and a wrong one is asked for again."""
    browser.open(server.url)
    browser.wait("document.querySelectorAll('.chips li').length")
    browser.evaluate("document.getElementById('add').open = true; document.querySelector('#send').click()")
    assert browser.evaluate("document.querySelector('#problem').textContent") == "Give every class a name."
    browser.evaluate("document.querySelector('#name-1').value = 'séven & co'")
    browser.choose("#files-1", pictures(7, 5))
    browser.evaluate("document.querySelector('#send').click()")
    for token in ("a-wrong-token-indeed", server.token):
        browser.wait("document.querySelector('#ask').open")
        enter = f"document.querySelector('#token').value = '{token}'"
        browser.evaluate(f"{enter}; document.querySelector('#ask button.main').click()")
        browser.wait("!document.querySelector('#ask').open || !document.querySelector('#refused').hidden")
    browser.wait("document.querySelector('.job.done, .job.failed')", seconds=120)
    assert browser.evaluate("document.querySelector('.job .state').textContent") == "Learned"
    browser.wait("document.querySelectorAll('.chips li').length === 5")
    shown = browser.evaluate("[...document.querySelectorAll('.chips li')].map((chip) => chip.textContent)")
    assert shown[-1] == "séven & co"


@needs_browser
def test_the_description_for_programs_is_readable(server: Running, browser: Browser) -> None:
    browser.open(f"{server.url}/docs", 360)
    browser.wait("document.querySelectorAll('article').length === 7")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_killing_the_server_ends_its_learning_and_leaves_the_model(model: Path) -> None:
    with serving(model) as running:
        key = {"Authorization": f"Bearer {running.token}"}
        files = {"file": ("new.zip", archive(classes(7)))}
        assert httpx2.post(f"{running.url}/tasks", files=files, headers=key).status_code == 202
        pids = []
        while not pids:
            pids = workers(running.process.pid)
            time.sleep(0.05)
        running.process.kill()
        running.process.wait()
        end = time.monotonic() + 30
        while Path(f"/proc/{pids[0]}").exists() and "Z" not in Path(f"/proc/{pids[0]}/stat").read_text().split()[2]:
            assert time.monotonic() < end, "the worker has outlived its server"
            time.sleep(0.05)
    assert Learner.load(model, device="cpu").classes_ == ["0", "1", "2", "3"]


def test_interrupting_the_server_is_its_regular_end(learned: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("the-token-of-this-test", encoding="utf-8")
    with serving(learned, "--token-file", str(token), "--read-only") as running:
        assert running.token is None  # known already: not printed
        assert httpx2.get(f"{running.url}/health").json()["classes"] == 4
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(timeout=20) == 0


def test_a_port_in_use_and_a_missing_model_are_told(learned: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(TplError, match=f"port {port} .*choose another with --host or --port"):
            commands(["serve", str(learned), "--port", port], standalone_mode=False)
    with pytest.raises(TplError, match="holds no model"):
        commands(["serve", str(tmp_path), "--port", "0"], standalone_mode=False)
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_the_command_says_how_to_install_it(learned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name == "uvicorn" else found(name, package)

    monkeypatch.setattr("tpl.cli.serve.find_spec", find)
    with pytest.raises(TplError, match=r"needs uvicorn; install with: pip install 'tpl-cil\[serve\]'"):
        commands(["serve", str(learned)], standalone_mode=False)
