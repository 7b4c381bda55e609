"""Inference in blocks that bound the memory, and that never change an answer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tpl.engine.device import Compute

BLOCK = 256


def in_batches(
    function: Callable[[Tensor], Tensor],
    pixels: Tensor,
    compute: Compute,
    normalise: Callable[[Tensor], Tensor],
    block: int = BLOCK,
) -> Tensor:
    """`function` of normalised images over all `pixels`, on the compute device.

    A GPU's libraries choose kernels by the batch's size, and kernels round differently. There every block is filled
    up to one size, so an image's answer has the same bits alone and among thousands.
    """
    parts = []
    with torch.inference_mode():
        for part in pixels.split(block):
            count = len(part)
            if compute.device.type == "cuda" and count < block:
                part = torch.cat([part, part.new_zeros(block - count, *part.shape[1:])])
            images = normalise(part.to(compute.device, non_blocking=True))
            parts.append(function(images)[:count])
    return torch.cat(parts)  # outside inference mode: an ordinary tensor that autograd may meet again
