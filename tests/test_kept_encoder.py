"""A model keeps the weights of an encoder that was downloaded: it is complete wherever it is copied to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pictures import photos
from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.errors import TplError
from tpl.learner import ENCODER
from tpl.nets import EncoderError, create_encoder, weights
from tpl.nets.weights import encoder_from_row, weights_in_a_row
from tpl.store import ModelStore, State


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return photos(tmp_path / "photos", ["cat", "dog"], count=4)


@pytest.fixture
def model(place: Path, tmp_path: Path) -> Path:
    learner = Learner("slda", SMALL_VIT, device="cpu").learn(place)
    learner.save(tmp_path / "model")
    return tmp_path / "model"


def without_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that timm has fetched on another machine are not here."""

    def missing(name: str) -> None:
        raise EncoderError(f"The weights of '{name}' are not on this machine")

    monkeypatch.setattr(weights, "_downloaded", missing)


def test_a_copy_answers_where_the_weights_are_not(model: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Learner.load(model, device="cpu")
    pictures = sorted(place.rglob("*.png"))
    expected = before.log_probabilities(pictures)
    without_hub(monkeypatch)
    found = Learner.load(model, device="cpu")
    assert torch.equal(found.log_probabilities(pictures), expected)
    assert found.method.encoder.sha256 == before.method.encoder.sha256
    stored = ModelStore(model).read()[1].shared[ENCODER]
    assert stored.numel() == sum(part.numel() for part in found.method.encoder.state_dict().values())


def test_it_is_kept_when_the_model_learns_more(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_hub(monkeypatch)
    with Learner.changing(model, device="cpu") as learner:
        learner.learn(photos(tmp_path / "more", ["fox"], count=4))
    assert Learner.load(model, device="cpu").classes_ == ["cat", "dog", "fox"]


def test_a_model_without_the_weights_needs_them(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner("slda", SMALL_VIT, device="cpu").learn(place)
    learner.keeps_encoder = False
    learner.save(tmp_path / "model")
    without_hub(monkeypatch)
    with pytest.raises(TplError, match="not on this machine"):
        Learner.load(tmp_path / "model", device="cpu")


def test_encoders_of_the_package_and_large_ones_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert weights_in_a_row(create_encoder("compact")) is None
    encoder = create_encoder(SMALL_VIT)
    row = weights_in_a_row(encoder)
    assert row is not None and encoder_from_row(SMALL_VIT, row).fingerprint == encoder.fingerprint
    monkeypatch.setattr(weights, "MOST_KEPT", row.nbytes - 1)
    assert weights_in_a_row(encoder) is None


@pytest.mark.parametrize("name", ["resnet18:99999999", "vit_7b_patch16_dinov3", "compact", "no such network"])
def test_another_network_than_the_weights_is_refused_before_it_is_made(name: str) -> None:
    with pytest.raises(EncoderError, match="does not fit that network|no encoder"):
        encoder_from_row(name, torch.zeros(10))


def test_a_network_that_no_name_brings_back_is_not_kept() -> None:
    encoder = create_encoder(SMALL_VIT)
    encoder.name = "my own"
    assert weights_in_a_row(encoder) is None


@pytest.mark.parametrize("change", ["shorter", "longer", "half", "square", "other"])
def test_weights_that_do_not_fit_are_refused(model: Path, change: str) -> None:
    store = ModelStore(model)
    header, state, memory = store.read()
    row = state.shared[ENCODER]
    changed = {
        "shorter": row[:-1],
        "longer": torch.cat([row, row[:1]]),
        "half": row.half(),
        "square": row.view(1, -1),
        "other": row + 1,
    }
    with store.writing():
        store.commit(header, State(state.shared | {ENCODER: changed[change]}, state.tasks), memory)
    with pytest.raises(TplError, match="does not fit that network|other weights"):
        Learner.load(model, device="cpu")
