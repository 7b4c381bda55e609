"""A linear head with a row for every class: it grows as classes arrive."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def new_rows(outputs: int, dim: int, generator: torch.Generator) -> Tensor:
    """Weights that are not trained yet, drawn as torch's own linear layer has them."""
    return torch.empty(outputs, dim).uniform_(-(dim**-0.5), dim**-0.5, generator=generator)


class GrowingHead(nn.Module):
    """What a network with such a head inherits; `new_head` begins it, with no class yet."""

    head_weight: nn.Parameter
    head_bias: nn.Parameter

    def new_head(self, dim: int) -> None:
        """A head over features of so many numbers."""
        self.head_weight, self.head_bias = nn.Parameter(torch.zeros(0, dim)), nn.Parameter(torch.zeros(0))

    def grow(self, outputs: int, generator: torch.Generator) -> None:
        """Add rows for new classes; old rows and biases stay as they are."""
        rows = new_rows(outputs, self.head_weight.shape[1], generator)
        self.head_weight = nn.Parameter(torch.cat([self.head_weight.detach(), rows.to(self.head_weight)]))
        self.head_bias = nn.Parameter(torch.cat([self.head_bias.detach(), self.head_bias.new_zeros(outputs)]))

    def drop(self, row: int) -> None:
        """Remove one class's row."""
        kept = torch.arange(len(self.head_bias), device=self.head_bias.device) != row
        self.head_weight = nn.Parameter(self.head_weight.detach()[kept])
        self.head_bias = nn.Parameter(self.head_bias.detach()[kept])
