"""Outlier exposure: images of other tasks are to get the uniform distribution."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.engine import IGNORED
from tpl.methods.bank.techniques.base import Technique
from tpl.methods.bank.techniques.shared import mean_over, to_uniform

WEIGHT = 0.5  # of the outliers' term


class OE(Technique):
    """Cross-entropy on the new images, cross-entropy to the uniform distribution on images of earlier tasks."""

    name = "oe"
    summary = "images of earlier tasks are to get the uniform distribution"
    paper = "Hendrycks et al., Deep Anomaly Detection with Outlier Exposure, ICLR 2019"
    outliers = True
    makes_do = True

    def loss(self, z: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """CE on the new images + weight * (logsumexp f - mean f) on the others, if there are any."""
        logits, outlying = F.linear(z, weight, bias), labels == self.own
        entropy = F.cross_entropy(logits, torch.where(outlying, IGNORED, labels), ignore_index=IGNORED)
        return entropy + WEIGHT * mean_over(to_uniform(logits), outlying)
