"""A small masked network over feature vectors: what `Encoder` is for images.

The vectors themselves, with frozen random units beside them if wanted, take the place of the pre-trained trunk;
adapters, masks and a task's own norms act on them as inside a ViT. Only the norm differs: a layer norm would leave
nothing of vectors with one or two entries, and the length of a vector may matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.nets.blocks import Adapters, AdapterStack, adapt
from tpl.nets.vit import hash_tensors


class VectorEncoder(nn.Module):
    """Turns standardised vectors `[n, features]` into a task's features `[n, dim]`.

    `width` random units, frozen, are put beside the vectors; 0 leaves the vectors alone. `depth` adapters follow, each
    behind a norm with a task's own scale and shift, and a last such norm.
    """

    pretrained: ClassVar[bool] = True  # the random units take the trunk's place
    batch_norms: ClassVar[bool] = False

    mix_weight: Tensor
    mix_bias: Tensor

    def __init__(self, features: int, width: int, depth: int, generator: torch.Generator) -> None:
        super().__init__()
        self.dim, self.depth = features + width, depth
        self.register_buffer("mix_weight", torch.randn(width, features, generator=generator) * features**-0.5)
        self.register_buffer("mix_bias", torch.rand(width, generator=generator) * 2 - 1)
        self.fingerprint = hash_tensors(self.state_dict())

    def new_adapters(self, latent: int, generator: torch.Generator | None = None) -> Adapters:
        """Fresh adapters; larger weights than inside a ViT, whose own blocks carry most of the signal there."""
        adapters = Adapters(self.depth, self.dim, latent, generator)
        nn.init.normal_(adapters.down_weight, std=(2 / self.dim) ** 0.5, generator=generator)
        nn.init.normal_(adapters.up_weight, std=0.5 * latent**-0.5, generator=generator)
        return adapters

    def new_norms(self) -> Tensor:
        """A task's scales (1) and shifts (0): one pair for every adapter and one at the end, `[depth + 1, 2, dim]`."""
        return torch.stack([torch.ones(self.depth + 1, self.dim), torch.zeros(self.depth + 1, self.dim)], dim=1)

    def forward(
        self,
        vectors: Tensor,
        norms: Tensor,
        adapters: Iterable[Tensor],
        dtype: torch.dtype = torch.float32,
        learning: bool = False,
    ) -> Tensor:
        """Features of one task, whose mask is folded into the adapters' weights, in the precision of the inputs."""
        x = vectors
        if len(self.mix_weight):
            x = torch.cat([x, F.relu(F.linear(x, self.mix_weight.to(x), self.mix_bias.to(x)))], dim=1)
        *inner, last = norms.unbind(0)
        for affine, layer in zip(inner, AdapterStack(*adapters).layers(), strict=True):
            x = adapt(soft_norm(x, affine), layer)
        return soft_norm(x, last)


def soft_norm(x: Tensor, affine: Tensor) -> Tensor:
    """x * sqrt(2 / (1 + mean x^2)), scaled and shifted: bounds long vectors, and still tells every two apart.

    A vector whose mean square is 1, as standardised ones have on average, keeps its length.
    """
    return x * (2 / (1 + x.square().mean(dim=1, keepdim=True))).sqrt() * affine[0] + affine[1]
