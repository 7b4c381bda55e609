"""The backend for Label Studio: the messages that Label Studio's documentation describes, from one that is played."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import OpenerDirector

import pytest
from fastapi.testclient import TestClient

from conftest import HOSTS, KEY, TOKEN, Opener, digit
from tpl import Learner
from tpl.errors import TplError
from tpl.serve import label_studio
from tpl.serve.errors import Refusal
from tpl.serve.label_studio import FEWEST, MAX_TASKS, Labelling, LabelStudio
from tpl.serve.security import Access
from tpl.serve.uploads import Limits

CONFIG = """<View>
  <Image name="picture" value="$image"/>
  <Choices name="digit" toName="picture" choice="single">
    <Choice value="0"/><Choice value="1"/><Choice value="2"/><Choice value="3"/><Choice value="seven"/>
  </Choices>
</View>"""
PROJECT = {"id": 12, "title": "Digits", "label_config": CONFIG}


@dataclass
class Played:
    """A small Label Studio: images, one project's export, and what it was asked."""

    url: str = ""
    tasks: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def annotate(self, choice: str, image: bytes, cancelled: bool = False) -> None:
        """A task with one annotation, as exported."""
        number = len(self.tasks) + 1
        path = f"/data/upload/12/{number}-a%20digit.png"
        self.files[path] = image
        result = [{"value": {"choices": [choice]}, "from_name": "digit", "to_name": "picture", "type": "choices"}]
        annotation = {"id": number, "result": result, "was_cancelled": cancelled}
        self.tasks.append({"id": number, "data": {"image": path}, "annotations": [annotation]})


@pytest.fixture
def studio() -> Iterator[Played]:
    played = Played()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            played.asked.append((self.path, self.headers.get("Authorization")))
            if self.path == "/moved":
                self.send_response(302)
                self.send_header("Location", "http://127.0.0.1:9/elsewhere")
                self.end_headers()
                return
            known = played.files | {"/api/projects/12/export?exportType=JSON": json.dumps(played.tasks).encode()}
            content = known.get(self.path)
            self.send_response(200 if content is not None else 404)
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    played.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield played
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def backend(opened: Opener, studio: Played) -> TestClient:
    return opened(label_studio=LabelStudio(f"{studio.url}/", "its-token"))


def post(client: TestClient, route: str, message: Any, **headers: str) -> Any:
    return client.post(f"/label-studio/{route}", json=message, headers=KEY | headers)


def predict(client: TestClient, *images: object) -> list[dict[str, Any]]:
    """The predictions for tasks, asked for as Label Studio does."""
    message = {
        "tasks": [{"id": i, "data": {"image": image}} for i, image in enumerate(images)],
        "model_version": "tpl-1",
        "project": "12.1629207000",
        "label_config": CONFIG,
        "params": {"login": None, "password": None, "context": None},
    }
    answer = post(client, "predict", message)
    assert answer.status_code == 200, answer.text
    results: list[dict[str, Any]] = answer.json()["results"]
    return results


