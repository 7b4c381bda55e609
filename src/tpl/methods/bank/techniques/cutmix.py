"""CutMix: a box of another image is pasted into each; labels are mixed by area."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.methods.bank.techniques.base import Technique
from tpl.methods.bank.techniques.shared import box, mixed_entropy, partners


class CutMix(Technique):
    """One box a step; its share of the image is drawn from Beta(1, 1), which is uniform."""

    name = "cutmix"
    summary = "a box of another image pasted in, labels mixed by area"
    paper = (
        "Yun et al., CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features, ICCV 2019"
    )
    splits = False

    size = (0, 0)  # of the images that were mixed last: `loss` is not shown them

    @property
    def numbers(self) -> int:
        """The box's share and centre, and the order in which images become partners."""
        return 3 + self.batch

    def box(self, draws: Tensor) -> Tensor:
        """Where a step's images show their partners, `[h, w]`."""
        return box(self.size, draws[:1], draws[1:3])

    def mixed(self, images: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """Every image with the box of its partner."""
        self.size = (images.shape[2], images.shape[3])
        return torch.where(self.box(draws), images[partners(labels, draws[3:])], images)

    def loss(self, z: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """Cross-entropy to the labels, mixed by the area that was pasted."""
        logits, others = F.linear(z, weight, bias), labels[partners(labels, draws[3:])]
        return mixed_entropy(logits, labels, others, 1 - self.box(draws).float().mean())
