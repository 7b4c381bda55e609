"""The plain ViT computes what timm's ViT computes, bit for bit, without timm."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from timm.layers import HybridEmbed
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import ConvStem
from torch import Tensor, nn

from tpl.nets import ViTEncoder, compact, create_encoder, photos
from tpl.nets.weights import PACKAGED


@pytest.fixture(scope="module", params=PACKAGED)
def pair(request: pytest.FixtureRequest) -> tuple[ViTEncoder, ViTEncoder]:
    """An encoder of the package, and timm's network with the same weights."""
    own = create_encoder(request.param)
    assert isinstance(own, ViTEncoder)
    network = timms(request.param)
    network.load_state_dict(own.vit.state_dict())
    return own, ViTEncoder(network, "timm", "", dict(own.data_config))


def timms(name: str) -> VisionTransformer:
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
