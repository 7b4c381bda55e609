"""SGD whose final update is gated, weight by weight.

HAT protects old tasks by stopping the weights they use. Gating the raw gradient would not do:
momentum and weight decay would still move a protected weight. Here the gate multiplies the finished
update, so a weight with gate 0 keeps its exact bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class GatedSGD(torch.optim.Optimizer):
    """SGD with momentum, weight decay and Nesterov as torch defines them, times a gate."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults)
        self.gates: dict[Tensor, tuple[Tensor, Tensor]] = {}  # the gate, and where it is not closed
        self._factor: Tensor | None = None  # on the device, where a recorded step reads it

    def gate(self, parameter: Tensor, gate: Tensor) -> None:
        """Let `parameter` move by `gate` (1 = freely, 0 = not at all) times its update."""
        self.gates[parameter] = gate, gate > 0

    def scale_rate(self, factor: float) -> None:
        """Go on at `factor` times the learning rate. Call it before a step is recorded, and before any step after."""
        if self._factor is None:
            self._factor = torch.ones((), device=self.param_groups[0]["params"][0].device)
        self._factor.fill_(factor)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad
                if group["weight_decay"]:
                    update = update.add(p, alpha=group["weight_decay"])
                if group["momentum"]:
                    update = self._momentum(p, update, group["momentum"], group["nesterov"])
                if (gate := self.gates.get(p)) is not None:
                    # Not a plain product: zero times an overflow would be NaN in a protected weight.
                    update = torch.where(gate[1], update * gate[0], 0)
                if self._factor is not None:
                    update = update * self._factor
                p.sub_(update, alpha=group["lr"])

    def _momentum(self, p: Tensor, update: Tensor, momentum: float, nesterov: bool) -> Tensor:
        buffer = self.state[p].get("momentum")
        if buffer is None:
            buffer = self.state[p]["momentum"] = update.clone()
        else:
            buffer.mul_(momentum).add_(update)
        return update.add(buffer, alpha=momentum) if nesterov else buffer
