"""Every limit: refused with the right status, before anything is spent on it."""

from __future__ import annotations

import asyncio
import io
import stat
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from conftest import KEY, TOKEN, Opener, archive, classes, digit
from tpl.serve.errors import Refusal
from tpl.serve.security import Access, AccessMiddleware
from tpl.serve.uploads import Limits, check_archive, check_images
from tpl.stream import UnreadableImage


def predict(client: TestClient, *pictures: bytes) -> Any:
    return client.post("/predict", files=[("files", (f"{i}.png", p)) for i, p in enumerate(pictures)])


def learn(client: TestClient, content: bytes, **fields: str) -> Any:
    return client.post("/tasks", files={"file": ("new.zip", content)}, data=fields, headers=KEY)


def test_a_request_that_is_too_large_is_refused(opened: Opener) -> None:
    client = opened(limits=Limits(upload=2000))
    response = predict(client, b"x" * 3000)
    assert response.status_code == 413 and "this server's limit" in response.json()["error"]
    parts: Iterator[bytes] = (b"x" * 500 for _ in range(6))  # without a length: it is counted as it comes
    kind = {"content-type": "multipart/form-data; boundary=b"}
    head = b'--b\r\nContent-Disposition: form-data; name="f"; filename="f"\r\n\r\n'
    response = client.post("/predict", content=iter([head, *parts]), headers=kind)
    assert response.status_code == 413
    assert predict(client, digit(0, 0)).status_code == 200


def test_too_many_files_are_refused(opened: Opener) -> None:
    client = opened(limits=Limits(files=2))
    assert predict(client, *[digit(0, 0)] * 2).status_code == 200
    response = predict(client, *[digit(0, 0)] * 3)
    assert (
        response.status_code == 413 and response.json()["error"] == "At most 2 files a request; send them in several."
    )


def test_an_image_that_is_too_large_is_not_decoded(opened: Opener) -> None:
    client = opened(limits=Limits(pixels=1000, image=5000))
    noise = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (48, 48, 3), dtype=np.uint8)).save(noise, "PNG")
    refused = predict(client, digit(0, 0), noise.getvalue())
    assert refused.status_code == 422
    assert "0.png has more than" in refused.json()["error"] and "1.png is larger than" in refused.json()["error"]


def test_many_images_that_are_large_together_are_refused(opened: Opener) -> None:
    client = opened(limits=Limits(pixels=2000, request_pixels=3000))
    assert predict(client, *[digit(0, 0)] * 2).status_code == 200  # 1024 pixels each
    answer = predict(client, *[digit(0, 0)] * 3)
    assert answer.status_code == 413 and "million pixels together" in answer.json()["error"]


def test_too_many_requests_at_once_are_refused(opened: Opener) -> None:
    response = opened(limits=Limits(requests=0)).get("/model")
    assert response.status_code == 503 and response.headers["retry-after"] == "1"


def test_a_body_that_stops_coming_is_given_up() -> None:
    sent: list[dict[str, Any]] = []

    async def reading(scope: Any, receive: Any, send: Any) -> None:
        try:
            await receive()
        except Refusal as refusal:
            await refusal.response()(scope, receive, send)

    async def silence() -> Any:
        await asyncio.sleep(5)

    async def send(message: Any) -> None:
        sent.append(message)

    gate = AccessMiddleware(reading, Access(TOKEN), Limits(body_seconds=0.02))
    asyncio.run(gate({"type": "http", "method": "POST", "path": "/predict", "headers": []}, silence, send))
    assert sent[0]["status"] == 408
    assert gate.active == 0


def written(path: Path, *members: tuple[zipfile.ZipInfo | str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as target:
        for member, content in members:
            target.writestr(member, content)
    return path


def as_link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


@pytest.mark.parametrize(
    "name",
    [
        "/etc/cat/1.png",
        "../cat/1.png",
        "cat/../../1.png",
        "..\\cat\\1.png",
        "C:\\cat\\1.png",
        "C:cat/1.png",
        "\\cat\\1.png",
    ],
)
def test_names_that_lead_out_of_the_zip_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="outside of it") as caught:
        check_archive(written(tmp_path / "a.zip", ("ok/1.png", b"x"), (name, b"x")), Limits())
    assert caught.value.status == 422


def test_links_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="link or device"):
        check_archive(written(tmp_path / "a.zip", (as_link("cat/1.png"), b"/etc/passwd")), Limits())


