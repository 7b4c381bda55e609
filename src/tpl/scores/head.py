"""Scores that look behind the logits, at the head that made them."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from tpl.scores.base import Score


class HeadScore(Score):
    """A score that knows the task's head, f = W z + b."""

    weight: Tensor
    bias: Tensor

    def use_head(self, weight: Tensor, bias: Tensor) -> Self:
        """Keep a float64 copy of W `[c, d]` and b `[c]`; no underscore, so no part of `state`."""
        self.weight = weight.detach().to(torch.float64, copy=True)
        self.bias = bias.detach().to(torch.float64, copy=True)
        return self
