"""Which encoder a command means: unsuitable networks are refused before a download, weight files are recognised."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import timm
import torch
from PIL import Image, ImageFile
from safetensors.torch import save_file

from commands import ask, call, refusal
from pictures import photos
from tpl.cli.encoder import announce_download, choose_encoder, describe_encoder, fitting_encoders, shorter_side
from tpl.errors import TplError
from tpl.nets.weights import PACKAGED, EncoderError, can_be_had, hub_answers
from tpl.stream import ImageSet, MixedImages, labelled_images

TINY = "vit_tiny_patch16_224"


@pytest.fixture
def _no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    create = timm.create_model

    def refuse(name: str, pretrained: bool = False, **options: Any) -> Any:
        assert not pretrained, "weights were asked for"
        return create(name, pretrained=pretrained, **options)

    monkeypatch.setattr(timm, "create_model", refuse)


@pytest.mark.usefixtures("_no_download")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("resnet50", "is a ResNet; only ViT and DeiT"),
        ("swin_tiny_patch4_window7_224", "is a SwinTransformer"),
        ("vit_base_patch16_siglip_224", "pools by attention"),
        ("vit_tiniest", "no encoder 'vit_tiniest' in timm"),
    ],
)
@pytest.mark.parametrize("command", ["learn", "check", "run"])
def test_a_network_that_cannot_be_an_encoder_is_refused_before_a_download(
    name: str, why: str, command: str, tmp_path: Path
) -> None:
    data = photos(tmp_path / "photos", ["cat", "dog"], count=2)
    first = {
        "learn": [tmp_path / "model", data],
        "check": [data],
        "run": ["digits-5t", "--out", tmp_path / "run"],
    }[command]
    assert why in refusal(command, *first, "--encoder", name)
    assert not (tmp_path / "model").exists()


def test_weights_without_a_name_say_which_encoders_fit(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(timm.create_model(TINY, num_classes=3).state_dict(), file)
    assert fitting_encoders(file)[:2] == [TINY, "deit_tiny_patch16_224"]
    data = photos(tmp_path / "photos", ["cat", "dog"], count=2)
    message = refusal("learn", tmp_path / "model", data, "--weights", file)
    assert f"fits {TINY} (or deit_tiny_patch16_224: the same network" in message
    save_file({"layer.weight": torch.zeros(2)}, file)
    assert "fits no encoder" in refusal("check", data, "--weights", file)
    chosen = choose_encoder(TINY, file, pictures(tmp_path, 40))  # with a name, the file is checked when it is loaded
    assert chosen[:2] == (TINY, "asked for")


def pictures(place: Path, *sides: int) -> ImageSet:
    for number, side in enumerate(sides):
        Image.new("RGB", (side, side + 30)).save(place / f"{number}.png")
    return MixedImages([place / f"{number}.png" for number in range(len(sides))])


@pytest.mark.parametrize("name", PACKAGED)
def test_weights_of_an_encoder_in_the_package_need_no_name(name: str, tmp_path: Path) -> None:
    assert choose_encoder(None, Path(str(PACKAGED[name].weights)), pictures(tmp_path, 40)).name == name
    with pytest.raises(TplError, match="no weight file"):
        choose_encoder(None, Path("nowhere.safetensors"), pictures(tmp_path, 40))


@pytest.mark.parametrize(("sides", "name"), [((28, 48, 3000), "compact"), ((28, 49, 3000), "photos")])
def test_without_a_name_the_median_image_decides(sides: tuple[int, ...], name: str, tmp_path: Path) -> None:
    chosen = choose_encoder(None, None, pictures(tmp_path, *sides))
    assert chosen.name == name
    assert f"{sides[1]} pixels" in chosen.reason


@pytest.mark.parametrize("packed", [False, True])
def test_only_headers_of_some_files_are_read_for_their_sizes(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = photos(tmp_path / "photos", ["cat", "dog"], count=40)
    (place / "cat" / "0.png").write_bytes(b"no image")
    if packed:
        place = Path(shutil.make_archive(str(tmp_path / "packed"), "zip", place))
    opened: list[Any] = []
    image_open = Image.open
    monkeypatch.setattr(Image, "open", lambda *given, **options: opened.append(1) or image_open(*given, **options))
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("an image was decoded"))
    assert shorter_side(labelled_images(place).only(["cat", "dog"]).images) == 40
    assert len(opened) <= 50


def test_a_model_says_what_it_sees_with_and_what_would_be_better(tmp_path: Path) -> None:
    data = photos(tmp_path / "small", ["cat", "dog"], count=3)
    plan = ask("learn", tmp_path / "model", data, "--dry-run", "--preset", "quick")
    assert plan["encoder"]["name"] == "compact" and plan["encoder"]["pixels"] == 32
    assert plan["encoder"]["better"]["encoder"] == "photos"
    for file in data.rglob("*.png"):
        with Image.open(file) as image:
            image.resize((200, 240)).save(file)
    learned = ask("learn", tmp_path / "model", data, "--preset", "quick")
    assert learned["encoder"]["name"] == "photos" and learned["encoder"]["pixels"] == 128
    more = ask("learn", tmp_path / "model", photos(tmp_path / "more", ["hen"], count=3))
    assert more["encoder"] == {"name": "photos", "pixels": 128, "reason": None, "better": None}
    text = call("learn", tmp_path / "other", data, "--preset", "quick").output
    assert "Encoder: photos at 128 pixels, the images' shorter sides have 200 pixels (median). Better: --" in text
    assert "vit_tiny_patch16_224, 224 pixels (a download of 22 MB, Apache-2.0" in text


@pytest.mark.parametrize(
    ("side", "name", "pixels", "better"),
    [(32, "compact", 32, False), (33, "compact", 32, True), (128, "photos", 128, False), (129, "photos", 128, True)],
)
def test_no_encoder_is_better_for_images_that_are_seen_in_full(
    side: int, name: str, pixels: int, better: bool, tmp_path: Path
) -> None:
    chosen = choose_encoder(None, None, pictures(tmp_path, side))
    assert chosen.name == name and (describe_encoder(chosen, name, pixels)["better"] is not None) == better


def test_a_download_says_its_price_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *given, **options: None)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    announce_download("vit_base_patch16_224.mae", None)
    said = capsys.readouterr().err
    assert "343 MB" in said and "Cc-by-nc-4.0" in said
    announce_download("vit_base_patch16_224.mae", tmp_path / "weights.safetensors")
    announce_download("photos", None)
    announce_download("resnet18", None)
    assert not capsys.readouterr().err


def test_a_better_encoder_is_fetched_if_asked_for_and_there_is_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small").mkdir()
    large, small = pictures(tmp_path, 300), pictures(tmp_path / "small", 40)
    monkeypatch.setattr("tpl.nets.weights.can_be_had", lambda name: True)
    chosen = choose_encoder(None, None, large, download=True)
    assert chosen.name == TINY and "--download" in chosen.reason
    assert choose_encoder(None, None, small, download=True).name == "compact"
    monkeypatch.setattr("tpl.nets.weights.can_be_had", lambda name: False)
    assert not capsys.readouterr().err
    offline = choose_encoder(None, None, large, download=True)
    assert offline.name == "photos" and describe_encoder(offline, "photos", 128)["better"] is None
    assert "cannot be had without a network: photos" in " ".join(capsys.readouterr().err.split())


def test_a_better_encoder_is_fetched_by_default_if_the_hub_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small").mkdir()
    large, small = pictures(tmp_path, 300), pictures(tmp_path / "small", 40)
    monkeypatch.setattr("tpl.nets.weights.hub_answers", lambda: True)
    assert choose_encoder(None, None, large, download=None).name == "photos"  # TPL_OFFLINE=1 in all tests
    monkeypatch.setenv("TPL_OFFLINE", "true")
    assert choose_encoder(None, None, large, download=None).name == "photos"
    monkeypatch.delenv("TPL_OFFLINE")
    chosen = choose_encoder(None, None, large, download=None)
    assert chosen.name == TINY and chosen.unasked and "--no-download: photos" in chosen.reason
    assert choose_encoder(None, None, small, download=None).name == "compact"
    assert choose_encoder(None, None, large, download=False).name == "photos"
    assert choose_encoder("compact", None, large, download=None).name == "compact"
    monkeypatch.setattr("tpl.nets.weights.hub_answers", lambda: False)
    assert choose_encoder(None, None, large, download=None).name == "photos"


def test_a_fetch_that_nobody_asked_for_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, *given: object, **options: object) -> None:
        raise EncoderError(f"The weights of '{name}' cannot be had.")

    monkeypatch.delenv("TPL_OFFLINE")
    monkeypatch.setattr("tpl.nets.weights.hub_answers", lambda: True)
    monkeypatch.setattr("tpl.nets.weights.download_of", lambda name: None)
    monkeypatch.setattr("tpl.nets.weights.can_be_had", lambda name: True)
    monkeypatch.setattr("tpl.nets.weights._pretrained", fail)
    data = photos(tmp_path / "photos", ["cat", "dog"], count=2)
    for file in data.rglob("*.png"):
        Image.open(file).resize((96, 96)).save(file)
    done = call("learn", tmp_path / "model", data, "--preset", "quick")
    assert "cannot be had" in " ".join(done.stderr.split()) and "photos at 128 pixels" in done.stdout


def test_a_hub_answers_at_once_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *given: object) -> None: ...

    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("tpl.nets.weights._AT_ONCE", 1.0)
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        Thread(target=server.handle_request, daemon=True).start()
        assert hub_answers()
        assert not hub_answers()  # it takes the request, and is silent
    assert not hub_answers()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert not hub_answers()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The hub's address is a port of this machine; nothing was downloaded before."""
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *given, **options: None)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr("tpl.nets.weights.getproxies", dict)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield server


@pytest.mark.usefixtures("_no_download")
def test_without_a_network_a_download_is_refused_at_once(hub: socket.socket, tmp_path: Path) -> None:
    assert can_be_had(TINY)
    hub.close()
    assert not can_be_had(TINY)
    data = photos(tmp_path / "photos", ["cat", "dog"], count=2)
    message = refusal("learn", tmp_path / "model", data, "--encoder", TINY)
    assert "the hub cannot be reached" in message and "--weights FILE" in message
    assert not (tmp_path / "model").exists()
