"""The encoder: a frozen timm ViT, driven block by block so that a task can act inside it.

timm's own patch embedding, attention, MLP, layer scale and pooling run as they are. What a task may
bring along is passed in: its layer norms, the adapters behind both branches of every block, and the
masks that open and close the adapters' units. With closed masks and the pre-trained norms the
result equals timm's own forward pass bit for bit.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from timm.layers import Mlp, PatchEmbed
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import Tensor, nn

from tpl.errors import TplError
from tpl.nets.adapters import AdapterMasks, Adapters, AdapterStack, adapt, linear
from tpl.nets.base import Encoder

NOTHING = (None, None)  # neither adapters nor masks in a block
SHAPES = 64  # batch sizes, times whether gradients flow, that a process may compile the block for


def adapted_block(
    block: Block,
    x: Tensor,
    norms: Sequence[Tensor],
    adapters: Sequence[AdapterStack | None],
    masks: Sequence[AdapterMasks | None],
    adapt: Callable[[Tensor, AdapterStack, AdapterMasks | None], Tensor] = adapt,
) -> Tensor:
    """One transformer block with a task's two norms, and an adapter behind attention and behind the MLP."""
    y = block.ls1(block.attn(layer_norm(x, norms[0], block.norm1.eps)))
    x = x + (adapt(y, adapters[0], masks[0]) if adapters[0] is not None else y)
    y = block.ls2(block.mlp(layer_norm(x, norms[1], block.norm2.eps)))
    return x + (adapt(y, adapters[1], masks[1]) if adapters[1] is not None else y)


def is_standard(block: Block) -> bool:
    """Whether a block's two branches are what their names say, with nothing in between: no norm of queries, no gate."""
    attention, mlp = block.attn, block.mlp
    between = (attention, ("q_norm", "k_norm", "norm", "gate")), (mlp, ("norm",))
    empty = all(isinstance(getattr(of, name, None), nn.Identity | None) for of, names in between for name in names)
    linear = type(attention) is Attention and type(mlp) is Mlp and isinstance(mlp.fc1, nn.Linear)
    return linear and empty and attention.qkv.out_features == 3 * attention.qkv.in_features


def layer_norm(x: Tensor, affine: Tensor, eps: float) -> Tensor:
    """A layer norm with scale and shift `[2, dim]`, or `[networks, 2, dim]` for equal parts of the batch."""
    if affine.dim() == 2:
        return F.layer_norm(x, x.shape[-1:], affine[0], affine[1], eps)
    plain = F.layer_norm(x, x.shape[-1:], None, None, eps).reshape(len(affine), -1, x.shape[-1])
    return (plain * affine[:, :1] + affine[:, 1:]).reshape(x.shape)


