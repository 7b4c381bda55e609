"""The contract between networks and methods: what an encoder offers, and the weights that its tasks share."""

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
        """The tensors, in the order in which an encoder takes them."""

    def fold(self, masks: Tensor) -> Weights:
        """The weights under a mask over all units, `[units]` or `[networks, units]`."""

    def gates(self, used: Tensor) -> Weights:
        """How far each weight may still move, 1 = free and 0 = frozen, given the units in use."""


class Trainable(nn.Module, ABC):
    """What all tasks of a network share and train: adapters in a frozen trunk, or a whole network's kernels."""

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

    def gates(self, used: Tensor) -> Weights:
        """How far each weight may still move, 1 = free and 0 = frozen, given the units in use."""
        return self.weights.gates(used)


class Encoder(nn.Module, ABC):
    """Turns normalised images into features under one task's weights.

    Called as `encoder(images, norms, weights, dtype=..., learning=...)`, it gives features `[n, dim]`, float32. `norms`
    are a task's own, `weights` those of a `Trainable`, perhaps under a mask. `learning` is true inside a training step:
    batch norms then go by the batch. Else no image's features depend on the rest of the batch.
    """

    # Whether there is a frozen trunk. Without one, all weights are drawn by the method and trained from scratch, and
    # networks have nothing to share by being trained side by side.
    pretrained: ClassVar[bool] = True
    # Whether there are batch norms: then no ignored row may fill a batch up, and a pass at the end of training
    # re-estimates the statistics that predictions use.
    batch_norms: ClassVar[bool] = False

    fused = False  # whether `fuse` has compiled something
    name: str
    sha256: str
    fingerprint: str  # hash of what the encoder computes, independent of the file format of its weights
    weights: Path | None  # the file they came from
    data_config: dict[str, Any]  # timm's: input size, mean, std, crop, interpolation
    dim: int

    @abstractmethod
    def new_adapters(self, latent: int, generator: torch.Generator | None = None) -> Trainable:
        """Fresh weights for all tasks to share; `latent` is the width of adapters, where there are any."""

    @abstractmethod
    def new_norms(self) -> Tensor:
        """A task's norms before training, one tensor."""

    def reestimated_norms(
        self, norms: Tensor, weights: Weights, batches: Iterable[Tensor], dtype: torch.dtype
    ) -> Tensor:
        """The norms of a trained task; batch norms re-estimate their statistics on these batches of training images."""
        return norms

    def plain(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Features of the trunk alone, which no task changes."""
        raise TplError(f"'{self.name}' is trained from scratch: before that, it has no features of its own.")

    def fuse(self) -> None:
        """Compile the parts for which it pays."""


def unstacked(encoder: Callable[..., Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
    """An encoder as a function of tensors alone: images, norms, and the shared weights one by one."""

    def features(images: Tensor, norms: Tensor, *weights: Tensor) -> Tensor:
        return encoder(images, norms, weights, dtype=dtype)

    return features
