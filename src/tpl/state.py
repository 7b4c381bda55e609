"""What a method has learned, as tensors: the one thing that methods hand over and the store keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    Tensors = dict[str, Tensor]


@dataclass
class State:
    """What the tasks share, and what each task owns for good."""

    shared: Tensors = field(default_factory=dict)
    tasks: list[Tensors] = field(default_factory=list)


def beginning_with(prefix: str, tensors: Tensors) -> Tensors:
    """Those whose name begins so, without that."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
