"""MC dropout: features are dropped in training and in answering; the answer is the mean of several passes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.methods.bank.techniques.base import Technique

DROPPED = 0.5  # the share of features that is dropped
PASSES = 5
SEED = 5  # of the masks that answers are given under


class MCDropout(Technique):
    """Dropout on the features; every image is answered under the same few masks."""

    name = "mcdropout"
    summary = "dropout on the features, also when answering: the mean of five passes"
    paper = (
        "Gal and Ghahramani, Dropout as a Bayesian Approximation: Representing Model Uncertainty in Deep Learning, "
        "ICML 2016"
    )
    splits = False

    @property
    def numbers(self) -> int:
        """One for every feature of every image."""
        return self.batch * self.dim

    def loss(self, z: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """Cross-entropy of what is left of the features."""
        kept = draws[: z.numel()].view_as(z) >= DROPPED
        return super().loss(z * kept / (1 - DROPPED), weight, bias, labels, draws)

    @classmethod
    def logits(cls, z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The logarithm of the mean softmax over the passes."""
        masks = dropout_masks(z.shape[1]).to(z.device)
        heads = (masks.unsqueeze(1) * weight.double()).flatten(0, 1)  # a mask on the head does what it does on z
        passes = F.linear(z.double(), heads, bias.double().repeat(PASSES)).view(len(z), PASSES, len(weight))
        return passes.log_softmax(dim=2).logsumexp(dim=1) - math.log(PASSES)


def dropout_masks(dim: int) -> Tensor:
    """The masks `[passes, dim]` that every answer is given under, float64: 0, or what makes up for the zeros."""
    draws = torch.rand(PASSES, dim, generator=torch.Generator().manual_seed(SEED))
    return (draws >= DROPPED).double() / (1 - DROPPED)
