"""Learning in the background: predictions go on, a failure changes nothing, nobody else is overwritten."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from PIL import Image

from conftest import ADDRESS, KEY, TOKEN, Opener, archive, classes, digit, workers
from tpl import Learner
from tpl.schedule import SMALL
from tpl.serve.app import create_app
from tpl.serve.model import ModelSource
from tpl.serve.security import Access
from tpl.serve.server import Settings
from tpl.serve.uploads import Limits
from tpl.serve.worker import JobSpec, learn_task
from tpl.store import ModelStore

PATIENCE = 120.0


def send(client: TestClient, files: dict[str, bytes], **fields: str) -> Any:
    return client.post("/tasks", files={"file": ("birds.zip", archive(files))}, data=fields, headers=KEY)


def ask(client: TestClient, *pictures: bytes) -> list[dict[str, Any]]:
    response = client.post("/predict", files=[("files", (f"{i}.png", p)) for i, p in enumerate(pictures)])
    assert response.status_code == 200
    answers: list[dict[str, Any]] = response.json()["answers"]
    return answers


def wait(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def finished(client: TestClient, id: str) -> dict[str, Any]:
    def over() -> dict[str, Any] | None:
        job: dict[str, Any] = client.get(f"/tasks/{id}").json()
        return job if job["state"] in ("done", "failed") else None

    found: dict[str, Any] = wait(over)
    return found


def content(model: Path) -> dict[str, bytes]:
    """All files of a model but the lock's."""
    files = [file for file in model.rglob("*") if file.is_file() and not file.name.startswith(".")]
    return {str(file.relative_to(model)): file.read_bytes() for file in files}


def test_a_task_is_learned_while_predictions_go_on_and_a_bad_one_changes_nothing(opened: Opener, model: Path) -> None:
    client = opened()
    before, picture = content(model), digit(1, 40)
    good = send(client, classes(7, 8, images=5) | {"7/broken.png": b"no picture"}, name="more digits")
    assert good.status_code == 202
    job = good.json()
    assert good.headers["location"] == f"/tasks/{job['id']}"
    assert (job["name"], job["classes"]) == ("more digits", ["7", "8"])
    assert send(client, classes(8)).status_code == 409  # on its way already
    bad = send(client, classes(9) | {"6/broken.png": b"no picture"}).json()
    assert bad["name"] == "birds"  # after its file
    states, answers = set(), []
    while True:
        other = client.get(f"/tasks/{bad['id']}").json()["state"]
        state = client.get(f"/tasks/{job['id']}").json()
        if state["state"] in ("done", "failed"):
            break
        states.add(state["state"])
        assert other == "queued"  # one after the other
        answers += ask(client, picture)
        time.sleep(0.3)  # on two cores the other process needs some of the time
    assert state["state"] == "done", state["message"]
    assert "learning" in states and len(answers) >= 3
    old = {"0", "1", "2", "3"}
    assert all({entry["class"] for entry in answer["top"]} == old for answer in answers[:-1])
    assert state["progress"] == 1.0 and state["task"]["images"] + state["task"]["held_out"] == 10
    assert len(state["warnings"]) == 1 and state["warnings"][0].startswith(
        "Left out, as they cannot be read: 7/broken.png"
    )

    assert client.get("/model").json()["classes"] == ["0", "1", "2", "3", "7", "8"]
    assert {entry["class"] for entry in ask(client, picture)[0]["top"]} - old
    after = content(model)
    assert after != before
    on_disk = Learner.load(model, device="cpu")
    assert on_disk.tasks_[-1].name == "more digits" and on_disk.tasks_[-1].source == "birds.zip"
    expected = on_disk.answers([Image.open(io.BytesIO(picture))])[0]
    assert ask(client, picture)[0]["class"] == expected.name

    failed = finished(client, bad["id"])
    assert failed["state"] == "failed"
    assert failed["message"].startswith("No image of 6 can be read: 6/broken.png")
    assert failed["message"].endswith("The model is unchanged.")
    assert content(model) == after
    spool: Path = client.app.state.server.spool  # type: ignore[attr-defined]
    assert list(spool.iterdir()) == []


def test_a_task_sent_again_is_refused_for_its_classes_first(opened: Opener) -> None:
    client = opened()
    again = send(client, classes(0, 1), name="task 1")
    assert again.status_code == 409 and again.json()["error"].startswith("Already learned: 0, 1.")
    other = send(client, classes(7), name="task 1")
    assert other.status_code == 409 and other.json()["error"].startswith("There is a task 'task 1' already")
    spool: Path = client.app.state.server.spool  # type: ignore[attr-defined]
    assert list(spool.iterdir()) == []


