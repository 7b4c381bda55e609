"""LogitNorm: cross-entropy on the logits' direction alone, so that confidence does not grow with their length."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.engine import IGNORED
from tpl.methods.bank.techniques.base import Technique

TEMPERATURE = 0.04
TINY = 1e-7  # added to a length before it divides


class LogitNorm(Technique):
    """Cross-entropy over logits of length 1 / temperature."""

    name = "logitnorm"
    summary = "cross-entropy over logits of one length"
    paper = "Wei et al., Mitigating Neural Network Overconfidence with Logit Normalization, ICML 2022"

    def loss(self, z: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """temperature * CE(f / (||f|| + 1e-7) / temperature).

        The factor in front, which the paper leaves to the learning rate, keeps the gradient as large as that of plain
        cross-entropy: at 1 / temperature = 25 times its size, a rate chosen for that would not train at all.
        """
        logits = F.linear(z, weight, bias)
        length = torch.linalg.vector_norm(logits, dim=1, keepdim=True) + TINY
        return TEMPERATURE * F.cross_entropy(logits / length / TEMPERATURE, labels, ignore_index=IGNORED)
