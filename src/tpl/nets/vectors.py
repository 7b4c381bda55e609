"""A small masked network over feature vectors.

The vectors, optionally with frozen random features added, replace the pre-trained trunk; adapters, masks and a task's
own norms act on them as inside a ViT. Only the norm differs: a layer norm would lose all information in vectors with
one or two entries, and the length of a vector may matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.nets.base import Encoder
from tpl.nets.blocks import Adapters, AdapterStack, adapt
from tpl.nets.vit import hash_tensors


class VectorEncoder(Encoder):
    """Computes a task's features `[n, dim]` of standardised vectors `[n, features]`.

    Frozen random units relu(mix_weight x + mix_bias), if there are any, are appended to the vectors. `depth` adapters
    follow, each behind a norm with a task's own scale and shift, and a last such norm. In double precision, features
    depend on the rest of the batch by 1e-15 at most, where kernels for other sizes round differently.
    """

    exact: ClassVar[bool] = True

    mix_weight: Tensor
    mix_bias: Tensor

    def __init__(self, mix_weight: Tensor, mix_bias: Tensor, depth: int, data_config: Mapping[str, Any]) -> None:
        super().__init__()
        self.dim, self.depth, self.data_config = sum(mix_weight.shape), depth, dict(data_config)
        self.register_buffer("mix_weight", mix_weight)
        self.register_buffer("mix_bias", mix_bias)
        self.name, self.weights, self.fingerprint = "vectors", None, hash_tensors(self.state_dict())
        self.sha256 = self.fingerprint

    def new_adapters(self, latent: int, generator: torch.Generator | None = None, below: int = 0) -> Adapters:
        """Untrained adapters; with larger weights than in a ViT, where the frozen blocks carry most of the signal."""
        adapters = Adapters(self.depth, self.dim, latent, generator)
        nn.init.normal_(adapters.down_weight, std=(2 / self.dim) ** 0.5, generator=generator)
        nn.init.normal_(adapters.up_weight, std=0.5 * latent**-0.5, generator=generator)
        return adapters

    def new_norms(self, below: int = 0) -> Tensor:
        """A task's scales (1) and shifts (0): one pair for every adapter and one at the end, `[depth + 1, 2, dim]`."""
        return torch.stack([torch.ones(self.depth + 1, self.dim), torch.zeros(self.depth + 1, self.dim)], dim=1)

    def plain(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The vectors and the random units."""
        x = images.to(dtype)
        if not len(self.mix_weight):
            return x
        return torch.cat([x, F.relu(F.linear(x, self.mix_weight.to(x), self.mix_bias.to(x)))], dim=1)

    def forward(
        self,
        images: Tensor,
        norms: Tensor,
        adapters: Iterable[Tensor],
        dtype: torch.dtype = torch.float32,
        learning: bool = False,
    ) -> Tensor:
        """Features of one task, whose mask is folded into the adapters' weights."""
        x = self.plain(images, dtype)
        *inner, last = norms.to(dtype).unbind(0)
        for affine, layer in zip(inner, AdapterStack(*adapters).to(dtype).layers(), strict=True):
            x = adapt(soft_norm(x, affine), layer)
        return soft_norm(x, last)


def random_units(features: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Weights `[width, features]` and biases of random units."""
    weight = torch.randn(width, features, generator=generator) * features**-0.5
    return weight, torch.rand(width, generator=generator) * 2 - 1


def soft_norm(x: Tensor, affine: Tensor) -> Tensor:
    """x * sqrt(2 / (1 + mean x^2)), scaled and shifted: bounds long vectors, and no two become equal.

    A vector whose mean square is 1, as standardised ones have on average, keeps its length.
    """
    return x * (2 / (1 + x.square().mean(dim=1, keepdim=True))).sqrt() * affine[0] + affine[1]
