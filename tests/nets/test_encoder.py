"""The encoder: timm's own network, and nothing else where a task adds nothing."""

from __future__ import annotations

import timm
import torch
from timm.data import resolve_data_config

from tpl.nets import Encoder, create_encoder


def tiny_vit() -> Encoder:
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=0)
    return Encoder(vit, "tiny", "0" * 64, resolve_data_config(model=vit))


def test_closed_masks_equal_timms_forward_bit_for_bit() -> None:
    for encoder in (create_encoder("compact"), tiny_vit()):
        images = torch.randn(5, 3, 32, 32)
        adapters = encoder.new_adapters(16)
        plain = encoder.plain(images)
        assert torch.equal(plain, encoder.vit(images))
        assert torch.equal(plain, encoder(images, encoder.new_norms()))
        assert torch.equal(plain, encoder(images, encoder.new_norms(), adapters, torch.zeros(adapters.units)))


def test_open_masks_equal_no_masks_and_change_the_features() -> None:
    encoder = create_encoder("compact")
    images, adapters, norms = torch.randn(4, 3, 32, 32), encoder.new_adapters(16), encoder.new_norms()
    with_masks = encoder(images, norms, adapters, torch.ones(adapters.units))
    assert torch.equal(with_masks, encoder(images, norms, adapters))
    assert not torch.allclose(with_masks, encoder.plain(images))


def test_images_of_different_tasks_share_a_batch() -> None:
    encoder = create_encoder("compact")
    adapters = encoder.new_adapters(16)
    masks = (torch.rand(6, adapters.units) > 0.5).float()
    norms = encoder.new_norms() * (1 + 0.1 * torch.randn(6, *encoder.new_norms().shape))
    images = torch.randn(6, 3, 32, 32)
    with torch.no_grad():
        together = encoder(images, norms, adapters, masks)
        apart = torch.cat([encoder(images[i : i + 1], norms[i], adapters, masks[i]) for i in range(6)])
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)


def test_trunk_is_frozen_and_stays_in_evaluation_mode() -> None:
    encoder = create_encoder("compact").train()
    assert not encoder.training and not any(module.training for module in encoder.modules())
    assert not any(p.requires_grad for p in encoder.parameters())
