"""ViM: free energy of the logits against a virtual logit made of the residual."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from tpl.scores.ratio import positive_mean
from tpl.scores.residual import Residual

SMALLEST = 1e-6  # of the features' mean length: a smaller mean residual counts as this one


class VirtualLogit(Residual):
    """S(x) = log sum_c exp f_c - alpha || (z - u) N ||, alpha = mean max_c f_c / mean residual on the training data.

    Where the largest logits are negative on average, their mean magnitude is taken: a negative alpha would reward the
    residual. Fewer training samples than `dim` leave no residual; alpha is bounded then.
    """

    name = "vim"
    summary = "free energy less a virtual logit from the residual"
    paper = "Wang et al., ViM, CVPR 2022"

    alpha_: Tensor

    def fit_features(self, z: Tensor, logits: Tensor, y: Tensor, others: Tensor | None = None) -> Self:
        """u, N and alpha."""
        super().fit_features(z, logits, y, others)
        length = torch.linalg.vector_norm(z.double() - self.origin_, dim=1).mean()
        residual = self.residuals(z).mean().maximum(SMALLEST * length).clamp_min(1e-12)
        self.alpha_ = positive_mean(logits.double().amax(dim=1)) / residual
        return self

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """logsumexp_c f_c - alpha || (z - u) N ||."""
        return torch.logsumexp(logits.double(), dim=1) - self.alpha_ * self.residuals(z)
