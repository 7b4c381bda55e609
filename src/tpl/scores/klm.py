"""KL matching: distance from the prediction to the typical prediction of a class."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from tpl.scores.base import Score
from tpl.scores.statistics import class_means

SMALLEST = 1e-12  # a smaller probability counts as this one


class KLMatching(Score):
    """S(x) = -min_c KL(p || d_c), p = softmax(f), d_c the mean p of training samples predicted as class c.

    A class that is never predicted has all its probability on itself.
    """

    name = "klm"
    summary = "divergence from the nearest class's typical prediction"
    paper = "Hendrycks et al., Scaling out-of-distribution detection, ICML 2022"

    templates_: Tensor

    def fit_features(self, z: Tensor, logits: Tensor, y: Tensor, others: Tensor | None = None) -> Self:
        """A template d_c per class, `[c, c]`."""
        p = logits.double().softmax(dim=1)
        counts, means = class_means(p, p.argmax(dim=1), p.shape[1])
        certain = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)
        self.templates_ = torch.where(counts.unsqueeze(1) > 0, means, certain).clamp_min(SMALLEST)
        return self

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """-min_c sum_k p_k (log p_k - log d_ck)."""
        p = logits.double().softmax(dim=1).clamp_min(SMALLEST)
        divergence = (p * p.log()).sum(dim=1, keepdim=True) - p @ self.templates_.log().T
        return -divergence.amin(dim=1)