def as_data(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


def test_health_and_setup(backend: TestClient) -> None:
    assert backend.get("/label-studio/health").json() == {"status": "UP", "model_class": "tpl"}
    message = {
        "project": "12.1629207000",
        "schema": CONFIG,
        "hostname": "http://localhost:8080",
        "access_token": "0123456789",
        "extra_params": {},
    }
    assert post(backend, "setup", message).json() == {"model_version": "tpl-1"}
    empty = post(backend, "setup", {"project": "1.1000000000", "schema": "<View></View>", "extra_params": {}})
    assert empty.status_code == 200  # a project without questions can be connected


def test_predictions_are_those_of_the_model(backend: TestClient, learner: Learner, studio: Played) -> None:
    images = [digit(c, 40) for c in range(4)]
    studio.files["/data/upload/12/x.png"] = images[3]
    found = predict(backend, *map(as_data, images[:3]), "/data/upload/12/x.png")
    answers = backend.post("/predict", files=[("files", (f"{i}.png", image)) for i, image in enumerate(images)])
    for prediction, answer in zip(found, answers.json()["answers"], strict=True):
        (part,) = prediction["result"]
        assert part["value"] == {"choices": [answer["class"]]}
        assert (part["from_name"], part["to_name"], part["type"]) == ("digit", "picture", "choices")
        assert prediction["score"] == answer["probability"] and prediction["model_version"] == "tpl-1"
    assert studio.asked == [("/data/upload/12/x.png", "Token its-token")]


def test_only_choices_of_the_project_are_predicted(backend: TestClient) -> None:
    config = CONFIG.replace('<Choice value="0"/>', "").replace('<Choice value="1"/>', "")
    message = {"tasks": [{"data": {"image": as_data(digit(0, 40))}}], "label_config": config}
    (prediction,) = post(backend, "predict", message).json()["results"]
    answer = backend.post("/predict", files={"files": ("0.png", digit(0, 40))}).json()["answers"][0]
    likelier = max((e for e in answer["top"] if e["class"] in ("2", "3")), key=lambda entry: entry["probability"])
    assert prediction["result"][0]["value"]["choices"] == [likelier["class"]]
    assert prediction["score"] == likelier["probability"]
    message["label_config"] = CONFIG.replace("<Choice ", "<Other ")
    assert post(backend, "predict", message).json()["results"] == [
        {"result": [], "score": 0.0, "model_version": "tpl-1"}
    ]
    assert post(backend, "predict", {"tasks": {"id": 1}, "label_config": "<View></View>"}).json() == {"results": []}


@pytest.mark.parametrize(
    "image",
    [
        "http://169.254.169.254/latest/meta-data",
        "file:///etc/passwd",
        "s3://bucket/a.png",
        "/moved",
        "/missing.png",
        "data:image/png;base64,*",
        "data:image/png;base64,AAAA",
        "http://[::1",
        None,
        {"a": 1},
    ],
)
def test_an_image_that_cannot_be_read_has_no_prediction(backend: TestClient, studio: Played, image: object) -> None:
    found = predict(backend, image, as_data(digit(1, 40)))
    assert found[0]["result"] == [] and found[1]["result"]
    assert all(path in ("/moved", "/missing.png") for path, _ in studio.asked)


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/a", "http://localhost.evil.test/a", "../a", "//h/a"])
def test_no_other_host_is_asked(studio: Played, address: str) -> None:
    with pytest.raises(Refusal) as refusal:
        LabelStudio(f"{studio.url}/studio/").read(address, 100)
    assert refusal.value.status == 422
    assert all(path.startswith("/studio/") for path, _ in studio.asked)


def test_a_file_over_the_limit_is_not_read(studio: Played) -> None:
    studio.files["/big.png"] = b"x" * 101
    with pytest.raises(Refusal) as refusal:
        LabelStudio(f"{studio.url}/").read("/big.png", 100)
    assert refusal.value.status == 413


def test_an_answer_that_trickles_is_given_up(studio: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_studio, "SECONDS", 0.05)

    class Slow(io.BytesIO):
        def read1(self, size: int | None = -1) -> bytes:
            time.sleep(0.02)
            return b"x"

    monkeypatch.setattr(OpenerDirector, "open", lambda *_, **__: Slow())
    with pytest.raises(Refusal, match="more than 0.05 seconds"):
        LabelStudio(f"{studio.url}/").read("/a.png", 1000)


@pytest.mark.parametrize("address", ["/a\ud800.png", "http://[::1", "http://[x]y/"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(Refusal) as refusal:
        LabelStudio("http://studio.test/").read(address, 100)
    assert refusal.value.status == 422


def test_a_refusal_repeats_only_the_beginning_of_what_was_sent(studio: Played) -> None:
    for address in ("data:" + "x" * 10_000 + ";base64,*", "data:" + "x" * 10_000, "http://elsewhere/" + "x" * 10_000):
        with pytest.raises(Refusal) as refusal:
            LabelStudio(f"{studio.url}/").read(address, 100)
        assert len(str(refusal.value)) < 400


def test_messages_need_the_token(backend: TestClient) -> None:
    message = {"project": "1.1", "schema": CONFIG}
    url = "/label-studio/setup"
    assert backend.post(url, json=message).status_code == 401
    for password, status in ((TOKEN, 200), ("wrong", 401)):
        assert backend.post(url, json=message, auth=("label-studio", password)).status_code == status
    assert backend.post("/tasks", auth=("x", TOKEN)).status_code == 401  # only Label Studio's routes take a password
    bad = {"Authorization": "Basic ***"}
    assert backend.post(url, json=message, headers=bad).status_code == 401


def test_health_of_an_open_server_needs_the_token(opened: Opener) -> None:
    client = opened(Access(TOKEN, everything=True), label_studio=LabelStudio("http://localhost:8080/"))
    assert client.get("/label-studio/health").status_code == 401
    assert client.get("/label-studio/health", auth=("x", TOKEN)).status_code == 200


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"[]", "application/json", 422),
        (b"{}", "text/plain", 415),
        (b'{"schema": 3}', "application/json", 422),
        (b'{"schema": "<View>"}', "application/json", 422),
        (b'{"schema": "\\ud800"}', "application/json", 422),
        (b"[" + b"[]," * 1_000_001 + b"[]]", "application/json", 413),
        (b'{"schema": "<!DOCTYPE a [<!ENTITY b \\"c\\">]><View/>"}', "application/json", 422),
    ],
)
def test_messages_that_cannot_be_read_are_refused(backend: TestClient, content: bytes, kind: str, status: int) -> None:
    answer = backend.post("/label-studio/setup", content=content, headers=KEY | {"Content-Type": kind})
    assert answer.status_code == status and answer.json()["error"]


def test_too_many_tasks_are_refused(backend: TestClient) -> None:
    message = {"tasks": [{}] * (MAX_TASKS + 1), "label_config": CONFIG}
    assert post(backend, "predict", message).status_code == 413


