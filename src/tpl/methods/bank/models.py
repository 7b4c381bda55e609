"""The task models of a network: what each owns, and the weights it sees."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tpl.engine import QUARTERS, Compute
from tpl.methods.bank.protect import PROTECTIONS, ProtectConfig
from tpl.methods.bank.techniques import Technique
from tpl.nets import Encoder, Trainable, Weights


class TaskModel(nn.Module):
    """What one task owns; `embedding` is what the protection keeps of it."""

    turned_classes = False  # whether the last outputs stand for the classes, turned by one, two, three quarters

    def __init__(self, own: int, embedding: Tensor, norms: Tensor, head_weight: Tensor, head_bias: Tensor) -> None:
        super().__init__()
        self.embedding = nn.Parameter(embedding, requires_grad=embedding.is_floating_point())
        self.norms = nn.Parameter(norms)
        self.head_weight = nn.Parameter(head_weight)
        self.head_bias = nn.Parameter(head_bias)
        self.own = own  # the first `own` outputs are the task's classes, what follows stands for others

    def own_head(self, quarters: int = 0) -> tuple[Tensor, Tensor]:
        """Weights and biases of the task's own classes, or of these turned by so many quarters."""
        first = self._first_output(quarters)
        rows = slice(first, first + self.own)
        return self.head_weight[rows].detach(), self.head_bias[rows].detach()

    def upright_head(self) -> tuple[Tensor, Tensor]:
        """The same of the task's own classes and of others, without those for turned images."""
        count = self._first_output(QUARTERS[0]) if self.turned_classes else len(self.head_bias)
        return self.head_weight[:count].detach(), self.head_bias[:count].detach()

    def _first_output(self, quarters: int) -> int:
        return len(self.head_bias) - (1 + len(QUARTERS) - quarters) * self.own if quarters else 0

    def drop(self, row: int) -> None:
        """Remove one output of the head; one of the task's classes goes with its turned ones."""
        rows = [row]
        if self.turned_classes and row < self.own:
            rows += [self._first_output(quarters) + row for quarters in QUARTERS]
        kept = torch.ones(len(self.head_bias), dtype=torch.bool, device=self.head_bias.device)
        kept[rows] = False
        self.own -= row < self.own
        for name in ("head_weight", "head_bias"):
            setattr(self, name, nn.Parameter(getattr(self, name).detach()[kept], requires_grad=False))


class TaskModels:
    """One encoder, shared weights in it, a protection that keeps tasks apart, and the finished tasks."""

    def __init__(
        self,
        encoder: Encoder,
        config: ProtectConfig,
        compute: Compute,
        normalise: Callable[[Tensor], Tensor],
        generator: torch.Generator,
        technique: type[Technique] = Technique,
    ) -> None:
        self.encoder, self.config, self.compute, self.normalise = encoder, config, compute, normalise
        self.technique = technique  # how heads are trained and read
        self.protection = PROTECTIONS[config.protect](config)
        self.adapters: Trainable = encoder.new_adapters(config.latent, generator).to(compute.device)
        self.protection.prepare(self.adapters)
        self.tasks: list[TaskModel] = []

    def weights(self, task: int) -> Weights:
        """The shared weights as a finished task sees them."""
        return self.protection.finished(self.adapters.weights, self.tasks[task].embedding.detach())

    def unit_mask(self, task: int) -> Tensor | None:
        """How far each unit is open for a finished task, if masks are over units."""
        return self.protection.claim(self.tasks[task].embedding.detach())
