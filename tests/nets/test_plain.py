"""The plain ViT computes what timm's ViT computes, bit for bit, without timm."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.data import resolve_data_config
from timm.layers import HybridEmbed
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import ConvStem
from torch import Tensor, nn

from tpl.nets import ViTEncoder, compact, create_encoder, photos
from tpl.nets.patch16 import PATCH16
from tpl.nets.weights import PACKAGED

TINY = "vit_tiny_patch16_224"


@pytest.fixture(scope="module", params=[*PACKAGED, TINY])
def pair(request: pytest.FixtureRequest) -> tuple[ViTEncoder, ViTEncoder]:
    """An encoder without timm, and timm's network with the same weights."""
    network = timms(request.param)
    if request.param in PACKAGED:
        own = create_encoder(request.param)
        assert isinstance(own, ViTEncoder)
        network.load_state_dict(own.vit.state_dict())
    else:
        plain = PATCH16[request.param].create()
        plain.load_state_dict(network.state_dict())
        own = ViTEncoder(plain, request.param, "", PATCH16[request.param].data_config)  # type: ignore[arg-type]
    return own, ViTEncoder(network, "timm", "", dict(own.data_config))


def timms(name: str) -> VisionTransformer:
    if name not in PACKAGED:
        found: VisionTransformer = timm.create_model(name, num_classes=0)
        return found
    net = photos if name == photos.NAME else compact
    shape = {"embed_dim": net.DIM, "depth": net.DEPTH, "num_heads": net.HEADS, "num_classes": 0}
    if name == photos.NAME:
        return VisionTransformer(img_size=photos.SIZE, patch_size=photos.PATCH, **shape)
    stem = ConvStem(depth=len(compact.CHANNELS), channels=compact.CHANNELS, stride=compact.STRIDES, act_layer=nn.GELU)
    embed = partial(HybridEmbed, backbone=stem, proj=False)
    return VisionTransformer(img_size=32, patch_size=1, embed_layer=embed, **shape)


def images(encoder: ViTEncoder, count: int = 5) -> Tensor:
    return torch.randn(count, *encoder.data_config["input_size"], generator=torch.Generator().manual_seed(0))


def test_weights_have_timms_names(pair: tuple[ViTEncoder, ViTEncoder]) -> None:
    own, theirs = pair
    assert list(own.vit.state_dict()) == list(theirs.vit.state_dict())
    assert own.fingerprint == theirs.fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_are_timms(pair: tuple[ViTEncoder, ViTEncoder], dtype: torch.dtype) -> None:
    own, theirs = pair
    adapters = own.new_adapters(8, torch.Generator().manual_seed(1)).weights
    norms, given = own.new_norms(), images(own)
    with torch.no_grad():
        assert torch.equal(own.plain(given, dtype), theirs.plain(given, dtype))
        assert torch.equal(own.vit(given), theirs.vit(given))
        found = [encoder(given, norms, adapters, dtype=dtype) for encoder in pair]
    assert torch.equal(*found)


def test_gradients_are_timms(pair: tuple[ViTEncoder, ViTEncoder]) -> None:
    gradients = []
    for encoder in pair:
        norms = encoder.new_norms().requires_grad_()
        adapters = encoder.new_adapters(8, torch.Generator().manual_seed(1)).weights
        encoder(images(encoder), norms, adapters).sum().backward()
        gradients.append(norms.grad)
    assert torch.equal(*gradients)  # type: ignore[arg-type]


def test_the_number_of_images_stays_free_in_a_graph(pair: tuple[ViTEncoder, ViTEncoder]) -> None:
    """An exported model answers any number of images."""
    own, _ = pair
    free = ({0: torch.export.Dim.DYNAMIC},)
    traced = torch.export.export(own.vit, (images(own, 2),), dynamic_shapes=free)
    assert traced.module()(images(own)).shape == (5, own.dim)


@pytest.mark.parametrize("name", PATCH16)
def test_networks_known_by_name_are_timms(name: str) -> None:
    plain, config = PATCH16[name], timm.get_pretrained_cfg(name)
    assert config is not None and config.hf_hub_id == plain.hub
    with torch.device("meta"):
        own, theirs = plain.create(), timm.create_model(name, num_classes=0)
    assert plain.data_config == resolve_data_config(model=theirs)
    sizes = [[(key, value.shape) for key, value in network.state_dict().items()] for network in (own, theirs)]
    assert sizes[0] == sizes[1]
    assert own.blocks[0].attn.num_heads == theirs.blocks[0].attn.num_heads
    assert {layer.eps for net in (own, theirs) for layer in net.modules() if isinstance(layer, nn.LayerNorm)} == {1e-6}
    assert theirs.global_pool == own.global_pool and type(theirs.fc_norm) is type(own.fc_norm) is nn.Identity


def test_weights_in_a_file_are_loaded_without_timm(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(PATCH16[TINY].create().state_dict() | {"head.weight": torch.zeros(1000, 192)}, file)
    program = (
        "import sys; from tpl.nets import create_encoder; "
        f"encoder = create_encoder({TINY!r}, {str(file)!r}); "
        "assert 'timm' not in sys.modules and encoder.dim == 192"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_weights_that_timm_has_downloaded_are_found_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.safetensors"
    state = PATCH16[TINY].create().state_dict()
    save_file(state, file)
    asked = []

    def cached(hub: str, name: str) -> str | None:
        asked.append((hub, name))
        return str(file)

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    monkeypatch.setattr(timm, "create_model", lambda *given, **options: pytest.fail("timm was asked"))
    encoder = create_encoder(TINY, download=False)
    assert isinstance(encoder, ViTEncoder) and encoder.weights is None and encoder.sha256 == encoder.fingerprint
    assert asked == [(PATCH16[TINY].hub, "model.safetensors")]
    assert torch.equal(encoder.vit.state_dict()["blocks.3.mlp.fc1.weight"], state["blocks.3.mlp.fc1.weight"])
