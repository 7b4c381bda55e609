"""SGD and Adam whose final update is gated, weight by weight.

HAT protects old tasks by stopping the weights they use. Gating the raw gradient would not do:
momentum and weight decay would still move a protected weight. Here the gate multiplies the finished
update, so a weight with gate 0 keeps its exact bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

EPSILON = 1e-8  # of Adam


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
        # Where a parameter may move, and how far; None: freely, wherever it may move at all.
        self.gates: dict[Tensor, tuple[Tensor, Tensor | None]] = {}
        self._factor: Tensor | None = None  # on the device, where a captured step reads it

    def gate(self, parameter: Tensor, gate: Tensor) -> None:
        """Let `parameter` move by `gate` (1 = freely, 0 = not at all) times its update."""
        binary = bool(((gate == 0) | (gate == 1)).all())
        self.gates[parameter] = gate > 0, None if binary else gate

    def scale_rate(self, factor: float) -> None:
        """Go on at `factor` times the learning rate. Call it before a step is captured, and before any step after."""
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
                    opened, share = gate
                    # Not a plain product: zero times an overflow would be NaN in a protected weight.
                    update = torch.where(opened, update if share is None else update * share, 0)
                self._move(p, update, group["lr"])

    def _move(self, p: Tensor, update: Tensor, lr: float) -> None:
        if self._factor is None:
            p.sub_(update, alpha=lr)
        elif p.is_cuda:  # one pass over millions of weights instead of two; on a CPU its rounding differs
            p.addcmul_(update, self._factor, value=-lr)
        else:
            p.sub_(update * self._factor, alpha=lr)

    def _momentum(self, p: Tensor, update: Tensor, momentum: float, nesterov: bool) -> Tensor:
        buffer = self.state[p].get("momentum")
        if buffer is None:
            buffer = self.state[p]["momentum"] = update.clone()
        elif p.is_cuda:  # as above
            torch.add(update, buffer, alpha=momentum, out=buffer)
        else:
            buffer.mul_(momentum).add_(update)
        return update.add(buffer, alpha=momentum) if nesterov else buffer


class Adam(GatedSGD):
    """Adam as torch defines it, with the gates and the changing rate of `GatedSGD`; its counters are on the device.

    For parameters that plain SGD hardly moves: prompts, whose gradients are tiny beside those of a head.
    """

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
