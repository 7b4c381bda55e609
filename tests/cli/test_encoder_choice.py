"""Which encoder a command means: unsuitable networks are refused before a download, weight files are recognised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from commands import refusal
from pictures import photos
from tpl.cli.encoder import check_weights, fitting_encoders
from tpl.errors import TplError
from tpl.nets.compact import WEIGHTS

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
    check_weights(TINY, file)  # with a name, the file is checked when it is loaded


def test_weights_of_the_default_encoder_need_no_name() -> None:
    check_weights(None, Path(str(WEIGHTS)))
    check_weights(None, None)
    with pytest.raises(TplError, match="no weight file"):
        check_weights(None, Path("nowhere.safetensors"))
