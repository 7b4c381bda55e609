"""Who may ask what: the token, the host, and what browsers are told."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from conftest import KEY, TOKEN, Opener, archive, classes, digit
from tpl.errors import TplError
from tpl.serve.security import Access, find_token, is_loopback

PICTURE = {"files": ("0.png", digit(0, 0))}
WRONG = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}, {"Authorization": TOKEN}]


@pytest.mark.parametrize("headers", WRONG)
def test_changing_the_model_needs_the_token(client: TestClient, headers: dict[str, str]) -> None:
    for path in ("/tasks", "/tasks/", "/nowhere"):  # what is not known to be harmless needs it too
        response = client.post(path, files={"file": ("new.zip", archive(classes(7)))}, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert "Authorization: Bearer" in response.json()["error"]
    assert client.get("/tasks").json() == {"tasks": []}


def test_without_a_token_a_body_is_not_read(client: TestClient) -> None:
    def never() -> object:
        raise AssertionError("the body was read")
        yield b""

    assert client.post("/tasks", content=never(), headers={"content-length": "10"}).status_code == 401  # type: ignore[arg-type]


def test_on_this_machine_asking_needs_no_token(client: TestClient) -> None:
    assert client.post("/predict", files=PICTURE).status_code == 200
    for path in ("/", "/docs", "/health", "/metrics", "/model", "/openapi.json", "/tasks"):
        assert client.get(path).status_code == 200


def test_beyond_this_machine_everything_but_the_empty_pages_needs_the_token(opened: Opener) -> None:
    client = opened(Access(TOKEN, everything=True))
    for path in ("/health", "/metrics", "/model", "/openapi.json", "/tasks", "/tasks/x", "/nowhere"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers=KEY).status_code in (200, 404)
    assert client.post("/predict", files=PICTURE).status_code == 401
    assert client.post("/predict", files=PICTURE, headers=KEY).status_code == 200
    for path in ("/", "/docs"):
        page = client.get(path)
        assert page.status_code == 200
        assert "task 1" not in page.text  # nothing about the model


def test_a_read_only_server_learns_nothing(opened: Opener) -> None:
    client = opened(read_only=True)
    response = client.post("/tasks", files={"file": ("new.zip", archive(classes(7)))}, headers=KEY)
    assert response.status_code == 403 and "--read-only" in response.json()["error"]
    assert client.get("/model").json()["read_only"] is True


def test_stored_images_can_be_kept_private(opened: Opener) -> None:
    client = opened(examples=False)
    assert "examples" not in client.post("/predict?examples=3", files=PICTURE).json()["answers"][0]
    assert "pictures" not in client.get("/model?pictures=true").json()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("[::1]:9", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("[::1].evil.example", 421),
        ("localhost:80.evil.example", 421),
    ],
)
def test_other_host_names_are_refused(client: TestClient, host: str, status: int) -> None:
    """A page of another site whose name points here must not read answers."""
    assert client.get("/health", headers={"host": host}).status_code == status


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_run_nothing_but_their_own_script(client: TestClient, path: str) -> None:
    response = client.get(path)
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.search(r"""(src|href|action)=["']?(https?:)?//|@import|url\(""", response.text)
    assert not re.search(r"<[^>]+\s(style|on\w+)=", response.text)  # the policy would block them


def test_every_answer_is_safe_for_browsers(client: TestClient) -> None:
    for response in (client.get("/health"), client.get("/nowhere"), client.post("/tasks")):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in response.headers
        assert "frame-ancestors 'none'" in response.headers["content-security-policy"]


def test_a_fault_of_the_server_tells_nothing_of_its_insides(opened: Opener) -> None:
    client = opened()

    @client.app.get("/fault")  # type: ignore[attr-defined, untyped-decorator]
    def fault() -> None:
        raise RuntimeError("secret insides")

    response = client.get("/fault")
    assert response.status_code == 500
    assert response.json() == {"error": "Something went wrong in the server; its log says what."}


def test_the_token_comes_from_a_file_or_the_environment_or_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPL_TOKEN", "from-the-environment")
    file = tmp_path / "token"
    file.write_text("from-the-file-itself\n", encoding="utf-8")
    assert find_token(file) == ("from-the-file-itself", False)
    assert find_token(None) == ("from-the-environment", False)
    monkeypatch.delenv("TPL_TOKEN")
    (first, is_new), (second, _) = find_token(None), find_token(None)
    assert is_new and first != second and len(first) >= 40


@pytest.mark.parametrize("token", ["", "short", "with blanks in between them", "ümläute-gehen-nicht"])
def test_weak_tokens_are_refused(token: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(token, encoding="utf-8")
    with pytest.raises(TplError, match="openssl rand -hex 32"):
        find_token(file)
    with pytest.raises(TplError, match="cannot be read"):
        find_token(tmp_path / "absent")


def test_loopback_is_recognised() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.5", "example.org", "localhost.example.org")))
