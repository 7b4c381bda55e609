"""The packaged weights are the recorded ones, and foreign files are read safely."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tpl.files import sha256_of
from tpl.nets import EncoderError, create_encoder, photos, vit, weights
from tpl.nets.compact import WEIGHTS, create_compact, record
from tpl.nets.vit import ViTEncoder, hash_tensors
from tpl.nets.weights import read_weights
from tpl.pretraining import packaged_record, weights_status

PACKAGED = Path(str(WEIGHTS))


class MakesFolder:
    """Asks the unpickler to make a folder: a stand-in for anything worse."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_the_packaged_weights_are_the_recorded_ones() -> None:
    made = record()
    assert sha256_of(PACKAGED) == made["sha256"] == create_encoder().sha256
    assert weights_status("compact", made["sha256"]) == "known"
    assert weights_status("compact", "ab" * 32) == weights_status("deit_small_611", made["sha256"]) == "unverified"
    assert weights_status("resnet18:8", None) == "random"
    assert PACKAGED.stat().st_size == made["bytes"] <= 6e6


@pytest.mark.parametrize("name", weights.PACKAGED)
def test_the_recorded_fingerprint_is_that_of_the_packaged_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not computed again while their file is the recorded one; of another file, it is."""
    packaged, made, hashed = weights.PACKAGED[name], packaged_record(name), list[str]()

    def computed(state: dict[str, torch.Tensor]) -> str:
        hashed.append(hash_tensors(state))
        return hashed[-1]

    monkeypatch.setattr(vit, "hash_tensors", computed)
    encoder = create_encoder(name)
    assert isinstance(encoder, ViTEncoder) and not hashed
    assert encoder.fingerprint == made["fingerprint"] == hash_tensors(encoder.vit.state_dict())
    content, changed = bytearray(packaged.weights.read_bytes()), tmp_path / "changed.safetensors"
    content[-1] ^= 1
    changed.write_bytes(content)
    monkeypatch.setitem(weights.PACKAGED, name, packaged._replace(weights=changed))
    other = create_encoder(name)
    assert other.sha256 != made["sha256"] and hashed == [other.fingerprint] and hashed[0] != made["fingerprint"]
    changed.write_bytes(content[:1000])
    with pytest.raises(EncoderError, match="cannot be read as weights"):
        create_encoder(name)


def test_the_packaged_weights_for_photos_are_the_recorded_ones() -> None:
    made, file, encoder = photos.record(), Path(str(photos.WEIGHTS)), create_encoder("photos")
    assert sha256_of(file) == made["sha256"] == encoder.sha256
    assert weights_status("photos", made["sha256"]) == "known"
    assert made["pixels"] == encoder.data_config["input_size"][-1]
    assert made["parameters"] == sum(p.numel() for p in encoder.parameters())
    assert all(tensor.dtype == torch.float16 for tensor in load_file(file).values())
    assert file.stat().st_size <= 12e6


def test_the_record_says_how_well_the_weights_do() -> None:
    made = record()
    assert made["dataset"] == "CIFAR-100"
    assert 0.5 < made["val_top1"] < 1 and 0.5 < made["test_top1"] < 1


def test_the_encoder_has_between_one_and_three_million_parameters() -> None:
    count = sum(p.numel() for p in create_encoder().parameters())
    assert 1e6 <= count <= 3e6
    assert count <= record()["parameters"] <= 3e6  # recorded with the classifier of the pre-training


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_torch_state_dict_gives_the_same_encoder(wrapped: bool, tmp_path: Path) -> None:
    state: Any = load_file(PACKAGED)
    file = tmp_path / "compact.pth"
    torch.save({"model": state, "epoch": 3} if wrapped else state, file)
    packaged, loaded = create_encoder(), create_encoder("compact", file)
    assert (loaded.weights, packaged.weights) == (file, None)
    assert loaded.sha256 == sha256_of(file) != packaged.sha256
    assert packaged.state_dict().keys() == loaded.state_dict().keys()
    for name, tensor in packaged.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(packaged.plain(images), loaded.plain(images))


def test_a_classifier_in_the_file_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "with-head.safetensors"
    head = {"head.weight": torch.zeros(5, 128), "head.bias": torch.zeros(5)}
    save_file(load_file(PACKAGED) | head, file)
    create_encoder("compact", file)


def test_a_pickled_object_is_refused_and_never_executed(tmp_path: Path) -> None:
    file, folder = tmp_path / "weights.pth", tmp_path / "executed"
    torch.save({"weight": MakesFolder(folder)}, file)
    with pytest.raises(EncoderError, match=r"more than tensors.*safetensors"):
        read_weights(file)
    assert not folder.exists()


def test_missing_damaged_and_odd_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EncoderError, match="There is no weight file"):
        read_weights(tmp_path / "absent.safetensors")
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(PACKAGED.read_bytes()[:1000])
    with pytest.raises(EncoderError, match="cannot be read as weights"):
        read_weights(damaged)
    odd = tmp_path / "odd.pth"
    torch.save([1, 2, 3], odd)
    with pytest.raises(EncoderError, match="must map names to tensors"):
        read_weights(odd)


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    save_file({"layer.weight": torch.zeros(2)}, file)
    with pytest.raises(EncoderError, match=r"does not hold the weights of 'compact' \(missing: .*unexpected: layer"):
        create_encoder("compact", file)
    state = create_compact().state_dict()
    state["norm.weight"] = torch.zeros(64)
    save_file(state, file)
    with pytest.raises(EncoderError, match=r"does not hold the weights of 'compact' \(.*norm.weight"):
        create_encoder("compact", file)
