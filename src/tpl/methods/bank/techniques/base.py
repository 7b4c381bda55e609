"""The contract of a technique: how a task's network is trained so that it tells others' images from its own.

A technique is one file in this folder. It sees one network and one task; a new one is made for every task. On a GPU a
step is captured once and replayed, so nothing here may branch on a tensor's value, change a shape or draw random
numbers: a step is handed as many as `numbers` asks for.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.engine import IGNORED


class Technique:
    """Plain cross-entropy over the head's outputs."""

    name: ClassVar[str] = "none"
    summary: ClassVar[str] = "plain cross-entropy"
    paper: ClassVar[str] = ""
    splits: ClassVar[bool] = True  # False: rows of a batch meet, or have random numbers by their place in it
    outliers: ClassVar[bool] = False  # whether as many images of earlier tasks come after the new ones, from the memory
    makes_do: ClassVar[bool] = False  # whether the first task's own images, put out of joint, can stand for them

    def __init__(self, own: int, dim: int, batch: int, device: torch.device) -> None:
        """For a task of `own` classes, features of size `dim`, and at most `batch` new images a step."""
        self.own, self.dim, self.batch, self.device = own, dim, batch, device

    @property
    def numbers(self) -> int:
        """How many random numbers, uniform in [0, 1), a step needs."""
        return 0

    def parameters(self) -> list[Tensor]:
        """What is trained beside the network, by the same optimiser."""
        return []

    def mixed(self, images: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """The images `[b, 3, h, w]` that the network is shown in place of these (normalised) ones.

        `labels` are `[b]`: a class of the task, `own` for an image of another task, `IGNORED` for a row that only
        fills the batch up. The first rows are the new images; `b` is the same at every step of a task.
        """
        return images

    def loss(self, z: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """The loss, a scalar, of features `[b, dim]` under a head; `labels` and `draws` are those `mixed` was given."""
        return F.cross_entropy(F.linear(z, weight, bias), labels, ignore_index=IGNORED)

    def finish(
        self, z: Tensor, y: Tensor, weight: Tensor, bias: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """The head to keep, given all features and labels of the task once the network is trained and frozen."""
        return weight, bias

    @classmethod
    def logits(cls, z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """What a trained head says of features, float64: an image's answer does not depend on the rest of the batch."""
        return F.linear(z.double(), weight.double(), bias.double())
