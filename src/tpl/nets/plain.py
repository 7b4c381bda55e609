"""The plain ViT, with torch alone: timm and torchvision take as long to import as torch itself.

Parameters have timm's names and every operation is timm's, so weights and features are the same bit for bit
(`tests/nets/test_plain.py`). `ViTEncoder` runs a network of either kind. What it may ask a network for is what this
class has: timm's attributes of the same names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPSILON = 1e-6  # of layer norms


class Linear(nn.Linear):
    """torch's, which takes its time to draw random weights even where there is no memory for them."""

    def reset_parameters(self) -> None:
        """Draw random weights, unless stored ones will take their place."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Conv2d(nn.Conv2d):
    """torch's, which even imports a compiler to draw random weights where there is no memory for them."""

    def reset_parameters(self) -> None:
        """Draw random weights, unless stored ones will take their place."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = Linear(dim, 3 * dim)
        self.proj = Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Attention of all tokens `[n, tokens, dim]` to all tokens."""
        count, tokens, _ = x.shape
        query, key, value = self.qkv(x).view(count, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        out: Tensor = self.proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape))
        return out


class Mlp(nn.Module):
    """Two linear layers with a GELU in between."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """The same for every token."""
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class Block(nn.Module):
    """A pre-norm transformer block without layer scale."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        # In timm's order: stored models hold all weights of a trunk as one tensor.
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(dim, eps=EPSILON), Attention(dim, heads), nn.Identity()
        self.norm2, self.mlp, self.ls2 = nn.LayerNorm(dim, eps=EPSILON), Mlp(dim, 4 * dim), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Tokens `[n, tokens, dim]` of the next block."""
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class Convolution(nn.Module):
    """A 3 x 3 convolution, with batch norm and GELU unless it is the `last`."""

    def __init__(self, channels: int, out: int, stride: int, last: bool) -> None:
        super().__init__()
        self.conv = Conv2d(channels, out, 3, stride, padding=1, bias=last)
        self.bn = nn.Identity() if last else nn.BatchNorm2d(out)
        self.act = nn.Identity() if last else nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """The next feature map."""
        out: Tensor = self.act(self.bn(self.conv(x)))
        return out


class ConvStem(nn.Module):
    """Convolutions whose last feature map is the sequence of tokens."""

    def __init__(self, channels: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        layers = list(zip((3, *channels), channels, strides, strict=False))
        self.backbone = nn.Sequential(*(Convolution(*layer, last=layer is layers[-1]) for layer in layers))

    def forward(self, images: Tensor) -> Tensor:
        """Tokens `[n, patches, dim]` of normalised images."""
        tokens: Tensor = self.backbone(images).flatten(2).transpose(1, 2)
        return tokens


class PatchEmbed(nn.Module):
    """Square patches side by side, each a token: a linear map of its pixels, written as a convolution."""

    flatten = True

    def __init__(self, size: int, patch: int, dim: int) -> None:
        super().__init__()
        self.img_size, self.patch_size, self.grid_size = (size,) * 2, (patch,) * 2, (size // patch,) * 2
        self.proj = Conv2d(3, dim, patch, patch)
        self.norm = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Tokens `[n, patches, dim]` of normalised images."""
        tokens: Tensor = self.norm(self.proj(images).flatten(2).transpose(1, 2))
        return tokens


class PlainViT(nn.Module):
    """A ViT with a class token, learned positions and no classifier; `embed` turns images into tokens."""

    attn_pool = None
    global_pool = "token"

    def __init__(self, embed: nn.Module, patches: int, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed_dim = dim
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, patches + 1, dim))
        self.patch_embed = embed
        self.patch_drop, self.norm_pre, self.fc_norm = nn.Identity(), nn.Identity(), nn.Identity()
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim, eps=EPSILON)

    def _pos_embed(self, x: Tensor) -> Tensor:
        return torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed

    def pool(self, x: Tensor) -> Tensor:
        """The class token."""
        return x[:, 0]

    def forward_features(self, images: Tensor) -> Tensor:
        """All tokens of normalised images, behind the last norm."""
        tokens: Tensor = self.norm(self.blocks(self._pos_embed(self.patch_embed(images))))
        return tokens

    def forward_head(self, tokens: Tensor, pre_logits: bool = True) -> Tensor:
        """Features `[n, dim]`; there are no logits."""
        return self.pool(tokens)

    def forward(self, images: Tensor) -> Tensor:
        """Features `[n, dim]` of normalised images."""
        return self.forward_head(self.forward_features(images))


def of_timm(name: str) -> tuple[Any, ...]:
    """timm's class of that name in a ViT; none while timm is not imported, since no network of it can exist then."""
    module = sys.modules.get("timm.models.vision_transformer")
    return () if module is None else (getattr(module, name),)
