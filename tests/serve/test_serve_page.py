"""The page of `tpl serve` in a real browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from browser import CHROMIUM, Browser
from conftest import Running, digit, serving

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: the page is not tried out")


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


def test_a_file_that_cannot_be_read_is_told_on_the_page(server: Running, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "broken.png"
    file.write_bytes(b"no picture")
    browser.open(server.url)
    browser.choose("#images", [file])
    browser.wait("document.querySelector('.result .wrong')")
    assert "broken.png is not an image" in browser.evaluate("document.querySelector('.result .wrong').textContent")


def test_an_answer_without_an_unknown_score_has_no_badge(server: Running, browser: Browser) -> None:
    browser.open(server.url)
    browser.wait("document.querySelectorAll('.chips li').length")
    top = "[{ class: 'a', probability: 0.9 }, { class: 'b', probability: 0.1 }]"
    for unknown, badge in (("null", None), ("1", "perhaps unknown")):
        said = browser.evaluate(f"unfamiliar = 0; (doubt({{ unknown: {unknown}, top: {top} }}) || [null])[0]")
        assert said == badge


def test_the_page_can_be_used_with_the_keyboard(server: Running, browser: Browser) -> None:
    browser.open(server.url)
    browser.wait("document.querySelectorAll('.chips li').length")
    reached = []
    for _ in range(4):
        browser.press("Tab", 9)
        reached.append(browser.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert reached == ["images", "camera-on", "BUTTON", "BUTTON"]  # the classes are buttons
    browser.evaluate("document.querySelector('#add summary').focus()")
    browser.press("Enter", 13)
    assert browser.evaluate("document.getElementById('add').open")
    outline = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


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
    assert texts(browser, ".job li")[0] in (f"New classes: {n} of 1 held-out image right ({i})." for n, i in RIGHT)


RIGHT = (0, "0 to 79 %"), (1, "21 to 100 %")  # with the interval


def texts(browser: Browser, selector: str) -> list[str]:
    """The text of all elements that a selector finds."""
    found: list[str] = browser.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"
    )
    return found


def click(browser: Browser, selector: str) -> None:
    browser.evaluate(f"document.querySelector({json.dumps(selector)}).click()")


def write(browser: Browser, selector: str, text: str) -> None:
    browser.evaluate(f"document.querySelector({json.dumps(selector)}).value = {json.dumps(text)}")


@pytest.fixture
def opened(server: Running, browser: Browser) -> Browser:
    """The page with its token, at the width of a phone."""
    browser.open("about:blank")
    browser.open(f"{server.url}/#token={server.token}", 390, 844)
    browser.wait("document.querySelectorAll('.chips li').length")
    browser.console.clear()
    return browser


def test_chosen_images_are_checked_and_mended_on_the_page(opened: Browser, pictures: Pictures, tmp_path: Path) -> None:
    sevens, broken = pictures(7, 6), tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    copy = Path(shutil.copy(sevens[0], tmp_path / "copy.png"))
    opened.evaluate("document.getElementById('add').open = true")
    write(opened, "#rows input[type=text]", "sevens")
    opened.choose("#rows input[type=file]", [*sevens, broken, copy])
    click(opened, "#check")
    opened.wait("!document.querySelector('#findings').hidden || !document.querySelector('#problem').hidden", 60)
    titles = texts(opened, "#findings h3")
    assert titles[:2] == ["Unreadable", "The same picture"]
    assert texts(opened, "#findings .finding")[0].startswith("broken.png is not an image")
    assert opened.evaluate("document.querySelectorAll('#findings .thumbs img').length") >= 2
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for _ in range(2):  # leave the broken one out, keep one of the equal ones
        click(opened, "#findings .finding button")
    assert texts(opened, "#rows [role=status]") == ["6 images"]
    assert not {"Unreadable", "The same picture"} & set(texts(opened, "#findings h3"))
    assert opened.console == []


def test_a_wrong_answer_is_corrected_on_the_page(opened: Browser, server: Running, pictures: Pictures) -> None:
    before = images_of(server, "3")
    opened.choose("#images", pictures(3, 1))
    opened.wait("document.querySelector('.result .fix')")
    write(opened, ".fix input", "a/b")
    click(opened, ".fix button")
    opened.wait("document.querySelector('.fix .wrong')")
    assert "cannot be a name" in texts(opened, ".fix .wrong")[0]
    write(opened, ".fix input", "3")
    click(opened, ".fix button")
    opened.wait("document.querySelector('.job.done, .job.failed')", 120)
    assert texts(opened, ".job .state") == ["Learned"] and texts(opened, ".job li") == ["Added 1 more image of 3."]
    assert images_of(server, "3") == before + 1


def images_of(server: Running, name: str) -> int:
    tasks = httpx2.get(f"{server.url}/model").json()["tasks"]
    return next(int(task["images"] + task["held_out"]) for task in tasks if name in task["classes"])


def test_images_worth_a_label_are_picked_and_named(opened: Browser, pictures: Pictures) -> None:
    opened.evaluate("document.getElementById('pick-best').open = true")
    opened.choose("#unlabelled", [*pictures(1, 3), *pictures(5, 9)])
    opened.wait("document.querySelectorAll('#worth li').length === 8", 60)
    assert texts(opened, "#unlabelled-count") == ["8 of 12 images, the most useful first."]
    click(opened, "#teach-worth")
    assert texts(opened, "#suggest-problem") == ["Name at least one image."]
    opened.evaluate(
        "teach = async (pairs) => { throw new Error(pairs.map(([name, file]) => name + file.type).join()); }"
    )
    write(opened, "#worth li:first-child input", "1")
    click(opened, "#teach-worth")
    opened.wait("!document.querySelector('#suggest-problem').hidden")
    assert texts(opened, "#suggest-problem") == ["1image/png"]  # the named one goes the way of a correction
    assert opened.console == []


HOSTILE = "<img src=x onerror=alert(1)>"


def test_a_class_is_renamed_and_removed_on_the_page(opened: Browser, server: Running) -> None:
    """The new name is markup: it is shown as it is, and nothing of it is run."""
    click(opened, "button.chip[title='0']")
    write(opened, "#edit-name", "1")
    click(opened, "#rename")
    opened.wait("document.querySelector('#edit').open && !document.querySelector('#edit-problem').hidden")
    assert "1" in texts(opened, "#edit-problem")[0]  # that class is there already
    write(opened, "#edit-name", HOSTILE)
    click(opened, "#rename")
    opened.wait(f"[...document.querySelectorAll('.chip')].some((chip) => chip.textContent === {json.dumps(HOSTILE)})")
    assert opened.evaluate("document.querySelectorAll('img[onerror]').length") == 0
    click(opened, "button.chip")
    assert texts(opened, "#edit-title") == [HOSTILE]
    click(opened, "#remove")
    assert opened.evaluate("!document.querySelector('#edit-warning').hidden")  # asks first
    assert HOSTILE in httpx2.get(f"{server.url}/model").json()["classes"]
    click(opened, "#remove")
    opened.wait(f"document.querySelector('.chip').textContent !== {json.dumps(HOSTILE)}")
    assert HOSTILE not in httpx2.get(f"{server.url}/model").json()["classes"]


def test_frames_of_the_camera_are_answered(opened: Browser) -> None:
    click(opened, "#camera-on")
    opened.wait("document.querySelector('#live b')")
    assert texts(opened, "#live b")[0]
    click(opened, "#shoot")
    opened.wait("document.querySelector('.result .verdict b')")
    click(opened, "#camera-off")
    assert opened.evaluate("document.querySelector('#camera').hidden && stream === null")
    assert opened.console == []


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (
            "Object.defineProperty(navigator, 'mediaDevices', { value: undefined, configurable: true })",
            "https:// pages",
        ),
        (
            "navigator.mediaDevices.getUserMedia = () => Promise.reject(new DOMException('', 'NotAllowedError'))",
            "was not allowed",
        ),
    ],
)
def test_without_a_camera_the_page_says_why(opened: Browser, prepare: str, message: str) -> None:
    opened.evaluate(f"void ({prepare})")
    click(opened, "#camera-on")
    opened.wait("!document.querySelector('#camera-problem').hidden")
    assert message in texts(opened, "#camera-problem")[0]


@pytest.mark.parametrize(
    ("answer", "badge"),
    [
        ({"unknown": 0.99, "top": [0.9, 0.1]}, "perhaps unknown"),
        ({"unknown": 0.1, "top": [0.5, 0.45]}, "not sure"),
        ({"unknown": 0.1, "top": [0.45, 0.2]}, "not sure"),
        ({"unknown": 0.1, "top": [0.9, 0.1]}, None),
    ],
)
def test_doubtful_answers_are_marked(opened: Browser, answer: dict[str, Any], badge: str | None) -> None:
    top = [{"class": name, "probability": p} for name, p in zip("ab", answer["top"], strict=True)]
    given = {"class": "a", "probability": top[0]["probability"], "top": top, "unknown": answer["unknown"]}
    found = opened.evaluate(f"unfamiliar = 0.95, verdict({json.dumps(given)}).map((part) => part.textContent)")
    assert found[2:] == ([badge] if badge else [])


def test_the_description_for_programs_is_readable(server: Running, browser: Browser) -> None:
    browser.open(f"{server.url}/docs", 360)
    browser.wait("document.querySelectorAll('article').length === 11")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