class ViTEncoder(Encoder):
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
        self.through, self.fused = adapted_block, False
        self._copies: dict[
            tuple[torch.dtype, torch.device], VisionTransformer
        ] = {}  # in a dict: not part of this module's state
        self.fingerprint = hash_tensors(vit.state_dict())  # the same however the weights came
        self.requires_grad_(False)
        self.eval()

    def fuse(self) -> None:
        """Compile the block, once for all of them: fewer, larger kernels, for some ten seconds at every new batch size.

        (Compiling several blocks as one piece takes longer and gains one per cent.)
        """
        # Each number of networks, with and without replay, has shapes of its own. Beyond the limit torch would go on
        # uncompiled, at half the speed.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
        self.through, self.fused = torch.compile(adapted_block, dynamic=False), True

    def train(self, mode: bool = True) -> Self:
        """The trunk is frozen: it stays in evaluation mode whatever the rest does."""
        return super().train(False)

    def new_adapters(self, latent: int, generator: torch.Generator | None = None) -> Adapters:
        """Fresh adapters that fit this trunk: two a block, behind attention and behind the MLP."""
        return Adapters(self.adapters_needed, self.dim, latent, generator)

    def new_norms(self) -> Tensor:
        """A copy of the pre-trained layer norms, `[norms, 2, dim]` (scale, shift): a task's own."""
        return torch.stack([torch.stack([n.weight, n.bias]) for n in self._norms()]).detach().clone()

    def plain(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Features of the trunk alone, float32, by timm's own forward pass; in half precision but for the last norm."""
        if dtype == torch.float32:
            features: Tensor = self.vit.forward_head(self.vit.forward_features(images), pre_logits=True)
            return features
        # `forward` without adapters gives the same bits, but would have a block of its own compiled.
        return self.pooled(self.trunk(dtype).blocks(self.tokens(images, dtype)), self.new_norms())

    def trunk(self, dtype: torch.dtype) -> VisionTransformer:
        """The frozen network in one precision; a copy in another than its own is made once and kept."""
        if dtype == next(self.vit.parameters()).dtype:
            return self.vit
        key = dtype, next(self.vit.parameters()).device
        if key not in self._copies:
            self._copies[key] = copy.deepcopy(self.vit).to(dtype)
        return self._copies[key]

    def tokens(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """What goes into the first block: patches and class token of normalised images, at their positions."""
        vit = self.trunk(dtype)
        x: Tensor = vit.norm_pre(vit.patch_drop(vit._pos_embed(_embed_patches(vit, images.to(dtype)))))
        return x

    def forward(
        self,
        images: Tensor,
        norms: Tensor,
        adapters: Iterable[Tensor] | None = None,
        masks: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        learning: bool = False,
        notice: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Features `[n, dim]`, float32, of normalised images as one task sees them.

        `norms` is `[norms, 2, dim]`. With a leading axis, on the norms or on the adapters' weights, several networks
        share one pass over the frozen trunk: each serves an equal part of the batch, in order. `masks`, one row
        `[units]` an image, act on the activations; a mask that holds for the whole batch is folded into the weights.
        `dtype` is the precision of the trunk's products; the norms' statistics and the last norm are float32. `notice`
        is told what comes out of every block. `learning` makes no difference: a layer norm looks at one token alone.
        """
        return self.beyond(self.tokens(images, dtype), norms, adapters, masks, notice)

    def beyond(
        self,
        tokens: Tensor,
        norms: Tensor,
        adapters: Iterable[Tensor] | None = None,
        masks: Tensor | None = None,
        notice: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """`forward` from the `tokens` on, in their precision.

        The last block computes all tokens, even where the class token is all that counts: on a GPU, the kernels for so
        few rows were seen to round an image now this way, now that, and features must have the same bits every time.
        """
        x, dtype = tokens, tokens.dtype
        vit = self.trunk(dtype)
        affines = norms.to(dtype).unbind(-3)
        layers: Sequence[AdapterStack | None] = [None] * self.adapters_needed
        opened: Sequence[AdapterMasks | None] = [None] * self.adapters_needed
        if adapters is not None:
            stack = AdapterStack(*adapters).to(dtype)
            layers = stack.layers()
            if masks is not None:
                opened = _per_adapter(stack.split(masks.to(dtype)))
        for i, block in enumerate(vit.blocks):
            own = slice(2 * i, 2 * i + 2)
            x = self.through(block, x, affines[own], layers[own], opened[own])
            if notice is not None:
                notice(x)
        return self.pooled(x, norms)

    def pooled(self, x: Tensor, norms: Tensor) -> Tensor:
        """Features, float32, from what comes out of the last block: the class token alone will do where it counts."""
        vit = self.vit
        rest = list(norms.unbind(-3)[self.adapters_needed :])
        x = x.float()
        if vit.global_pool == "token":
            x = x[:, :1]  # a norm looks at one token alone: the others need none
        x = layer_norm(x, rest.pop(0), vit.norm.eps) if isinstance(vit.norm, nn.LayerNorm) else vit.norm(x)
        x = vit.pool(x)
        return layer_norm(x, rest.pop(0), vit.fc_norm.eps) if isinstance(vit.fc_norm, nn.LayerNorm) else vit.fc_norm(x)

    def _norms(self) -> list[nn.LayerNorm]:
        inner = [n for block in self.vit.blocks for n in (block.norm1, block.norm2)]
        return inner + [n for n in (self.vit.norm, self.vit.fc_norm) if isinstance(n, nn.LayerNorm)]


def _embed_patches(vit: VisionTransformer, images: Tensor) -> Tensor:
    """timm's patch embedding; in bf16 on a GPU as the matrix product it is, since cuDNN's kernel is slow there."""
    embed = vit.patch_embed
    as_product = images.is_cuda and images.dtype != torch.float32 and type(embed) is PatchEmbed and embed.flatten
    if not as_product or embed.proj.kernel_size != embed.proj.stride or images.shape[-2:] != embed.img_size:
        embedded: Tensor = embed(images)
        return embedded
    (height, width), (rows, columns) = embed.patch_size, embed.grid_size
    patches = images.unflatten(3, (columns, width)).unflatten(2, (rows, height)).permute(0, 2, 4, 1, 3, 5)
    tokens = F.linear(patches.reshape(len(images), rows * columns, -1), embed.proj.weight.flatten(1), embed.proj.bias)
    normed: Tensor = embed.norm(tokens)
    return normed


def _per_adapter(masks: AdapterMasks) -> list[AdapterMasks]:
    return [AdapterMasks(*pair) for pair in zip(masks.down.unbind(1), masks.up.unbind(1), strict=True)]


def as_vit(encoder: Encoder) -> ViTEncoder:
    """An encoder for a method that reaches into the blocks of a transformer."""
    if not isinstance(encoder, ViTEncoder):
        raise TplError(f"'{encoder.name}' is no transformer; choose a ViT or DeiT, or `compact`.")
    return encoder


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


def adapter_inputs(
    encoder: ViTEncoder, images: Tensor, norms: Tensor, adapters: AdapterStack, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Inputs of all adapters' layers, each image's mean over its tokens: `[n, count, dim]`, `[n, count, latent]`.

    For methods that protect weights by what they act on: the encoder's own pass, for one network without masks.
    """
    vit = encoder.trunk(dtype)
    affines, layers = norms.to(dtype).unbind(0), adapters.to(dtype).layers()
    outer, inner = [], []

    def noted(y: Tensor, adapter: AdapterStack, mask: AdapterMasks | None) -> Tensor:
        hidden = F.relu(linear(y, adapter.down_weight, adapter.down_bias))
        outer.append(y.float().mean(dim=1))
        inner.append(hidden.float().mean(dim=1))
        return y + linear(hidden, adapter.up_weight, adapter.up_bias)

    x = encoder.tokens(images, dtype)
    for i, block in enumerate(vit.blocks):
        own = slice(2 * i, 2 * i + 2)
        x = adapted_block(block, x, affines[own], layers[own], NOTHING, noted)
    return torch.stack(outer, dim=1), torch.stack(inner, dim=1)


def prompted(
    encoder: ViTEncoder, images: Tensor, norms: Tensor, prompts: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Features `[n, dim]`, float32, read off the prompts: the mean of what became of them.

    `prompts` are an image's own, `[n, tokens, dim]`; `norms` those of `new_norms`. Prompts carry no position: a
    trunk tells tokens apart by what is added to them alone, and prompts are learned anyway.
    """
    vit = encoder.trunk(dtype)
    affines = norms.to(dtype).unbind(0)
    x = torch.cat([prompts.to(dtype), encoder.tokens(images, dtype)], dim=1)
    for i, block in enumerate(vit.blocks):
        x = encoder.through(block, x, affines[2 * i : 2 * i + 2], NOTHING, NOTHING)
    z = encoder.vit.norm(x[:, : prompts.shape[1]].float())
    features: Tensor = encoder.vit.fc_norm(z.mean(dim=1))
    return features
