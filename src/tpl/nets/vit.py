"""The ViT encoder: a frozen network of timm, run block by block so that a task can act inside it.

timm's own patch embedding, attention, MLP, layer scale and pooling run unchanged. A task passes in its layer norms, the
adapters behind both branches of every block, and the masks that open and close the adapters' units. With closed masks
and the pre-trained norms the result equals timm's own forward pass bit for bit. The block itself is in `blocks`.

A task may have norms and adapters for the last blocks alone: how many is read from the shape of its norms. The tokens
below them are the same for every task (`tokens`), and are computed once for all.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.errors import TplError
from tpl.nets.base import Encoder
from tpl.nets.blocks import (
    AdapterMasks,
    Adapters,
    AdapterStack,
    BlockWeights,
    FirstTokenLayout,
    Part,
    TimmLayout,
    TransposedBlock,
    TransposedLayout,
    TransposedTask,
    layer_norm,
    run_block,
    run_timm_block,
)
from tpl.nets.compiling import Compiled
from tpl.nets.plain import Block, PatchEmbed, PlainViT, of_timm

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer


class ViTEncoder(Encoder):
    """A frozen timm ViT with adapters, norms and masks of a task in its blocks."""

    def __init__(
        self,
        vit: VisionTransformer,
        name: str,
        sha256: str,
        data_config: dict[str, Any],
        weights: Path | None = None,
        fingerprint: str | None = None,
    ) -> None:
        super().__init__()
        check_supported(vit, name)
        self.vit = vit
        self.name, self.sha256, self.weights = name, sha256, weights
        self.data_config = data_config  # timm's: input size, mean, std, crop, interpolation
        self.dim = int(vit.embed_dim)
        self.depth = len(vit.blocks)
        self.outer_norms = len(self.norm_layers()) - 2 * self.depth  # behind the last block
        self.run_block: Callable[..., Tensor] = run_timm_block
        self.fused = False
        # Copies in other precisions; in a dict: not part of this module's state.
        self._copies: dict[tuple[torch.dtype, torch.device], VisionTransformer] = {}
        # Independent of the file format of the weights; given where it is known, as it takes a while.
        self.fingerprint = fingerprint or hash_tensors(vit.state_dict())
        self.requires_grad_(False)
        self.eval()

    def fuse(self) -> None:
        """Compile the block, once for all of them: fewer, larger kernels, for some ten seconds at every new batch size.

        (Compiling several blocks as one piece takes longer and gains one per cent.)
        """
        self.run_block, self.fused = Compiled(run_timm_block), True

    def train(self, mode: bool = True) -> Self:
        """The trunk is frozen: it stays in evaluation mode whatever the rest does."""
        return super().train(False)

    def blocks_below(self, adapted: int) -> int:
        """Number of blocks below the last `adapted` ones."""
        if adapted > self.depth:
            raise TplError(f"'{self.name}' has {self.depth} blocks: adapted_blocks is at most that; got {adapted}.")
        return self.depth - adapted

    def new_adapters(self, latent: int, generator: torch.Generator | None = None, below: int = 0) -> Adapters:
        """Fresh adapters for all blocks but the first `below`: two a block, behind attention and behind the MLP."""
        return Adapters(2 * (self.depth - below), self.dim, latent, generator)

    def new_norms(self, below: int = 0) -> Tensor:
        """A copy of the pre-trained norms of all blocks but the first `below`, `[norms, 2, dim]` (scale, shift)."""
        layers = self.norm_layers()[2 * below :]
        return torch.stack([torch.stack([n.weight, n.bias]) for n in layers]).detach().clone()

    def plain(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Features of the trunk alone, float32, by timm's own forward pass; in half precision but for the last norm."""
        if dtype == torch.float32:
            features: Tensor = self.vit.forward_head(self.vit.forward_features(images), pre_logits=True)
            return features
        # `forward` without adapters gives the same bits, but would have a block of its own compiled.
        return self.pooled(self.trunk(dtype).blocks(self.tokens(images, dtype)), self.new_norms())

    def plain_from(self, tokens: Tensor, below: int) -> Tensor:
        """`plain` from the output of the first `below` blocks on."""
        return self.pooled(self.frozen(tokens, below, self.depth), self.new_norms(below))

    def trunk(self, dtype: torch.dtype) -> VisionTransformer:
        """The frozen network in one precision; a copy in another than its own is made once and kept."""
        if dtype == next(self.vit.parameters()).dtype:
            return self.vit
        key = dtype, next(self.vit.parameters()).device
        if key not in self._copies:
            self._copies[key] = copy.deepcopy(self.vit).to(dtype)
        return self._copies[key]

    def tokens(self, images: Tensor, dtype: torch.dtype, below: int = 0) -> Tensor:
        """Patches and class token of normalised images, at their positions, behind the first `below` blocks."""
        vit = self.trunk(dtype)
        x: Tensor = vit.norm_pre(vit.patch_drop(vit._pos_embed(embed_patches(vit, images.to(dtype)))))
        return self.frozen(x, 0, below)

    def frozen(self, x: Tensor, first: int, end: int) -> Tensor:
        """Tokens behind the blocks from `first` up to `end`, as they were pre-trained."""
        for block in list(self.trunk(x.dtype).blocks)[first:end]:
            if self.fused:
                norms = [torch.stack([norm.weight, norm.bias]) for norm in (block.norm1, block.norm2)]
                x = self.run_block(block, x, BlockWeights(norms))
            else:
                x = block(x)
        return x

    def forward(
        self,
        images: Tensor,
        norms: Tensor,
        adapters: Iterable[Tensor] | None = None,
        masks: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        learning: bool = False,
        watch: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Features `[n, dim]`, float32, of normalised images under one task's weights.

        `norms` is `[norms, 2, dim]`: two for each of the last blocks, then those behind them; blocks below run as they
        were pre-trained. With a leading axis, on the norms or on the adapters' weights, several networks
        share one pass over the frozen trunk: each serves an equal part of the batch, in order. So do the rows of
        `masks`, `[rows, units]`, which act on the activations; a mask that holds for the whole batch is folded into the
        weights. `dtype` is the precision of the trunk's products; the norms' statistics and the last norm are float32.
        `watch` is called with the output of every block. `learning` makes no difference: layer norms do not
        depend on the batch.
        """
        below = self.depth - (norms.shape[-3] - self.outer_norms) // 2
        return self.from_tokens(self.tokens(images, dtype, below), norms, adapters, masks, watch)

    def from_tokens(
        self,
        tokens: Tensor,
        norms: Tensor,
        adapters: Iterable[Tensor] | None = None,
        masks: Tensor | None = None,
        watch: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """`forward` from the `tokens` on, in their precision."""
        return self.pooled(self.run(tokens, self.block_weights(norms, adapters, masks, tokens.dtype), watch), norms)

    def class_token_from(self, tokens: Tensor, norms: Tensor, adapters: Iterable[Tensor]) -> Tensor:
        """`from_tokens` without what the last block computes for tokens that nothing reads, if it is a standard one."""
        last = self.trunk(tokens.dtype).blocks[-1]
        if self.vit.global_pool != "token" or not TransposedBlock.supports(last):
            return self.from_tokens(tokens, norms, adapters)
        *lower, own = self.block_weights(norms, adapters, None, tokens.dtype)
        blocks = list(self.trunk(tokens.dtype).blocks)[-len(lower) - 1 : -1]
        for block, weights in zip(blocks, lower, strict=True):
            tokens = self.run_block(block, tokens, weights)
        return self.pooled(run_block(FirstTokenLayout(last, own), tokens), norms)

    def block_weights(
        self, norms: Tensor, adapters: Iterable[Tensor] | None, masks: Tensor | None, dtype: torch.dtype
    ) -> list[BlockWeights]:
        """A task's weights, block by block, for as many of the last blocks as it has norms for."""
        affines = norms.to(dtype).unbind(-3)
        count = len(affines) - self.outer_norms
        layers: Sequence[AdapterStack | None] = [None] * count
        opened: Sequence[AdapterMasks | None] = [None] * count
        if adapters is not None:
            stack = AdapterStack(*adapters).to(dtype)
            layers = stack.layers()
            if masks is not None:
                down, up = stack.split(masks.to(dtype))
                opened = [AdapterMasks(*pair) for pair in zip(down.unbind(1), up.unbind(1), strict=True)]
        pairs = [slice(first, first + 2) for first in range(0, count, 2)]
        return [BlockWeights(affines[own], layers[own], opened[own]) for own in pairs]

    def run(self, x: Tensor, weights: Sequence[BlockWeights], watch: Callable[[Tensor], None] | None = None) -> Tensor:
        """Output `[n, tokens, dim]` of the last block, of which `weights` has one entry for each of the last ones.

        It computes all tokens, even where the class token is all that counts: on a GPU, the kernels for so few rows
        round the same image differently from run to run, and features must have the same bits every time.
        """
        for block, own in zip(list(self.trunk(x.dtype).blocks)[-len(weights) :], weights, strict=True):
            x = self.run_block(block, x, own)
            if watch is not None:
                watch(x)
        return x

    def pooled(self, x: Tensor, norms: Tensor) -> Tensor:
        """Features, float32, from the last block's output; for pooling by class token, that token is enough."""
        vit = self.vit
        rest = list(norms.unbind(-3)[norms.shape[-3] - self.outer_norms :])
        x = x.float()
        if vit.global_pool == "token":
            x = x[:, :1]  # layer norms are per token: the others are not needed
        x = layer_norm(x, rest.pop(0), vit.norm.eps) if isinstance(vit.norm, nn.LayerNorm) else vit.norm(x)
        x = vit.pool(x)
        return layer_norm(x, rest.pop(0), vit.fc_norm.eps) if isinstance(vit.fc_norm, nn.LayerNorm) else vit.fc_norm(x)

    def norm_layers(self) -> list[nn.LayerNorm]:
        """The layer norms in the order of `new_norms`: two a block, then those behind the last one."""
        inner = [n for block in self.vit.blocks for n in (block.norm1, block.norm2)]
        return inner + [n for n in (self.vit.norm, self.vit.fc_norm) if isinstance(n, nn.LayerNorm)]


class TransposedTrunk:
    """The frozen blocks of an encoder with transposed weights, for prediction on a CPU in float32.

    The first `below` blocks are the same for all tasks.
    """

    def __init__(self, encoder: ViTEncoder, below: int = 0) -> None:
        self.encoder, self.below = encoder, below
        self.blocks = [TransposedBlock(block) for block in encoder.vit.blocks]
        self.lower = TransposedTask.plain(encoder.new_norms()[: 2 * below])
        self.upper = TransposedTask.plain(encoder.new_norms(below))

    @staticmethod
    def serves(encoder: ViTEncoder) -> bool:
        """Whether all blocks are of the standard kind."""
        return all(TransposedBlock.supports(block) for block in encoder.vit.blocks)

    def shared(self, tokens: Tensor) -> Tensor:
        """Tokens `[n, count, dim]` behind the first blocks; those given are written over."""
        return self._run(self.blocks[: self.below], tokens, [Part(self.lower, len(tokens))], False).view_as(tokens)

    def __call__(self, tokens: Tensor, parts: Sequence[Part]) -> Tensor:
        """Features `[n, dim]` of rows of `shared` tokens `[n, count, dim]`, the first of them the first part's.

        The tokens are written over.
        """
        images, _, dim = tokens.shape
        x = self._run(self.blocks[self.below :], tokens, parts, self.encoder.vit.global_pool == "token")
        by_task = zip(x.view(images, -1, dim).split([part.rows for part in parts]), parts, strict=True)
        return torch.cat([self.encoder.pooled(rows, part.task.norms) for rows, part in by_task])

    def _run(self, blocks: Sequence[TransposedBlock], tokens: Tensor, parts: Sequence[Part], pooled: bool) -> Tensor:
        """Tokens behind some blocks, `[n * count, dim]`; only the first ones of every image if these are `pooled`."""
        images, x = len(tokens), tokens.flatten(0, 1)
        # One buffer for the widest result of every block: allocating it anew costs a tenth of the time.
        buffer = tokens.new_empty(len(x) * max((block.width for block in blocks), default=0))
        for number, block in enumerate(blocks):
            first_only = pooled and number == len(blocks) - 1
            x = run_block(TransposedLayout(block, number, parts, images, first_only, buffer), x)
        return x


def embed_patches(vit: VisionTransformer, images: Tensor) -> Tensor:
    """The patch embedding; in bf16 on a GPU as the matrix product it is, since cuDNN's kernel is slow there."""
    embed = vit.patch_embed
    half = images.is_cuda and images.dtype != torch.float32
    as_product = half and type(embed) in (PatchEmbed, *of_timm("PatchEmbed")) and embed.flatten
    if not as_product or embed.proj.kernel_size != embed.proj.stride or images.shape[-2:] != embed.img_size:
        embedded: Tensor = embed(images)
        return embedded
    (height, width), (rows, columns) = embed.patch_size, embed.grid_size
    patches = images.unflatten(3, (columns, width)).unflatten(2, (rows, height)).permute(0, 2, 4, 1, 3, 5)
    tokens = F.linear(patches.reshape(len(images), rows * columns, -1), embed.proj.weight.flatten(1), embed.proj.bias)
    normed: Tensor = embed.norm(tokens)
    return normed


def as_vit(encoder: Encoder) -> ViTEncoder:
    """An encoder for a method that reaches into the blocks of a transformer."""
    if not isinstance(encoder, ViTEncoder):
        raise TplError(f"'{encoder.name}' is no transformer; choose a ViT or DeiT, `compact` or `photos`.")
    return encoder


def hash_tensors(state: dict[str, Tensor]) -> str:
    """sha256 over names, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def check_supported(vit: VisionTransformer, name: str) -> None:
    """Refuse a network without timm's standard pre-norm blocks, which adapters need."""
    for block in vit.blocks:
        kinds: tuple[Any, ...] = (Block, *of_timm("Block"))
        standard = isinstance(block, kinds) and all(
            isinstance(n, nn.LayerNorm) and n.elementwise_affine for n in (block.norm1, block.norm2)
        )
        if not standard:
            raise TplError(f"'{name}' has {type(block).__name__} blocks; adapters need timm's pre-norm ViT block.")
    networks: tuple[Any, ...] = (PlainViT, *of_timm("VisionTransformer"))
    if type(vit).forward_head not in [network.forward_head for network in networks]:
        raise TplError(f"'{name}' has a non-standard head ({type(vit).__name__}); choose a plain ViT or DeiT.")
    if vit.attn_pool is not None:
        raise TplError(f"'{name}' pools by attention, which no task can adapt; choose a ViT with a class token.")


def adapter_inputs(
    encoder: ViTEncoder, images: Tensor, norms: Tensor, adapters: AdapterStack, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of all adapters' layers, and the features `[n, dim]`: a forward pass of one network without masks.

    For methods that protect weights by their inputs. These are means over the images at every token, `[count, tokens,
    dim]` and `[count, tokens, latent]`.
    """
    outer, inner = [], []

    def watch(y: Tensor, hidden: Tensor) -> None:
        outer.append(y.float().mean(dim=0))
        inner.append(hidden.float().mean(dim=0))

    x = encoder.tokens(images, dtype)
    weights = encoder.block_weights(norms, adapters, None, dtype)
    for block, own in zip(encoder.trunk(dtype).blocks, weights, strict=True):
        x = run_block(TimmLayout(block, own, watch), x)
    return torch.stack(outer), torch.stack(inner), encoder.pooled(x, norms)


def prompted(
    encoder: ViTEncoder, images: Tensor, norms: Tensor, prompts: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Features `[n, dim]`, float32: the mean of the last block's outputs at the prompts.

    `prompts` are an image's own, `[n, tokens, dim]`; `norms` those of `new_norms`. Prompts have no position
    embedding: they are learned, and could contain one.
    """
    x = torch.cat([prompts.to(dtype), encoder.tokens(images, dtype)], dim=1)
    x = encoder.run(x, encoder.block_weights(norms, None, None, dtype))
    z = encoder.vit.norm(x[:, : prompts.shape[1]].float())
    features: Tensor = encoder.vit.fc_norm(z.mean(dim=1))
    return features
