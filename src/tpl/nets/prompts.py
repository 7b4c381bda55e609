"""Prompts: learned tokens that look at an image together with its own, through a frozen trunk."""

from __future__ import annotations

import torch
from torch import Tensor

from tpl.nets.encoder import ViTEncoder

NO_ADAPTERS = (None, None)


def prompted(
    encoder: ViTEncoder, images: Tensor, norms: Tensor, prompts: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Features `[n, dim]`, float32, read off the prompts: the mean of what became of them.

    `prompts` are an image's own, `[n, tokens, dim]`; `norms` those of `new_norms`. Prompts carry no position: a
    trunk tells tokens apart by what is added to them alone, and prompts are learned anyway.
    """
    vit = encoder.trunk(dtype)
    affines = norms.to(dtype).unbind(0)
    x = torch.cat([prompts.to(dtype), encoder.tokens(images, dtype)], dim=1)
    for i, block in enumerate(vit.blocks):
        x = encoder.through(block, x, affines[2 * i : 2 * i + 2], NO_ADAPTERS, NO_ADAPTERS)
    z = encoder.vit.norm(x[:, : prompts.shape[1]].float())
    features: Tensor = encoder.vit.fc_norm(z.mean(dim=1))
    return features
