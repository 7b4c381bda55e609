"""The encoder: timm's own network, and nothing else where a task adds nothing."""

from __future__ import annotations

import timm
import torch
from timm.data import resolve_data_config

from tpl.nets import AdapterStack, ViTEncoder, create_encoder
from tpl.nets.vit import hash_tensors


def tiny_vit() -> ViTEncoder:
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=0)
    return ViTEncoder(vit, "tiny", "0" * 64, resolve_data_config(model=vit))


def test_closed_masks_equal_timms_forward_bit_for_bit() -> None:
    for encoder in (create_encoder("compact"), tiny_vit()):
        images = torch.randn(5, 3, 32, 32)
        adapters = encoder.new_adapters(16)
        plain = encoder.plain(images)
        assert torch.equal(plain, encoder.vit(images))
        assert torch.equal(plain, encoder(images, encoder.new_norms()))
        assert torch.equal(
            plain, encoder(images, encoder.new_norms(), adapters.weights.fold(torch.zeros(adapters.units)))
        )


def test_open_masks_equal_no_masks_and_change_the_features() -> None:
    encoder = create_encoder("compact")
    images, adapters, norms = torch.randn(4, 3, 32, 32), encoder.new_adapters(16), encoder.new_norms()
    with_masks = encoder(images, norms, adapters.weights.fold(torch.ones(adapters.units)))
    assert torch.equal(with_masks, encoder(images, norms, adapters.weights))
    assert not torch.allclose(with_masks, encoder.plain(images))


def test_images_of_different_tasks_share_a_batch() -> None:
    encoder = create_encoder("compact")
    adapters = encoder.new_adapters(16)
    masks = (torch.rand(6, adapters.units) > 0.5).float()
    norms = encoder.new_norms() * (1 + 0.1 * torch.randn(6, *encoder.new_norms().shape))
    images = torch.randn(6, 3, 32, 32)
    with torch.no_grad():
        together = encoder(images, norms, adapters.weights, masks)
        folded = [adapters.weights.fold(mask) for mask in masks]
        apart = torch.cat([encoder(images[i : i + 1], norms[i], folded[i]) for i in range(6)])
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)


def test_networks_stacked_along_a_first_axis_answer_as_they_do_alone() -> None:
    encoder = create_encoder("compact")
    stacks = [encoder.new_adapters(16).weights for _ in range(3)]
    norms = encoder.new_norms() * (1 + 0.1 * torch.randn(3, *encoder.new_norms().shape))
    images = torch.randn(12, 3, 32, 32)
    stacked = AdapterStack(*(torch.stack(parts) for parts in zip(*stacks, strict=True)))
    with torch.no_grad():
        together = encoder(images, norms, stacked)
        apart = torch.cat([encoder(images[4 * i : 4 * i + 4], norms[i], stacks[i]) for i in range(3)])
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)


def test_half_precision_is_a_copy_and_stays_close() -> None:
    encoder = create_encoder("compact")
    images, norms = torch.randn(4, 3, 32, 32), encoder.new_norms()
    before = encoder.fingerprint
    half = encoder(images, norms, dtype=torch.bfloat16)
    assert half.dtype == torch.float32
    assert torch.equal(half, encoder.plain(images, torch.bfloat16))
    assert not torch.equal(half, encoder.plain(images))
    torch.testing.assert_close(half, encoder.plain(images), rtol=0.1, atol=0.1)
    assert hash_tensors(encoder.vit.state_dict()) == before and encoder.trunk(torch.float32) is encoder.vit


def test_trunk_is_frozen_and_stays_in_evaluation_mode() -> None:
    encoder = create_encoder("compact").train()
    assert not encoder.training and not any(module.training for module in encoder.modules())
    assert not any(p.requires_grad for p in encoder.parameters())
