"""Scores that need the logits of the task's own classes alone."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from tpl.scores.base import Score


class LogitScore(Score):
    """A score with nothing to fit."""

    def fit_features(self, z: Tensor, logits: Tensor, y: Tensor, others: Tensor | None = None) -> Self:
        """Nothing to learn."""
        return self


class MaxLogit(LogitScore):
    """MLS: max_c f_c."""

    name = "mls"
    summary = "maximum logit"
    paper = "Hendrycks et al., Scaling Out-of-Distribution Detection for Real-World Settings, ICML 2022"

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """max_c f_c."""
        return logits.double().amax(dim=1)


class MaxSoftmax(LogitScore):
    """MSP: max_c softmax(f)_c (Hendrycks and Gimpel, 2016)."""

    name = "msp"
    summary = "maximum softmax probability"
    paper = "Hendrycks and Gimpel, A Baseline for Detecting Misclassified and Out-of-Distribution Examples, ICLR 2017"

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """max_c softmax(f)_c."""
        return logits.double().softmax(dim=1).amax(dim=1)


class Energy(LogitScore):
    """EBO: log sum_c exp f_c (Liu et al., 2020), at temperature 1."""

    name = "ebo"
    summary = "free energy of the logits"
    paper = "Liu et al., Energy-based Out-of-distribution Detection, NeurIPS 2020"

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """logsumexp_c f_c."""
        return torch.logsumexp(logits.double(), dim=1)
