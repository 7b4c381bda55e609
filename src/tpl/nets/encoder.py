"""The encoder: a frozen timm ViT, driven block by block so that a task can act inside it.

timm's own patch embedding, attention, MLP, layer scale and pooling run as they are. What a task may
bring along is passed in: its layer norms, the adapters behind both branches of every block, and the
masks that open and close the adapters' units. With closed masks and the pre-trained norms the
result equals timm's own forward pass bit for bit.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from tpl.errors import TplError
from tpl.nets.adapters import Adapters, adapt


class Encoder(nn.Module):
    """A frozen trunk that turns normalised images into features."""

    def __init__(
        self,
        vit: VisionTransformer,
        name: str,
        sha256: str,
        data_config: dict[str, Any],
        weights: Path | None = None,
    ) -> None:
        super().__init__()
        _check_supported(vit, name)
        self.vit = vit
        self.name, self.sha256, self.weights = name, sha256, weights
        self.data_config = data_config  # timm's: input size, mean, std, crop, interpolation
        self.dim = int(vit.embed_dim)
        self.adapters_needed = 2 * len(vit.blocks)
        self.fingerprint = hash_tensors(vit.state_dict())  # the same however the weights came
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """The trunk is frozen: it stays in evaluation mode whatever the rest does."""
        return super().train(False)

    def new_adapters(self, latent: int, generator: torch.Generator | None = None) -> Adapters:
        """Fresh adapters that fit this trunk: two a block, behind attention and behind the MLP."""
        return Adapters(self.adapters_needed, self.dim, latent, generator)

    def new_norms(self) -> Tensor:
        """A copy of the pre-trained layer norms, `[norms, 2, dim]` (scale, shift): a task's own."""
        return torch.stack([torch.stack([n.weight, n.bias]) for n in self._norms()]).detach().clone()

    def plain(self, images: Tensor) -> Tensor:
        """Features of the trunk alone, by timm's own forward pass."""
        features: Tensor = self.vit.forward_head(self.vit.forward_features(images), pre_logits=True)
        return features

    def forward(
        self,
        images: Tensor,
        norms: Tensor,
        adapters: Adapters | None = None,
        masks: Tensor | None = None,
    ) -> Tensor:
        """Features `[n, dim]` of normalised images as one task sees them.

        `norms` is `[norms, 2, dim]` and `masks` `[units]`; both may have a leading axis of one entry
        per image, so that images for different tasks can share a batch.
        """
        vit = self.vit
        norm = _NormSequence(norms, [n.eps for n in self._norms()])
        weights = adapters.layers() if adapters is not None else []
        opened: list[Any] = [None] * len(weights)
        if adapters is not None and masks is not None:
            opened = list(adapters.split_masks(masks))

        def bypass(index: int, x: Tensor) -> Tensor:
            return adapt(x, weights[index], opened[index]) if weights else x

        x = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))
        for i, block in enumerate(vit.blocks):
            x = x + bypass(2 * i, block.ls1(block.attn(norm(x))))
            x = x + bypass(2 * i + 1, block.ls2(block.mlp(norm(x))))
        x = norm(x) if isinstance(vit.norm, nn.LayerNorm) else vit.norm(x)
        x = vit.pool(x)
        return norm(x) if isinstance(vit.fc_norm, nn.LayerNorm) else vit.fc_norm(x)

    def _norms(self) -> list[nn.LayerNorm]:
        inner = [n for block in self.vit.blocks for n in (block.norm1, block.norm2)]
        return inner + [n for n in (self.vit.norm, self.vit.fc_norm) if isinstance(n, nn.LayerNorm)]


class _NormSequence:
    """Layer norms handed out one after the other, as the forward pass meets them."""

    def __init__(self, norms: Tensor, eps: list[float]) -> None:
        self.per_image = norms.dim() == 4
        self.entries = iter(zip(norms.unbind(1 if self.per_image else 0), eps, strict=True))

    def __call__(self, x: Tensor) -> Tensor:
        affine, eps = next(self.entries)
        if not self.per_image:
            return F.layer_norm(x, x.shape[-1:], affine[0], affine[1], eps)
        scale, shift = affine.unbind(1)
        if x.dim() == 3:
            scale, shift = scale.unsqueeze(1), shift.unsqueeze(1)
        return F.layer_norm(x, x.shape[-1:], None, None, eps) * scale + shift


def hash_tensors(state: dict[str, Tensor]) -> str:
    """sha256 over names, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _check_supported(vit: VisionTransformer, name: str) -> None:
    """Adapters need timm's standard pre-norm block; say so before anything is trained."""
    for block in vit.blocks:
        standard = isinstance(block, Block) and all(
            isinstance(n, nn.LayerNorm) and n.elementwise_affine for n in (block.norm1, block.norm2)
        )
        if not standard:
            raise TplError(f"'{name}' has {type(block).__name__} blocks; adapters need timm's pre-norm ViT block.")
    if type(vit).forward_head is not VisionTransformer.forward_head:
        raise TplError(f"'{name}' has a head of its own kind ({type(vit).__name__}); choose a plain ViT or DeiT.")
    if vit.attn_pool is not None:
        raise TplError(f"'{name}' pools by attention, which no task can adapt; choose a ViT with a class token.")
