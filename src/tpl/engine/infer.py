"""Inference in batches that bound the memory. Always float32: batches must not change the answer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tpl.engine.device import Compute

BATCH = 256


def in_batches(
    function: Callable[[Tensor], Tensor],
    pixels: Tensor,
    compute: Compute,
    normalise: Callable[[Tensor], Tensor],
    batch_size: int = BATCH,
) -> Tensor:
    """`function` of normalised images over all `pixels`, on the compute device."""
    parts = []
    with torch.inference_mode():
        for block in pixels.split(batch_size):
            images = normalise(block.to(compute.device, non_blocking=True))
            parts.append(function(images))
    return torch.cat(parts)  # outside inference mode: an ordinary tensor that autograd may meet again
