"""Mixup: the network sees weighted means of two images and is asked for the same mean of their labels."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import betaincinv
from torch import Tensor

from tpl.methods.bank.techniques.base import Technique
from tpl.methods.bank.techniques.shared import mixed_entropy, partners

ALPHA = 0.2  # a step's weight is drawn from Beta(alpha, alpha)
QUANTILES = 4096  # of that distribution, in a table: its inverse has no closed form


class Mixup(Technique):
    """One weight a step; every image is mixed with another of the batch."""

    name = "mixup"
    summary = "weighted means of two images and of their labels"
    paper = "Zhang et al., mixup: Beyond Empirical Risk Minimization, ICLR 2018"
    splits = False

    def __init__(self, own: int, dim: int, batch: int, device: torch.device) -> None:
        super().__init__(own, dim, batch, device)
        table = betaincinv(ALPHA, ALPHA, (np.arange(QUANTILES) + 0.5) / QUANTILES)
        self.quantiles = torch.from_numpy(table).to(device, torch.float32)

    @property
    def numbers(self) -> int:
        """The weight, and the order in which images become partners."""
        return 1 + self.batch

    def weight_of(self, draws: Tensor) -> Tensor:
        """The weight `[1]` of an image against its partner's."""
        return self.quantiles[(draws[:1] * QUANTILES).long()]

    def mixed(self, images: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """lambda x + (1 - lambda) x'."""
        others = images[partners(labels, draws[1:])]
        return torch.lerp(others.float(), images.float(), self.weight_of(draws)).to(images.dtype)

    def loss(self, z: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """Cross-entropy to the mixed labels."""
        logits, others = F.linear(z, weight, bias), labels[partners(labels, draws[1:])]
        return mixed_entropy(logits, labels, others, self.weight_of(draws))
