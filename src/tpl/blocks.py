"""Tensors in blocks, so that versions of a model share what has not changed.

A file holds one block: all small tensors together, or a large tensor by itself. A long row of bytes, such as the images
of a memory, is cut into pieces: if images are added at its end, all pieces but the last stay as they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch takes seconds to import
    from torch import Tensor

    Tensors = dict[str, Tensor]

LARGE = 1 << 18  # bytes from which a tensor has a file of its own
LENGTH = 1 << 20  # bytes of a piece
PIECE = "@"  # between the name of a tensor and the number of its piece


def in_blocks(tensors: Tensors) -> list[Tensors]:
    """The tensors in blocks: first all small ones, then one block for each large tensor or piece."""
    import torch

    small: Tensors = {}
    large: list[Tensors] = []
    for name, tensor in sorted(tensors.items()):
        if tensor.numel() * tensor.element_size() < LARGE:
            small[name] = tensor
        elif tensor.dtype == torch.uint8 and tensor.dim() == 1:
            large += [{f"{name}{PIECE}{i}": piece} for i, piece in enumerate(tensor.split(LENGTH))]
        else:
            large.append({name: tensor})
    return [small, *large]


def from_blocks(blocks: Iterable[Tensors]) -> Tensors:
    """The tensors that `in_blocks` returned as blocks."""
    import torch

    tensors: Tensors = {}
    pieces: dict[str, dict[int, Tensor]] = {}
    for block in blocks:
        for name, tensor in block.items():
            whole, mark, number = name.rpartition(PIECE)
            if mark and number.isdecimal():
                pieces.setdefault(whole, {})[int(number)] = tensor
            else:
                tensors[name] = tensor
    return tensors | {name: torch.cat([found[i] for i in sorted(found)]) for name, found in pieces.items()}
