"""The encoders of the paper's tables load from files in their published layouts; the networks are shrunken."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from pictures import photos
from tpl.bench.run import execute
from tpl.bench.spec import RunSpec
from tpl.nets import EncoderError, create_encoder, patch16
from tpl.nets.weights import read_weights

NAMES = (
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "deit_tiny_patch16_224",
    "deit_small_patch16_224",
    "vit_small_patch16_224.dino",
    "vit_base_patch16_224.mae",
    "deit_small_611",
)
SHRUNKEN = {"embed_dim": 24, "depth": 2, "num_heads": 3}


@pytest.fixture
def _shrunken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every network is narrow and shallow, here and in timm."""
    create = timm.create_model

    def small(name: str, pretrained: bool = False, **options: Any) -> Any:
        assert not pretrained
        torch.manual_seed(0)
        return create(name, pretrained=False, **options | SHRUNKEN)

    monkeypatch.setattr(timm, "create_model", small)
    for name, network in patch16.PATCH16.items():
        monkeypatch.setitem(patch16.PATCH16, name, network._replace(dim=SHRUNKEN["embed_dim"]))
    monkeypatch.setattr(patch16, "DEPTH", SHRUNKEN["depth"])
    monkeypatch.setattr(patch16, "HEAD", SHRUNKEN["embed_dim"] // SHRUNKEN["num_heads"])


def architecture(name: str) -> str:
    return "deit_small_patch16_224" if name == "deit_small_611" else name


def state_of(name: str, classes: int) -> dict[str, torch.Tensor]:
    return dict(timm.create_model(architecture(name), num_classes=classes).state_dict())


def save(file: Path, state: dict[str, torch.Tensor], layout: str) -> Path:
    """Write weights as timm does, as a plain state dict, or as DeiT's training program does."""
    if layout == "safetensors":
        save_file(state, file)
    elif layout == "plain":
        torch.save(state, file)
    else:
        options = Namespace(model="deit_small_patch16_224", lr=0.0005, output_dir="runs")
        torch.save(
            {"model": state, "epoch": 299, "args": options, "optimizer": {"state": {}, "param_groups": []}}, file
        )
    return file


@pytest.mark.usefixtures("_shrunken")
@pytest.mark.parametrize("layout", ["safetensors", "plain", "training"])
@pytest.mark.parametrize("name", NAMES)
def test_features_are_those_of_timm_whatever_the_layout(name: str, layout: str, tmp_path: Path) -> None:
    state = state_of(name, 611)
    file = save(tmp_path / f"weights.{'safetensors' if layout == 'safetensors' else 'pth'}", state, layout)
    encoder = create_encoder(name, file)
    assert encoder.name == name and encoder.dim == SHRUNKEN["embed_dim"]
    reference = timm.create_model(architecture(name), num_classes=0).eval()
    reference.load_state_dict({k: v for k, v in state.items() if not k.startswith("head.")})
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(encoder.plain(images), reference(images), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_shrunken")
def test_the_611_classes_run_on_a_benchmark_and_the_run_says_unverified(tmp_path: Path) -> None:
    photos(tmp_path / "data" / "train", ["ant", "bee", "cat", "dog"], count=3)
    photos(tmp_path / "data" / "test", ["ant", "bee", "cat", "dog"], count=1, seed=1)
    file = save(tmp_path / "best_checkpoint.pth", state_of("deit_small_611", 611), "training")
    spec = RunSpec("folder", "slda", "deit_small_611", file, tmp_path / "data", device="cpu")
    result = execute(spec, tmp_path / "run")
    assert result.description["encoder"]["name"] == "deit_small_611"
    assert result.description["encoder_weights"] == "unverified"


def test_without_a_file_the_error_says_where_the_weights_come_from() -> None:
    with pytest.raises(EncoderError, match=r"'deit_small_611' cannot be downloaded.*MORE.*--weights FILE"):
        create_encoder("deit_small_611")


@pytest.mark.usefixtures("_shrunken")
def test_another_network_is_refused(tmp_path: Path) -> None:
    state = state_of("deit_small_611", 611)
    state["blocks.0.norm1.weight"] = torch.zeros(3)
    file = save(tmp_path / "wide.pth", state, "training")
    with pytest.raises(EncoderError, match=r"does not hold the weights of 'deit_small_611' \(.*blocks.0.norm1.weight"):
        create_encoder("deit_small_611", file)
    file = save(tmp_path / "distilled.pth", state_of("deit_small_611", 611) | {"dist_token": torch.zeros(1)}, "plain")
    with pytest.raises(EncoderError, match=r"does not hold .* \(unexpected: dist_token\)"):
        create_encoder("deit_small_611", file)


def test_options_of_a_training_program_are_read_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pth"
    torch.save({"model": {"weight": torch.ones(1)}, "args": Namespace(lr=0.1)}, file)
    assert read_weights(file).keys() == {"weight"}
    torch.save({"model": {"weight": torch.ones(1)}, "args": Namespace(lr=Path("/"))}, file)
    with pytest.raises(EncoderError, match="more than tensors"):
        read_weights(file)
