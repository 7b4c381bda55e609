"""The contract of a protection: how tasks share one set of adapters and leave each other in peace.

A protection is one file in this folder. What a task owns under it is one flat tensor, here `own`: HAT's embedding, or
the scores of a supermask. In training, tensors have a first axis of networks trained side by side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tpl.config import Config, option
from tpl.errors import TplError
from tpl.nets import Trainable, Weights


@dataclass(frozen=True)
class ProtectConfig(Config):
    """The network a task is learned in, and how tasks are kept apart."""

    latent: int = option(64, "hidden units of an adapter; resnet18 has a width in its name instead", minimum=1)
    protect: str = option(
        "hat", "hat: weights of used units stand still; supsup: random weights, a supermask each", ("hat", "supsup")
    )
    masks: str = option("binary", "binary: no drift at all; soft: the paper's near-binary ones", ("binary", "soft"))
    s_max: float = option(400.0, "largest scale of the mask's sigmoid", above=1)
    sparsity: float = option(0.75, "weight of HAT's regulariser", minimum=0)
    mask_gradient: str = option(
        "autograd", "autograd with compensation, as published; analytic: its closed form", ("autograd", "analytic")
    )
    supermask: float = option(0.5, "supsup: the share of an adapter's weights that a task uses", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.supermask > 1:
            raise TplError(f"supermask is a share of the weights, at most 1; got {self.supermask}.")


class Masked(NamedTuple):
    """Adapters as one task sees them, and the mask that made them so."""

    weights: Weights
    mask: Tensor


class Protection(ABC):
    """Keeps tasks that share adapters from disturbing each other."""

    name: ClassVar[str]
    summary: ClassVar[str]
    trains_adapters: ClassVar[bool] = True  # False: they stay as they were made

    def __init__(self, config: ProtectConfig) -> None:
        self.config = config

    def prepare(self, adapters: Trainable) -> None:  # noqa: B027 (most take them as they are)
        """Change freshly made adapters, before any task."""

    @abstractmethod
    def initial(self, adapters: Trainable, generator: torch.Generator) -> Tensor:
        """What an untrained task owns."""

    @abstractmethod
    def masked(self, weights: Weights, own: Tensor, progress: Tensor) -> Masked:
        """The adapters at this point of the epoch, differentiable."""

    def penalty(self, mask: Tensor, used: Tensor | None) -> Tensor:
        """What a task pays for its mask, `[networks]`."""
        return mask.new_zeros(len(mask))

    def gates(self, weights: Weights, used: Tensor) -> Weights | None:
        """How far each weight may still move, given what earlier tasks use; None: as it likes."""
        return None

    def after_backward(self, own: Tensor, progress: Tensor) -> None:  # noqa: B027
        """Change the gradient of `own`."""

    def after_step(self, own: Tensor) -> None:  # noqa: B027
        """Change `own` when it has moved."""

    def kept(self, weights: Weights, own: Tensor) -> Tensor:
        """What is stored of a trained task (one network's)."""
        return own

    @abstractmethod
    def finished(self, weights: Weights, kept: Tensor) -> Weights:
        """The adapters as a finished task sees them."""

    def claim(self, kept: Tensor) -> Tensor | None:
        """The units that a finished task holds, 1 = wholly; None where nothing needs to be held."""
        return None

    @property
    def final(self) -> bool:
        """Whether a finished task stays exactly as it is, whatever comes later."""
        return True

    def capacity(self, adapters: Trainable, used: Tensor | None) -> dict[str, float]:
        """How full the network is: the share of units in use, and of adapter weights that are frozen by that."""
        return {"units": 0.0, "frozen": 0.0}
