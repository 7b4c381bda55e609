"""What the page offers beside predictions, over HTTP: advice, more images, other names; and who may ask for it."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from PIL import Image
from test_serve_learning import content, send

from conftest import KEY, Opener, archive, classes, digit
from tpl import Learner
from tpl.engine import Event
from tpl.serve.jobs import LEARNING, LearningJob
from tpl.serve.worker import JobSpec, Progress, learn_task

ROUTES = ("/check", "/suggest", "/classes/rename", "/classes/remove")


def post(client: TestClient, route: str, files: dict[str, bytes]) -> Any:
    return client.post(route, files={"file": ("photos.zip", archive(files))}, headers=KEY)


def form(client: TestClient, route: str, **fields: str) -> Any:
    return client.post(route, files={name: (None, value) for name, value in fields.items()}, headers=KEY)


def test_photos_are_checked_against_each_other_and_the_model(client: TestClient, learned: Path) -> None:
    before = content(learned)
    files = classes(6, 7, images=8) | {"6/again.png": digit(6, 0), "7/broken.png": b"no picture", "7/note.txt": b"hi"}
    files |= {"6/wrong.png": digit(7, 30), "1s/0.png": digit(1, 30)}
    response = post(client, "/check", files)
    assert response.status_code == 200, response.text
    found = response.json()
    assert found["classes"] == {"1s": 1, "6": 10, "7": 8}
    assert found["unreadable"][0].startswith("7/broken.png is not an image")
    assert found["equal_pictures"] == [{"files": ["6/0.png", "6/again.png"], "classes": ["6"]}]
    assert "6/wrong.png" in {entry["file"] for entry in found["likely_wrong_labels"]}
    assert found["left_out"][0]["suffix"] == ".txt"
    assert found["leave_one_out"]["images"] == 19
    assert "tpl-serve-" not in response.text and str(learned) not in response.text  # no place on this machine
    assert content(learned) == before
    spool: Path = client.app.state.server.spool  # type: ignore[attr-defined]
    assert list(spool.iterdir()) == []


def test_the_most_useful_photos_are_those_that_the_command_picks(client: TestClient, learner: Learner) -> None:
    files = {f"{c}-{i}.png": digit(c, 40 + i) for c in (0, 5, 9) for i in range(4)} | {"x.png": b"no picture"}
    response = client.post("/suggest?count=3", files={"file": ("inbox.zip", archive(files))}, headers=KEY)
    found = response.json()
    assert found["images"] == 12 and len(found["unreadable"]) == 1 and found["unreadable"][0].startswith("x.png")
    assert len({entry["path"] for entry in found["suggested"]}) == 3
    for entry in found["suggested"]:
        (answer,) = learner.answers([Image.open(io.BytesIO(files[entry["path"]]))], 2)
        assert [e["class"] for e in entry["top"]] == [name for name, _ in answer.top]
    assert client.post("/suggest?count=0", files={"file": ("a.zip", b"")}, headers=KEY).status_code == 422


@pytest.mark.parametrize("route", ROUTES)
def test_all_of_it_needs_the_token(client: TestClient, route: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert client.post(route, files={"file": ("a.zip", b"")}, headers=headers).status_code == 401


def test_limits_hold_for_photos_to_check(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert post(client, "/check", {"../6/0.png": digit(6, 0)}).status_code == 422
    assert client.post("/check", files={"file": ("a.zip", b"no zip")}, headers=KEY).status_code == 422
    assert client.post("/check", content=b"{}", headers=KEY).status_code == 415
    assert "class folders" in post(client, "/check", {"0.png": digit(0, 0)}).json()["error"]
    assert post(client, "/suggest", {"note.txt": b"hi"}).status_code == 422
    monkeypatch.setattr("tpl.serve.advice.MAX_IMAGES", 3)
    for route in ("/check", "/suggest"):
        assert post(client, route, classes(6, 7, images=2)).status_code == 413


def test_one_check_at_a_time(opened: Opener) -> None:
    client = opened()
    advice = client.app.state.server.advice  # type: ignore[attr-defined]
    assert client.portal is not None
    client.portal.call(advice._busy.acquire)
    response = post(client, "/check", classes(6, 7, images=2))
    assert response.status_code == 429 and response.headers["retry-after"] == "5"
    client.portal.call(asyncio.to_thread, advice._busy.release)
    assert post(client, "/check", classes(6, 7, images=2)).status_code == 200


def test_classes_are_renamed_and_removed(opened: Opener, model: Path) -> None:
    client = opened()
    renamed = form(client, "/classes/rename", **{"class": "3", "name": " a/b <three> "})
    assert renamed.json() == {"classes": ["0", "1", "2", "a/b <three>"]}
    assert client.get("/model").json()["classes"] == renamed.json()["classes"]
    assert Learner.load(model, device="cpu").classes_ == renamed.json()["classes"]
    for fields, status in (
        ({"class": "0", "name": "1"}, 409),
        ({"class": "nobody", "name": "x"}, 409),
        ({"class": "0", "name": " "}, 409),
        ({"class": "0"}, 422),
    ):
        refused = form(client, "/classes/rename", **fields)
        assert refused.status_code == status and str(model) not in refused.text
    assert form(client, "/classes/remove", **{"class": "a/b <three>"}).json() == {"classes": ["0", "1", "2"]}
    assert form(client, "/classes/remove", **{"class": "a/b <three>"}).status_code == 409
    assert Learner.load(model, device="cpu").classes_ == ["0", "1", "2"]


def test_nothing_is_renamed_while_something_is_learned_or_by_a_read_only_server(opened: Opener) -> None:
    client = opened()
    writing = client.app.state.server.jobs.writing  # type: ignore[attr-defined]
    assert client.portal is not None
    client.portal.call(writing.acquire)  # as a job does
    refused = form(client, "/classes/rename", **{"class": "0", "name": "zero"})
    assert refused.status_code == 409 and "being changed" in refused.json()["error"]
    client.portal.call(asyncio.to_thread, writing.release)
    assert form(client, "/classes/rename", **{"class": "0", "name": "zero"}).status_code == 200
    closed = opened(read_only=True)
    for route in ("/classes/rename", "/classes/remove"):
        assert form(closed, route, **{"class": "1", "name": "one"}).status_code == 403
    assert post(closed, "/check", classes(6, 7, images=2)).status_code == 200  # changes nothing


def test_images_of_known_classes_are_taken_if_that_is_said(opened: Opener) -> None:
    client = opened()
    assert "update=true" in send(client, classes(0, 7)).json()["error"]
    job = send(client, classes(0, 7), update="true").json()
    assert job["known"] == ["0"] and job["seconds_left"] is None and job["outcome"] is None
    assert send(client, classes(7), update="true").status_code == 409  # still new, and on its way
    assert send(client, classes(0), update="true").status_code == 202
    assert form(client, "/classes/remove", **{"class": "0"}).status_code == 409  # a job needs it


def test_more_images_are_added_and_the_effect_is_told(model: Path, tmp_path: Path) -> None:
    def learned_from(files: dict[str, bytes]) -> dict[str, Any]:
        file, told = tmp_path / "new.zip", list[dict[str, Any]]()
        file.write_bytes(archive(files))
        spec = JobSpec(str(model), str(file), "new.zip", f"task of {len(files)}", "cpu", pixels=10**6, epochs=1)
        learn_task(spec, lambda **report: told.append(report))
        return told[-2]["outcome"] | told[-1]

    outcome = learned_from(classes(0, 7, images=5))
    assert outcome["learned"] == ["7"] and outcome["updated"] == {"0": 5}
    assert outcome["measured"]["images"] == outcome["done"]["held_out"] > 0
    low, high = outcome["measured"]["interval"]
    assert 0 <= low <= outcome["measured"]["accuracy"] <= high <= 1
    alone = learned_from({"7/a.png": digit(7, 33)})
    assert alone["updated"] == {"7": 1} and alone["done"]["images"] == 1 and alone["measured"] is None
    entries = json.loads((model / "model.json").read_text())["tasks"]
    counts = {name: n + h for e in entries for name, n, h in zip(e["classes"], e["images"], e["held_out"], strict=True)}
    assert (counts["0"], counts["7"]) == (12 + 5, 5 + 1)


def test_older_classes_before_and_after_are_told(tmp_path: Path) -> None:
    """By a method that leaves images out in turn; every count is of the same images."""
    learner = Learner("closed-form", device="cpu")
    pictures = [(Image.open(io.BytesIO(digit(c, i))), str(c)) for c in (0, 1) for i in range(6)]
    learner.learn([image for image, _ in pictures], [name for _, name in pictures]).save(tmp_path / "model")
    (tmp_path / "new.zip").write_bytes(archive(classes(7, 8)))
    told: list[dict[str, Any]] = []
    spec = JobSpec(str(tmp_path / "model"), str(tmp_path / "new.zip"), "new.zip", "new", "cpu", pixels=10**6)
    learn_task(spec, lambda **report: told.append(report))
    outcome = told[-2]["outcome"]
    assert outcome["old_classes"]["before"]["images"] == outcome["old_classes"]["after"]["images"] == 12
    assert outcome["measured"]["images"] == 12 and not outcome["measured"]["held_out"]


def test_the_time_left_follows_from_the_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = 100.0
    monkeypatch.setattr("tpl.serve.jobs.time.monotonic", lambda: now)
    job = LearningJob("id", tmp_path, "a.zip", "a", ("a",))
    job.start()
    assert job.state == LEARNING and job.seconds_left is None
    job.update({"progress": 0.2})
    assert job.seconds_left is None  # one point is no pace
    now = 110.0
    job.update({"progress": 0.4})
    assert job.seconds_left == pytest.approx(30.0)
    job.fail("no")
    assert job.seconds_left is None


def test_progress_goes_on_where_nothing_is_trained() -> None:
    sent: list[dict[str, Any]] = []
    progress = Progress(lambda **report: sent.append(report))
    for kind, done in (("prepare", 10), ("prepare", 30), ("encode", 10), ("encode", 30)):
        progress(Event(kind, {"done": done, "images": 40}))
    shares = [report["progress"] for report in sent]
    assert shares == sorted(set(shares)) and shares[1] < 0.2 and shares[-1] > 0.9
    assert sent[-1]["message"] == "encoding 40 images"


def test_a_share_of_known_images_may_be_rejected(client: TestClient, learner: Learner) -> None:
    pictures = [digit(c, 40) for c in (0, 1, 5, 9)]
    files = [("files", (f"{i}.png", picture)) for i, picture in enumerate(pictures)]
    plain = client.post("/predict", files=files).json()["answers"]
    assert all("rejected" not in answer for answer in plain)
    share = learner.rejection_floor()
    answers = client.post(f"/predict?reject={share}", files=files).json()["answers"]
    expected = [a.rejected(share) for a in learner.answers([Image.open(io.BytesIO(p)) for p in pictures])]
    assert [answer["rejected"] for answer in answers] == expected
    assert [answer["class"] is None for answer in answers] == expected
    for wrong in ("0", "1", "x"):
        assert client.post(f"/predict?reject={wrong}", files=files[:1]).status_code == 422


@pytest.mark.parametrize("name", ["top", "tasks", "examples"])
def test_an_option_of_the_address_is_refused_in_the_form(client: TestClient, name: str) -> None:
    files = [("files", ("a.png", digit(0, 40)))]
    answer = client.post("/predict", files=files, data={name: "1"})
    assert answer.status_code == 422 and f"/predict?{name}=1" in answer.json()["error"]
    assert client.post(f"/predict?{name}=1", files=files, data={"comment": "1"}).status_code == 200
