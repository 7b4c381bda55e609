"""ReAct: free energy of the logits after clipping large activations."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from tpl.scores.head import HeadScore


class ReAct(HeadScore):
    """S(x) = log sum_c exp (W min(z, t) + b)_c, t the 90th percentile of all activations in the task's training data.

    Only the top is clipped, though features of a transformer may be negative.
    """

    name = "react"
    summary = "free energy with large activations clipped"
    paper = "Sun et al., ReAct, NeurIPS 2021"

    threshold_: Tensor

    def __init__(self, percentile: float = 90.0) -> None:
        self.percentile = percentile

    def fit_features(self, z: Tensor, logits: Tensor, y: Tensor, others: Tensor | None = None) -> Self:
        """The percentile over all samples and dimensions."""
        self.threshold_ = percentile(z, self.percentile)
        return self

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """logsumexp_c of the clipped features' logits."""
        return torch.logsumexp(z.double().minimum(self.threshold_) @ self.weight.T + self.bias, dim=1)


def percentile(values: Tensor, percent: float) -> Tensor:
    """With linear interpolation, of any number of values (`torch.quantile` takes no more than 16 million)."""
    ordered = values.flatten().sort().values
    place = percent / 100 * (len(ordered) - 1)
    below = int(place)
    low, high = ordered[below].double(), ordered[min(below + 1, len(ordered) - 1)].double()
    return torch.lerp(low, high, place - below)
