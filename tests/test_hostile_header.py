"""A header or a tensor that was changed, by accident or by somebody who knows the format, is refused by its name."""

from __future__ import annotations

import json
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from small_encoder import SMALL_VIT
from torture.forged import forge_header, forge_tensors, leaves, put
from tpl import Learner, Stream, TplError
from tpl.nets import EncoderError, create_encoder
from tpl.store import ModelStore, StoreError

OTHER = (None, True, -1, 10**30, 1e300, "x", "", "\ud800", [], [[]], {}, {"a": 1}, "tasks/000/task-9.safetensors")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, small_stream: Stream) -> Path:
    path = tmp_path_factory.mktemp("made") / "model"
    learner = Learner("tpl", SMALL_VIT, device="cpu", latent=4, epochs=1, memory=8)
    for task in small_stream[:2]:
        learner.learn(task)
    learner.keeps_encoder = False  # its name alone says which network to make
    learner.save(path)
    return path


@pytest.fixture
def model(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def test_every_changed_value_breaks_the_seal(model: Path) -> None:
    text = (model / "model.json").read_text(encoding="utf-8")
    paths = leaves(json.loads(text))
    assert len(paths) > 60
    for path in paths:
        for new in ("x", 7):
            header = json.loads(text)
            put(header, path, new)
            (model / "model.json").write_text(json.dumps(header), encoding="utf-8")
            with pytest.raises(StoreError, match=r"model\.json is damaged|has schema 7"):
                ModelStore(model).header()


def test_spaces_and_the_order_of_keys_do_not_matter(model: Path) -> None:
    header = json.loads((model / "model.json").read_text(encoding="utf-8"))
    (model / "model.json").write_text(json.dumps(dict(reversed(header.items()))), encoding="utf-8")
    assert ModelStore(model).header()["commits"] == 1


def test_a_value_of_another_kind_under_a_new_seal_is_refused_or_harmless(model: Path) -> None:
    """A short form of `python -m torture models`."""
    text = (model / "model.json").read_text(encoding="utf-8")
    draw = random.Random(0)
    refused = 0
    for path in leaves(json.loads(text)):
        (model / "model.json").write_text(text, encoding="utf-8")
        new = draw.choice(OTHER)
        forge_header(model, lambda header, path=path, new=new: put(header, path, new))  # type: ignore[misc]
        try:
            Learner.load(model, device="cpu")
        except TplError:
            refused += 1
    assert refused > 40


def nothing_finite(tensors: dict[str, Any]) -> None:
    tensors["head_weight"][0, 0] = torch.nan


def other_type(tensors: dict[str, Any]) -> None:
    tensors["head_weight"] = tensors["head_weight"].to(torch.complex64)


def other_shape(tensors: dict[str, Any]) -> None:
    tensors["head_weight"] = tensors["head_weight"][:, :-1]


def fewer_classes(tensors: dict[str, Any]) -> None:
    tensors["head_weight"], tensors["head_bias"] = tensors["head_weight"][:1], tensors["head_bias"][:1]


def another_name(tensors: dict[str, Any]) -> None:
    tensors["head_weights"] = tensors.pop("head_weight")


@pytest.mark.parametrize("change", [nothing_finite, other_type, other_shape, fewer_classes, another_name])
def test_a_tensor_that_does_not_fit_is_refused(model: Path, change: Callable[[dict[str, Any]], None]) -> None:
    forge_tensors(model, "task-0", change)
    with pytest.raises(StoreError, match="is damaged"):
        Learner.load(model, device="cpu")


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("lengths", lambda t: t * 2),
        ("lengths", lambda t: -t),
        ("counts", lambda t: t + 1),
        ("counts", lambda t: t.float()),
    ],
)
def test_a_memory_whose_numbers_do_not_add_up_is_refused(model: Path, key: str, change: Callable[[Any], Any]) -> None:
    forge_tensors(model, "memory", lambda tensors: tensors.update({key: change(tensors[key])}))
    with pytest.raises(StoreError, match="memory's lengths and counts"):
        Learner.load(model, device="cpu")


def test_one_file_is_not_read_for_twenty_thousand_tasks(model: Path) -> None:
    def repeat(header: dict[str, Any]) -> None:
        header["tasks"] = [
            header["tasks"][0] | {"classes": [str(c)], "images": [], "held_out": []} for c in range(9999)
        ]

    forge_header(model, repeat)
    with pytest.raises(StoreError, match="a file is listed twice"):
        Learner.load(model, device="cpu")


def test_twenty_thousand_tasks_are_refused(model: Path) -> None:
    def many(header: dict[str, Any]) -> None:
        first = header["tasks"][0] | {"images": [], "held_out": []}
        files = [f"tasks/{c:05d}/task-0.safetensors" for c in range(20_000)]
        header["tasks"] = [first | {"classes": [file], "file": file} for file in files]
        header["files"] |= dict.fromkeys(files, "0" * 64)

    forge_header(model, many)
    with pytest.raises(StoreError, match="tasks"):
        Learner.load(model, device="cpu")


def test_a_part_full_of_holes_is_not_read(model: Path) -> None:
    name = ModelStore(model).header()["tasks"][0]["file"]
    with (model / name).open("r+b") as stream:
        stream.truncate(1 << 40)  # takes no room on disk
    with pytest.raises(StoreError, match="is damaged"):
        Learner.load(model, device="cpu")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"encoder": {"name": "resnet18:99999999"}}, "is too wide"),
        ({"options": {"latent": 10**8}}, "latent must be at most 2048"),
        ({"encoder": {"name": "hf-hub:somebody/something"}}, "There is no encoder"),
        ({"encoder": {"name": "vit_7b_patch16_dinov3"}}, "not on this machine"),
    ],
)
def test_sizes_are_checked_before_memory_is_taken(model: Path, change: dict[str, Any], text: str) -> None:
    forge_header(model, lambda header: [header[key].update(value) for key, value in change.items()])
    with pytest.raises(TplError, match=text):
        Learner.load(model, device="cpu")


def test_a_file_that_cannot_hold_an_encoder_is_refused_before_the_encoder_is_made(tmp_path: Path) -> None:
    (tmp_path / "small.safetensors").write_bytes(bytes(1000))
    with pytest.raises(EncoderError, match="too small to hold the weights of 'vit_7b_patch16_dinov3'"):
        create_encoder("vit_7b_patch16_dinov3", tmp_path / "small.safetensors")


def test_loading_a_model_contacts_no_hub(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    forge_header(model, lambda header: header["encoder"].update(name="vit_tiny_patch16_224"))
    with pytest.raises(EncoderError, match="not on this machine.*TPL_DOWNLOAD=1"):
        Learner.load(model, device="cpu")


def test_a_file_that_is_not_the_encoders_is_not_opened_as_weights(model: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.safetensors"
    secret.write_bytes(b"not for you")
    forge_header(model, lambda header: header["encoder"].update(weights=str(secret)))
    with pytest.raises(EncoderError, match="other weights"):
        Learner.load(model, device="cpu")
