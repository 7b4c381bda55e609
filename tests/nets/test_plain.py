"""The plain ViT computes what timm's ViT computes, bit for bit, without timm."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from timm.layers import HybridEmbed
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import ConvStem
from torch import Tensor, nn

from tpl.nets import ViTEncoder, create_encoder
from tpl.nets.compact import CHANNELS, DATA_CONFIG, DEPTH, DIM, HEADS, STRIDES, create_compact


@pytest.fixture(scope="module")
def pair() -> tuple[ViTEncoder, ViTEncoder]:
    """The compact encoder of the package, and timm's network with the same weights."""
    own = create_encoder("compact")
    assert isinstance(own, ViTEncoder)
    stem = ConvStem(depth=len(CHANNELS), channels=CHANNELS, stride=STRIDES, act_layer=nn.GELU)
    embed = partial(HybridEmbed, backbone=stem, proj=False)
    shape = {"img_size": 32, "patch_size": 1, "embed_dim": DIM, "depth": DEPTH, "num_heads": HEADS}
    network = VisionTransformer(**shape, num_classes=0, embed_layer=embed)
    network.load_state_dict(own.vit.state_dict())
    return own, ViTEncoder(network, "timm", "", dict(DATA_CONFIG))


def images() -> Tensor:
    return torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_weights_have_timms_names(pair: tuple[ViTEncoder, ViTEncoder]) -> None:
    own, theirs = pair
    assert list(own.vit.state_dict()) == list(theirs.vit.state_dict())
    assert own.fingerprint == theirs.fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_are_timms(pair: tuple[ViTEncoder, ViTEncoder], dtype: torch.dtype) -> None:
    own, theirs = pair
    adapters = own.new_adapters(8, torch.Generator().manual_seed(1)).weights
    norms = own.new_norms()
    with torch.no_grad():
        assert torch.equal(own.plain(images(), dtype), theirs.plain(images(), dtype))
        assert torch.equal(own.vit(images()), theirs.vit(images()))
        found = [encoder(images(), norms, adapters, dtype=dtype) for encoder in pair]
    assert torch.equal(*found)


def test_gradients_are_timms(pair: tuple[ViTEncoder, ViTEncoder]) -> None:
    gradients = []
    for encoder in pair:
        norms = encoder.new_norms().requires_grad_()
        encoder(images(), norms, encoder.new_adapters(8, torch.Generator().manual_seed(1)).weights).sum().backward()
        gradients.append(norms.grad)
    assert torch.equal(*gradients)  # type: ignore[arg-type]


def test_the_number_of_images_stays_free_in_a_graph() -> None:
    """An exported model answers any number of images."""
    free = ({0: torch.export.Dim.DYNAMIC},)
    traced = torch.export.export(create_compact().eval(), (torch.zeros(2, 3, 32, 32),), dynamic_shapes=free)
    assert traced.module()(torch.zeros(5, 3, 32, 32)).shape == (5, DIM)