def test_a_killed_learner_leaves_the_model_as_it_was(opened: Opener, model: Path) -> None:
    client = opened()
    before = content(model)
    job = send(client, classes(7)).json()
    wait(lambda: client.get(f"/tasks/{job['id']}").json()["progress"] > 0)  # in the middle of it
    (pid,) = workers(os.getpid())
    os.kill(pid, signal.SIGKILL)
    failed = finished(client, job["id"])
    assert failed["state"] == "failed" and "exit code -9" in failed["message"]
    assert content(model) == before
    assert ask(client, digit(0, 40))[0]["class"] in "0123"


def test_a_stopped_server_gives_up_what_it_was_learning(opened: Opener, model: Path) -> None:
    client = opened()
    before = content(model)
    send(client, classes(7))
    wait(lambda: workers(os.getpid()))
    client.__exit__(None, None, None)
    assert workers(os.getpid()) == []
    assert content(model) == before
    client.__enter__()  # for the fixture to close


def test_a_directory_that_somebody_else_writes_is_not_touched(opened: Opener, model: Path) -> None:
    client = opened()
    with ModelStore(model).writing():
        failed = finished(client, send(client, classes(7)).json()["id"])
    assert failed["state"] == "failed" and "another process" in failed["message"]


def test_what_somebody_else_has_committed_is_served(opened: Opener, model: Path) -> None:
    client = opened(poll_seconds=0.1)
    with Learner.changing(model, device="cpu") as learner:
        learner.rename("3", "three")
    wait(lambda: client.get("/model").json()["classes"] == ["0", "1", "2", "three"])


def test_a_damaged_model_does_not_replace_the_good_one(
    opened: Opener, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = opened(poll_seconds=0.1)
    header = model / "model.json"
    header.rename(model / "kept.json")
    header.write_text("{ no model", encoding="utf-8")
    wait(lambda: "cannot be loaded yet" in caplog.text)
    assert ask(client, digit(0, 40))[0]["class"] in "0123"


def test_a_full_queue_is_told(opened: Opener) -> None:
    client = opened(limits=Limits(queue=1))  # and one that is being learned
    assert [send(client, classes(c)).status_code for c in (5, 6, 7)] == [202, 202, 429]
    names = [job["classes"] for job in client.get("/tasks").json()["tasks"]]
    assert names == [["5"], ["6"]]
    assert client.get("/health").json()["status"] == "ok"


def test_a_model_that_knows_nothing_yet_is_served(tmp_path: Path) -> None:
    Learner(latent=8, epochs=1, device="cpu").save(tmp_path / "model")
    app = create_app(ModelSource(tmp_path / "model", "cpu", epochs=1), Settings(Access(TOKEN)))
    with TestClient(app, base_url=ADDRESS) as client:
        assert client.get("/model").json()["classes"] == []
        response = client.post("/predict", files={"files": ("0.png", digit(0, 0))})
        assert response.status_code == 409 and "Nothing was learned yet" in response.json()["error"]


def test_a_method_that_would_forget_is_not_taught(tmp_path: Path) -> None:
    """Joint training begins afresh with all data; a new task alone would wipe the old ones."""
    learner = Learner("joint", latent=8, epochs=1, device="cpu")
    learner.learn([Image.open(io.BytesIO(digit(c, i))) for c in (0, 1) for i in range(3)], list("000111"))
    learner.save(tmp_path / "model")
    app = create_app(ModelSource(tmp_path / "model", "cpu", epochs=1), Settings(Access(TOKEN)))
    with TestClient(app, base_url=ADDRESS) as client:
        response = send(client, classes(7))
        assert response.status_code == 409 and "needs all images at once" in response.json()["error"]
        (answer,) = ask(client, digit(0, 5))
        assert answer["class"] in "01" and answer["unknown"] is None
        shown = client.post("/predict?examples=3", files={"files": ("0.png", digit(0, 5))}).json()["answers"][0]
        assert shown["examples"] == []  # it has no task models to see with


def test_a_small_task_gets_as_many_epochs_as_tpl_learn_gives_it(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "new.zip"
    file.write_bytes(archive({f"7/{i}.png": digit(7, i) for i in range(5)}))
    told: list[dict[str, Any]] = []
    learn_task(
        JobSpec(str(model), str(file), "new.zip", "seven", "cpu", pixels=10**6), lambda **news: told.append(news)
    )
    assert told[-1]["done"]["classes"] == ("7",)
    assert Learner.load(model, device="cpu").method.config.epochs == SMALL.epochs(4, batch_size=8) == 40
