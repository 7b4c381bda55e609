"""Base classes of networks: encoders, and the weights in them that tasks share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from tpl.errors import TplError


class Weights(Protocol):
    """Shared weights, a few tensors in a fixed order, of one network or with a first axis of several."""

    def __iter__(self) -> Iterator[Tensor]:
        """The tensors, in the order of an encoder's arguments."""

    def fold(self, masks: Tensor) -> Weights:
        """The weights under a mask over all units, `[units]` or `[networks, units]`."""

    def gates(self, used: Tensor) -> Weights:
        """A factor for every weight's update, 1 = free and 0 = frozen, given the units in use."""


class Trainable(nn.Module, ABC):
    """The weights that all tasks share and train: adapters in a frozen trunk, or all kernels of a network."""

    @property
    @abstractmethod
    def units(self) -> int:
        """Number of units that a mask opens and closes."""

    @property
    @abstractmethod
    def weights(self) -> Weights:
        """The parameters, every unit open."""

    @abstractmethod
    def stack(self, *tensors: Tensor) -> Weights:
        """Weights of this kind from other tensors, such as those of several networks."""


class Encoder(nn.Module, ABC):
    """Computes features of normalised images under one task's weights.

    `encoder(images, norms, weights, dtype=..., learning=...)` returns features `[n, dim]`, float32 (float64 if `dtype`
    is). `norms` are a task's own, `weights` those of a `Trainable`, perhaps under a mask. `learning` is true inside a
    training step, where batch norms use the statistics of the batch. Otherwise no image's features depend on the rest
    of the batch.
    """

    # Whether there is a frozen trunk. Without one, all weights are initialised by the method and trained from scratch,
    # and networks that are trained side by side share no computation.
    pretrained: ClassVar[bool] = True
    # Whether there are batch norms: then batches are not padded with ignored rows, and a pass at the end of training
    # re-estimates the statistics that predictions use.
    batch_norms: ClassVar[bool] = False

    exact: ClassVar[bool] = False  # whether predictions are computed in double precision: cheap for a small network

    fused = False  # whether `fuse` has compiled something
    name: str
    sha256: str
    fingerprint: str  # hash of what the encoder computes, independent of the file format of its weights
    weights: Path | None  # the file they came from
    data_config: dict[str, Any]  # timm's: input size, mean, std, crop, interpolation
    dim: int

    @abstractmethod
    def new_adapters(self, latent: int, generator: torch.Generator | None = None, below: int = 0) -> Trainable:
        """Untrained weights for all tasks to share; `latent` is the width of adapters, where there are any.

        `below` first blocks get none (see `blocks_below`).
        """

    @abstractmethod
    def new_norms(self, below: int = 0) -> Tensor:
        """A task's norms before training, one tensor; `below` first blocks keep the encoder's own."""

    def blocks_below(self, adapted: int) -> int:
        """Number of blocks below the last `adapted` ones: no task changes them."""
        raise TplError(f"'{self.name}' has no blocks that could do without adapters: use adapted_blocks=all.")

    def reestimated_norms(
        self, norms: Tensor, weights: Weights, batches: Iterable[Tensor], dtype: torch.dtype
    ) -> Tensor:
        """The norms of a trained task; batch norms re-estimate their statistics on these batches of training images."""
        return norms

    def plain(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Features of the trunk alone, which no task changes."""
        raise TplError(f"'{self.name}' is trained from scratch: it has no pre-trained features.")

    def fuse(self) -> None:
        """Compile the parts that get faster by it."""


def unstacked(encoder: Callable[..., Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
    """An encoder as a function of tensors alone: images, norms, and the shared weights one by one."""

    def features(images: Tensor, norms: Tensor, *weights: Tensor) -> Tensor:
        return encoder(images, norms, weights, dtype=dtype)

    return features
