"""Adam, for what plain SGD hardly moves: prompts, whose gradients are tiny beside those of a head."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tpl.engine.optim import GatedSGD

EPSILON = 1e-8


class Adam(GatedSGD):
    """Adam as torch defines it, with the gates and the changing rate of `GatedSGD`; its counters are on the device."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, lr, betas[0], weight_decay)
        self.second = betas[1]

    def _momentum(self, p: Tensor, update: Tensor, momentum: float, nesterov: bool) -> Tensor:
        state = self.state[p]
        if not state:
            state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
            state["steps"] = torch.zeros((), device=p.device)
        state["steps"].add_(1)
        state["mean"].mul_(momentum).add_(update, alpha=1 - momentum)
        state["square"].mul_(self.second).addcmul_(update, update, value=1 - self.second)
        mean = state["mean"] / (1 - momentum ** state["steps"])
        square = state["square"] / (1 - self.second ** state["steps"])
        direction: Tensor = mean / (square.sqrt() + EPSILON)
        return direction
