"""Answers over HTTP: the same as Python's and the command line's, alone or in company."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image

from conftest import ADDRESS, HOSTS, KEY, TOKEN, digit
from tpl import Learner, program
from tpl.cli import app as commands
from tpl.serve.app import create_app
from tpl.serve.model import Batcher, ImageQuery, ModelSource, ServedModel, executor
from tpl.serve.security import Access
from tpl.serve.server import Server, Settings
from tpl.serve.uploads import Limits, prepare

PICTURES = [digit(c, 20 + c) for c in range(4)]


def upload(*pictures: bytes) -> list[tuple[str, tuple[str, bytes]]]:
    return [("files", (f"{i}.png", picture)) for i, picture in enumerate(pictures)]


def opened(picture: bytes) -> Image.Image:
    return Image.open(io.BytesIO(picture))


def assert_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same answer up to rounding: the server's batches are its own, and the last digit may be another."""
    assert [one[key] for key in ("class", "task")] == [other[key] for key in ("class", "task")]
    assert [entry["class"] for entry in one["top"]] == [entry["class"] for entry in other["top"]]
    assert one["unknown"] == pytest.approx(other["unknown"], abs=1e-5)
    told = [[entry["probability"] for entry in each["top"]] for each in (one, other)]
    assert told[0] == pytest.approx(told[1], abs=1e-5)


def test_answers_are_those_of_the_learner(client: TestClient, learner: Learner) -> None:
    response = client.post("/predict?top=3", files=upload(*PICTURES))
    assert response.status_code == 200
    given = response.json()["answers"]
    expected = learner.answers([opened(p) for p in PICTURES], top=3)
    assert [answer["path"] for answer in given] == ["0.png", "1.png", "2.png", "3.png"]
    for answer, right in zip(given, expected, strict=True):
        assert set(answer) == {"path", "class", "probability", "task", "unknown", "passes", "top"}
        assert_close(answer, right.to_dict())