def test_the_limits_of_uploads_hold(opened: Opener, studio: Played) -> None:
    client = opened(label_studio=LabelStudio(f"{studio.url}/"), limits=Limits(pixels=10))
    (prediction,) = predict(client, as_data(digit(1, 40)))
    assert prediction["result"] == []


def test_annotations_are_acknowledged(backend: TestClient, studio: Played) -> None:
    message = {
        "action": "ANNOTATION_CREATED",
        "annotation": {"id": 17, "result": [], "was_cancelled": False, "task": 19, "completed_by": 1},
        "project": PROJECT,
    }
    answer = post(backend, "webhook", message)
    assert answer.status_code == 201 and answer.json()["status"] == "ok"
    assert post(backend, "webhook", {"action": "PROJECT_UPDATED"}).json() == {"status": "Unknown event"}
    assert studio.asked == []


def test_training_learns_the_new_classes_of_the_annotations(backend: TestClient, studio: Played) -> None:
    for i in range(FEWEST + 1):
        studio.annotate("seven", digit(7, i))
        studio.annotate("0", digit(0, i))  # known already
    studio.annotate("nine", digit(9, 0))  # too few
    studio.annotate("seven", digit(8, 0), cancelled=True)
    answer = post(backend, "webhook", {"action": "START_TRAINING", "project": PROJECT})
    assert answer.status_code == 201, answer.text
    assert answer.json()["result"]["classes"] == ["seven"]
    job = answer.json()["result"]["job"]
    end = time.monotonic() + 120
    while (state := backend.get(f"/tasks/{job}").json())["state"] not in ("done", "failed"):
        assert time.monotonic() < end
        time.sleep(0.2)
    assert state["state"] == "done", state
    assert state["task"]["source"] == "Label Studio project 12.zip"
    assert backend.get("/model").json()["classes"] == ["0", "1", "2", "3", "seven"]
    (prediction,) = predict(backend, as_data(digit(7, 40)))
    assert prediction["model_version"] == "tpl-2"


def test_training_without_enough_annotations_says_what_is_missing(backend: TestClient, studio: Played) -> None:
    studio.annotate("nine", digit(9, 0))
    answer = post(backend, "webhook", {"action": "START_TRAINING", "project": PROJECT})
    assert answer.status_code == 409 and "nine (1)" in answer.json()["error"]
    studio.tasks = [{"annotations": [{"result": [{"type": "choices", "from_name": "digit"}]}]}]
    assert post(backend, "webhook", {"action": "START_TRAINING", "project": PROJECT}).status_code == 422


def test_a_choice_that_is_no_folder_name_is_refused(backend: TestClient, studio: Played) -> None:
    for i in range(FEWEST):
        studio.annotate("../up", digit(9, i))
    answer = post(backend, "webhook", {"action": "START_TRAINING", "project": PROJECT})
    assert answer.status_code == 422 and "../up" in answer.json()["error"]


@pytest.mark.parametrize("name", ["\ud800", "x" * 2000, " "], ids=["no text", "too long", "empty"])
def test_a_choice_that_cannot_be_stored_is_refused(backend: TestClient, studio: Played, name: str) -> None:
    for i in range(FEWEST):
        studio.annotate(name, digit(9, i))
    answer = post(backend, "webhook", {"action": "START_TRAINING", "project": PROJECT})
    assert answer.status_code == 409 and "class" in answer.json()["error"]


def test_a_very_long_address_makes_no_long_file_name(backend: TestClient, studio: Played) -> None:
    for i in range(FEWEST):
        studio.annotate("seven", digit(7, i))
        path = f"/data/{'x' * 70_000}{i}.png"
        studio.files[path] = digit(7, i)
        studio.tasks[-1]["data"]["image"] = path
    answer = post(backend, "webhook", {"action": "START_TRAINING", "project": PROJECT})
    assert answer.status_code in (201, 422)  # Python's own server refuses such an address, others may not


def test_a_read_only_server_does_not_train(opened: Opener, studio: Played) -> None:
    client = opened(label_studio=LabelStudio(f"{studio.url}/"), read_only=True)
    assert post(client, "webhook", {"action": "START_TRAINING", "project": PROJECT}).status_code == 403


def test_without_the_option_there_is_no_backend(client: TestClient) -> None:
    assert client.get("/label-studio/health").status_code == 404


def test_the_address_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABEL_STUDIO_API_KEY", " abc ")
    assert LabelStudio.at("http://localhost:8080") == LabelStudio("http://localhost:8080/", "abc")
    for wrong in ("localhost:8080", "ftp://a", "http://", "http://a/?b"):
        with pytest.raises(TplError):
            LabelStudio.at(wrong)


def test_aliases_are_what_is_chosen() -> None:
    found = Labelling.of(CONFIG.replace('value="seven"', 'value="Number seven" alias="seven"'))
    assert found is not None and found.choices[-1] == "seven" and found.key == "image"


def test_hosts_of_the_server_hold_here_too(backend: TestClient) -> None:
    assert HOSTS and backend.get("/label-studio/health", headers={"Host": "evil.test"}).status_code == 421