def test_encrypted_zips_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.zip", ("cat/1.png", b"x"))
    content = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.index(signature) + offset] |= 1
    path.write_bytes(content)
    with pytest.raises(Refusal, match="without a password"):
        check_archive(path, Limits())


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (Limits(zip_members=3), "more than 3 members"),
        (Limits(zip_bytes=1 << 20), "expands to more than 1 MiB"),
        (Limits(zip_ratio=20), "20 times its size"),
        (Limits(image=1 << 20, zip_ratio=2000), "larger than 1 MiB"),
    ],
)
def test_zips_that_grow_too_much_are_refused(limits: Limits, text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for i in range(4):
            target.writestr(f"cat/{i}.png", bytes(2 << 20))
    check_archive(path, Limits(zip_ratio=2000))
    with pytest.raises(Refusal, match=text) as caught:
        check_archive(path, limits)
    assert caught.value.status == 413


def test_a_directory_of_millions_of_members_is_not_even_read(tmp_path: Path) -> None:
    """The end of a zip says how long its directory is; one that is too long must not be loaded to be counted."""
    path = tmp_path / "a.zip"
    directory = (b"PK\1\2" + bytes(42)) * 40_000
    claimed_members = (7).to_bytes(2, "little")  # a lie: readers go by the length
    end = b"PK\5\6" + bytes(4) + 2 * claimed_members + len(directory).to_bytes(4, "little") + bytes(6)
    path.write_bytes(directory + end)
    with pytest.raises(Refusal, match="more than 100 members"):
        check_archive(path, Limits(zip_members=100))


def test_images_in_a_zip_are_measured_by_their_headers(tmp_path: Path) -> None:
    path = written(tmp_path / "a.zip", ("cat/1.png", digit(0, 0)), ("cat/2.png", b"broken"), ("cat/3.txt", b""))
    check_images(path, Limits())
    with pytest.raises(UnreadableImage, match=r"cat/1\.png has more than 0.001 million pixels"):
        check_images(path, Limits(pixels=1000))


@pytest.mark.parametrize(
    ("content", "status", "text"),
    [
        (b"no zip", 422, "cannot be opened as a zip"),
        (archive({"../7/1.png": b"x"}), 422, "outside of it"),
        (archive({"loose.png": digit(7, 0)}), 422, "new.zip"),
        (archive(classes(3, 7)), 409, "Already learned: 3"),
    ],
    ids=["no zip", "outside", "no class", "known"],  # not by content: a zip holds the time at which it was made
)
def test_zips_that_cannot_be_learned_are_refused_at_once(
    client: TestClient, content: bytes, status: int, text: str
) -> None:
    response = learn(client, content)
    assert response.status_code == status, response.json()
    assert text in response.json()["error"]
    spool: Path = client.app.state.server.spool  # type: ignore[attr-defined]
    assert str(spool) not in response.json()["error"]  # where the server keeps the upload is nobody's business
    assert client.get("/tasks").json() == {"tasks": []}
    assert list(spool.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "status", "text"),
    [
        (lambda client: learn(client, archive(classes(7)), name="x" * 101), 422, "at most 100 letters"),
        (lambda client: learn(client, archive(classes(7)), name="task 1"), 409, "already"),
        (lambda client: client.post("/tasks", files={"name": (None, "birds")}, headers=KEY), 422, "no zip"),
        (lambda client: client.post("/tasks", json={}, headers=KEY), 415, "multipart"),
        (lambda client: client.get("/tasks/none"), 404, "no task 'none'"),
    ],
)
def test_mistakes_about_tasks_are_told(
    client: TestClient, make: Callable[[TestClient], Any], status: int, text: str
) -> None:
    response = make(client)
    assert response.status_code == status and text in response.json()["error"]