def test_answers_are_those_of_the_command_line(
    client: TestClient, learned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i, picture in enumerate(PICTURES):
        (tmp_path / f"{i}.png").write_bytes(picture)
    given = client.post("/predict", files=upload(*PICTURES)).json()["answers"]
    commands(["predict", str(learned), str(tmp_path), "--json", "--device", "cpu"], standalone_mode=False)
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    printed = {Path(answer["path"]).name: answer for answer in lines}
    assert sorted(printed) == ["0.png", "1.png", "2.png", "3.png"]
    for answer in given:
        right = printed[answer["path"]]
        assert answer.keys() == right.keys()
        assert_close(answer, right)


def test_an_unreadable_file_is_told_and_the_others_are_answered(client: TestClient) -> None:
    files = [*upload(PICTURES[0]), ("files", ("notes.txt", b"no picture")), ("more", ("empty.png", b""))]
    first, second, third = client.post("/predict", files=files).json()["answers"]
    assert first["class"] in "0123"
    assert second.keys() == {"path", "error"} and second["path"] == "notes.txt"
    assert "is not an image" in second["error"]
    assert "empty.png is empty" in third["error"]


def test_files_of_which_none_can_be_read_are_refused_with_the_reasons(client: TestClient) -> None:
    files = [("files", ("notes.txt", b"no picture")), ("files", ("empty.png", b""))]
    refused = client.post("/predict", files=files)
    assert refused.status_code == 422 and refused.json().keys() == {"error"}
    assert "notes.txt is not an image" in refused.json()["error"] and "empty.png is empty" in refused.json()["error"]
    many = client.post("/predict", files=[files[1]] * 8)
    assert many.json()["error"].count("empty.png") == 5 and many.json()["error"].endswith("And 3 more.")


def test_a_share_to_reject_is_taken_from_the_address_or_the_form(client: TestClient) -> None:
    by_address = client.post("/predict?reject=0.6", files=upload(*PICTURES)).json()
    by_form = client.post("/predict", files=upload(*PICTURES), data={"reject": "0.6"}).json()
    assert by_form == by_address and all("rejected" in answer for answer in by_form["answers"])
    for wrong in ("5", "nan", "much"):
        refused = client.post("/predict", files=upload(PICTURES[0]), data={"reject": wrong})
        assert refused.status_code == 422 and "a share between 0 and 1" in refused.json()["error"]


def test_a_method_without_an_unknown_score_answers_null(tmp_path: Path) -> None:
    learner = Learner("slda", device="cpu")
    learner.learn([opened(digit(c, i)) for c in (0, 1) for i in range(6)], ["0"] * 6 + ["1"] * 6)
    learner.save(tmp_path)
    app = create_app(ModelSource(tmp_path, "cpu"), Settings(Access(TOKEN, hosts=HOSTS)))
    with TestClient(app, base_url=ADDRESS) as client:
        assert client.get("/model").json()["rejection_floor"] is None
        (answer,) = client.post("/predict", files=upload(PICTURES[0])).json()["answers"]
        assert answer["unknown"] is None and answer["class"] in "01"
        refused = client.post("/predict?reject=0.05", files=upload(PICTURES[0]))
    assert refused.status_code == 409 and "'slda' has no unknown score" in refused.json()["error"]


def test_tasks_share_the_probability(client: TestClient, learner: Learner) -> None:
    answer = client.post("/predict?tasks=true", files=upload(PICTURES[2])).json()["answers"][0]
    assert [entry["task"] for entry in answer["tasks"]] == ["task 1", "task 2"]
    expected = learner.task_proba([opened(PICTURES[2])])[0]
    assert [entry["probability"] for entry in answer["tasks"]] == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_nearest_example_of_a_stored_image_is_itself(client: TestClient, learner: Learner) -> None:
    memory = learner.method.memory
    assert memory is not None
    stored = memory.exemplars[2][1]
    answer = client.post("/predict?examples=5", files=upload(stored)).json()["answers"][0]
    distances = [example["distance"] for example in answer["examples"]]
    assert len(distances) == 5 and distances == sorted(distances)
    assert distances[0] == pytest.approx(0, abs=1e-3) and distances[1] > distances[0]
    assert answer["examples"][0]["class"] == "2"
    shown = answer["examples"][0]["picture"].removeprefix("data:image/png;base64,")
    assert np.array_equal(np.asarray(opened(base64.b64decode(shown))), np.asarray(opened(stored).convert("RGB")))


@pytest.mark.parametrize(
    ("path", "options", "status", "text"),
    [
        ("/predict", {"files": {"note": (None, "no file")}}, 422, "curl -F files=@IMAGE"),
        ("/predict", {"content": b"raw bytes"}, 415, "multipart/form-data"),
        ("/predict", {"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, "boundary"),
        ("/predict?top=0", {"files": upload(PICTURES[0])}, 422, "query.top"),
        ("/predict?examples=x", {"files": upload(PICTURES[0])}, 422, "query.examples"),
        ("/health", {"headers": KEY}, 405, "POST /health is not offered"),
        ("/nowhere", {"headers": KEY}, 404, "There is no POST /nowhere"),
    ],
)
def test_mistakes_are_told_in_json(
    client: TestClient, path: str, options: dict[str, Any], status: int, text: str
) -> None:
    response = client.post(path, **options)
    assert response.status_code == status
    assert response.json().keys() == {"error"} and text in response.json()["error"]


def test_the_model_describes_itself(client: TestClient, learner: Learner) -> None:
    content = client.get("/model").json()
    assert content["classes"] == ["0", "1", "2", "3"]
    assert [(task["name"], task["classes"]) for task in content["tasks"]] == [
        ("task 1", ["0", "1"]),
        ("task 2", ["2", "3"]),
    ]
    assert content["encoder"]["name"] == "compact" and content["encoder"]["image_size"] == [32, 32]
    assert content["sizes"]["parameters"] == learner.method.parameters()
    assert content["sizes"]["stored_images"] == 16 and content["sizes"]["directory_bytes"] > 10_000
    assert "pictures" not in content
    assert set(client.get("/model?pictures=true").json()["pictures"]) == {"0", "1", "2", "3"}


def test_health_and_metrics(client: TestClient) -> None:
    assert client.get("/health").json()["status"] == "ok"

    def answered() -> float:
        lines = client.get("/metrics").text.splitlines()
        values = [line.split()[1] for line in lines if line.startswith('tpl_images_total{outcome="answered"}')]
        return float(values[0]) if values else 0.0

    before = answered()
    client.post("/predict", files=upload(*PICTURES))
    assert answered() == before + 4
    text = client.get("/metrics").text
    assert "tpl_classes 4.0" in text and 'route="/predict",status="200"' in text


def test_the_description_for_programs_names_every_route(client: TestClient) -> None:
    description = client.get("/openapi.json").json()
    assert set(description["paths"]) == {
        "/health", "/metrics", "/model", "/predict", "/tasks", "/tasks/{id}",
        "/check", "/suggest", "/classes/rename", "/classes/remove",
    }  # fmt: skip
    assert description["paths"]["/tasks"]["post"]["security"] == [{"token": []}]
    assert "multipart/form-data" in description["paths"]["/predict"]["post"]["requestBody"]["content"]


def test_concurrent_questions_share_a_pass_and_get_the_answers_they_would_get_alone(learned: Path) -> None:
    served = ServedModel(ModelSource(learned, "cpu"))
    pixels = [prepare(served.learner, io.BytesIO(digit(i % 4, 30 + i)), "digit", Limits()) for i in range(11)]
    alone = [served.answer([ImageQuery(each, 4)])[0] for each in pixels]
    sizes: list[int] = []

    async def together() -> list[Any]:
        batcher = Batcher(max_batch=8, wait_seconds=0.05, on_batch=sizes.append)
        batcher.start()
        try:
            return await asyncio.gather(*(batcher.answer(served, ImageQuery(each, 4)) for each in pixels))
        finally:
            await batcher.stop()

    replies = asyncio.run(together())
    assert sizes == [8, 3]
    for one, other in zip(replies, alone, strict=True):
        assert_close(one.to_dict(), other.to_dict())


def test_a_question_that_fails_leaves_the_next_one_alone(learned: Path) -> None:
    served = ServedModel(ModelSource(learned, "cpu"))
    good = ImageQuery(prepare(served.learner, io.BytesIO(PICTURES[1]), "digit", Limits()), 1)
    bad = ImageQuery(torch.zeros(3, 7, 7, dtype=torch.uint8), 1)  # no size the encoder takes

    async def ask() -> tuple[Any, Any]:
        batcher = Batcher(wait_seconds=0)
        batcher.start()
        try:
            (first,) = await asyncio.gather(batcher.answer(served, bad), return_exceptions=True)
            return first, await batcher.answer(served, good)
        finally:
            await batcher.stop()

    failed, reply = asyncio.run(ask())
    assert isinstance(failed, Exception)
    assert reply.answer == served.answer([good])[0].answer


def test_only_the_thread_that_answers_computes_with_several_threads(learned: Path) -> None:
    """Two teams of torch's threads would make every answer take twice as long."""
    before = torch.get_num_threads()

    async def threads() -> tuple[int, int, int]:
        server = Server(ModelSource(learned, "cpu"), Settings(Access("", False, ())))
        loop = asyncio.get_running_loop()
        counts = [await server.batcher.call(torch.get_num_threads)]
        for pool in (server.model._loader, server.decoders):
            counts.append(await loop.run_in_executor(pool, torch.get_num_threads))
            pool.shutdown()
        await server.batcher.stop()
        return counts[0], counts[1], counts[2]

    torch.set_num_threads(2)
    try:
        assert asyncio.run(threads()) == (2, 1, 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("own", [True, False])
def test_a_thread_of_a_server_computes_like_every_other_command(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without denormal numbers, but in the process of another program with them."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this CPU cannot do without denormal numbers")
    monkeypatch.setattr(program, "own", own)
    with executor("one", threads=2) as threads:
        found = threads.submit(lambda: int((torch.full((1_000_000,), 1e-39) * 0.5).count_nonzero())).result()
    assert found == (0 if own else 1_000_000)
