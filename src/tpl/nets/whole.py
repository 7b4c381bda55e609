"""A ViT whose own weights are trained: the trunk of `ViTEncoder` as one more `Trainable`, without adapters.

All weights but those of the layer norms are one flat tensor: one step of the optimiser, one file entry. They begin as
the pre-trained ones. The forward pass is timm's, with the given weights in the place of the network's own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tpl.errors import TplError
from tpl.nets.base import Encoder, Trainable
from tpl.nets.vit import ViTEncoder, embed_patches

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer


class TrunkWeights(NamedTuple):
    """The weights of a whole trunk; there are no masks over them."""

    flat: Tensor

    def fold(self, masks: Tensor) -> TrunkWeights:
        """Not supported."""
        raise TplError("The weights of a whole trunk cannot be masked; use adapters.")

    def gates(self, used: Tensor) -> TrunkWeights:
        """Not supported."""
        raise TplError("The weights of a whole trunk cannot be protected by masks; use adapters.")


class Trunk(Trainable):
    """A trainable copy of pre-trained weights."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.cat([weight.detach().flatten() for weight in weights]))

    @property
    def units(self) -> int:
        """No unit can be masked."""
        return 0

    @property
    def weights(self) -> TrunkWeights:
        """The parameters."""
        return TrunkWeights(self.flat)

    def stack(self, *tensors: Tensor) -> TrunkWeights:
        """Other tensors in the place of the parameters."""
        return TrunkWeights(*tensors)


class Blocks(nn.Module):
    """A timm ViT from images to the output of the last block."""

    def __init__(self, vit: VisionTransformer) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images: Tensor) -> Tensor:
        """Tokens `[n, tokens, dim]`, before the last norm."""
        vit = self.vit
        tokens: Tensor = vit.blocks(vit.norm_pre(vit.patch_drop(vit._pos_embed(embed_patches(vit, images)))))
        return tokens


class WholeViT(Encoder):
    """A pre-trained ViT all of whose weights may be trained; layer norms are passed in apart from the others."""

    def __init__(self, encoder: ViTEncoder) -> None:
        super().__init__()
        # In a list: the pre-trained trunk is where training begins, and no part of what a model needs.
        self.origin = [encoder]
        self.name, self.sha256, self.fingerprint = encoder.name, encoder.sha256, encoder.fingerprint
        self.weights, self.data_config, self.dim = encoder.weights, encoder.data_config, encoder.dim
        self._by_dtype: dict[torch.dtype, Blocks] = {}  # the network's structure, and buffers in each precision
        norms = {id(p) for norm in encoder.norm_layers() for p in norm.parameters()}
        named = dict(encoder.vit.named_parameters())
        self.shapes = {name: p.shape for name, p in named.items() if id(p) not in norms}
        owners = {id(module): name for name, module in encoder.vit.named_modules()}
        self.norm_names = [owners[id(norm)] for norm in encoder.norm_layers()]

    def new_adapters(self, latent: int, generator: torch.Generator | None = None, below: int = 0) -> Trunk:
        """A copy of the pre-trained weights; there are no adapters, whose width and random numbers are given."""
        named = dict(self.origin[0].vit.named_parameters())
        return Trunk(named[name] for name in self.shapes)

    def new_norms(self, below: int = 0) -> Tensor:
        """A copy of the pre-trained layer norms, `[norms, 2, dim]`."""
        return self.origin[0].new_norms()

    def plain(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Features of the pre-trained trunk."""
        return self.origin[0].plain(images, dtype)

    def forward(
        self,
        images: Tensor,
        norms: Tensor,
        weights: Iterable[Tensor],
        dtype: torch.dtype = torch.float32,
        learning: bool = False,
    ) -> Tensor:
        """Features `[n, dim]`, float32, of normalised images; products in `dtype`, the last norm in float32."""
        (flat,) = weights
        parts = flat.to(dtype).split([math.prod(shape) for shape in self.shapes.values()])
        named = {f"vit.{n}": part.view(shape) for (n, shape), part in zip(self.shapes.items(), parts, strict=True)}
        for name, affine in zip(self.norm_names, norms.to(dtype).unbind(0), strict=True):
            named |= {f"vit.{name}.weight": affine[0], f"vit.{name}.bias": affine[1]}
        tokens: Tensor = functional_call(self._blocks(dtype), named, images.to(dtype))
        return self.origin[0].pooled(tokens, norms)

    def _blocks(self, dtype: torch.dtype) -> Blocks:
        """A copy of the network of this method's own: its weights are exchanged during a forward pass."""
        if dtype not in self._by_dtype:
            self._by_dtype[dtype] = Blocks(copy.deepcopy(self.origin[0].vit).to(dtype)).eval()
        return self._by_dtype[dtype]
