"""A transformer laid out for answering on a CPU: weights transposed once, closed units left out.

Multiplying by a matrix that lies as `[in, out]` is up to five times faster on a CPU than by one that lies as
`[out, in]`, the way torch keeps them, the more so the fewer the rows. Rows of one pass may belong to several tasks,
part after part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from tpl.nets.adapters import AdapterStack
from tpl.nets.encoder import ViTEncoder, is_standard


class Transposed(NamedTuple):
    """A linear layer: bias `[out]` and weight `[in, out]`."""

    bias: Tensor
    weight: Tensor

    def __call__(self, x: Tensor, room: Tensor | None = None) -> Tensor:
        """The layer's values `[rows, out]`, written into `room`, of any length that is enough, if there is some."""
        if len(x) == 1:  # one row alone would be a vector, which has kernels that round differently
            return torch.addmm(self.bias, x.expand(2, -1), self.weight)[:1]
        if room is None:
            return torch.addmm(self.bias, x, self.weight)
        shape = len(x), len(self.bias)
        return torch.addmm(self.bias, x, self.weight, out=room[: shape[0] * shape[1]].view(shape))


class TransposedAdapter(NamedTuple):
    """An adapter without its closed hidden units."""

    down: Transposed
    up: Transposed

    def __call__(self, y: Tensor) -> Tensor:
        """What the adapter adds to the branch `y`."""
        return self.up(self.down(y).relu_())


class TransposedTask(NamedTuple):
    """What one task brings along: its norms, and again as pairs of scale and shift, and its adapters."""

    norms: Tensor
    affines: list[tuple[Tensor, Tensor]]
    adapters: list[TransposedAdapter]

    @classmethod
    def of(cls, norms: Tensor, weights: Iterable[Tensor]) -> TransposedTask:
        """A task by its norms and the adapters' weights under its mask."""
        affines = list(zip(*norms.unbind(1), strict=True))
        return cls(norms, affines, [_transposed_adapter(layer) for layer in AdapterStack(*weights).layers()])


class Part(NamedTuple):
    """So many rows, one after the other, belong to this task."""

    task: TransposedTask
    rows: int


class TransposedTrunk:
    """The frozen blocks of an encoder on a CPU, in float32."""

    def __init__(self, encoder: ViTEncoder) -> None:
        self.encoder = encoder
        self.blocks = [TransposedBlock(block) for block in encoder.vit.blocks]

    @staticmethod
    def serves(encoder: ViTEncoder) -> bool:
        """Whether all blocks are of the standard kind."""
        return all(is_standard(block) for block in encoder.vit.blocks)

    def __call__(self, tokens: Tensor, parts: Sequence[Part]) -> Tensor:
        """Features `[n, dim]` of rows of tokens `[n, count, dim]`, the first of them the first part's.

        The tokens are written over.
        """
        x = tokens
        # One room for what is widest in every block: fetching fresh memory for it costs a tenth of the time.
        room = x.new_empty(x.shape[0] * x.shape[1] * max(block.width for block in self.blocks))
        for i, block in enumerate(self.blocks):
            only_first = i == len(self.blocks) - 1 and self.encoder.vit.global_pool == "token"
            x = block(x, parts, 2 * i, only_first, room)
        pieces = zip(x.split([part.rows for part in parts]), parts, strict=True)
        return torch.cat([self.encoder.pooled(piece, part.task.norms) for piece, part in pieces])


class TransposedBlock:
    """One transformer block; layer scales are multiplied into the weights before them."""

    def __init__(self, block: Block) -> None:
        self.heads = int(block.attn.num_heads)
        query, *both = (_transposed(*each) for each in zip(*_in_three(block.attn.qkv), strict=True))
        self.query, self.key_value = query, Transposed(*(torch.cat(pair, dim=-1) for pair in zip(*both, strict=True)))
        self.all = Transposed(*(torch.cat(pair, dim=-1) for pair in zip(query, self.key_value, strict=True)))
        self.project = _scaled(block.attn.proj, block.ls1)
        self.widen, self.act, self.narrow = _scaled(block.mlp.fc1), _act(block), _scaled(block.mlp.fc2, block.ls2)
        self.eps = block.norm1.eps, block.norm2.eps
        self.width = max(len(self.all.bias), len(self.widen.bias))

    def __call__(self, x: Tensor, parts: Sequence[Part], first: int, only_first: bool, room: Tensor) -> Tensor:
        """What comes out of the block, all tokens or the first ones; `first` is the number of its first adapter."""
        rows, tokens, dim = x.shape
        x = x.flatten(0, 1)
        y = _normed(x, parts, tokens, first, self.eps[0])
        if only_first:  # the others serve as keys and values alone
            query = self.query(y[::tokens]).view(rows, 1, self.heads, -1).transpose(1, 2)
            both = self.key_value(y, room).view(rows, tokens, 2, self.heads, -1)
            key, value = both.permute(2, 0, 3, 1, 4).unbind(0)
            x, tokens = x[::tokens], 1
        else:
            query, key, value = self.all(y, room).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(rows * tokens, dim)
        x = _adapted(x, self.project(y), parts, tokens, first)
        y = self.narrow(self.act(self.widen(_normed(x, parts, tokens, first + 1, self.eps[1]), room)))
        return _adapted(x, y, parts, tokens, first + 1).view(rows, tokens, dim)


def _normed(x: Tensor, parts: Sequence[Part], tokens: int, number: int, eps: float) -> Tensor:
    """Each task's own layer norm of its rows."""
    pieces = zip(x.split([part.rows * tokens for part in parts]), parts, strict=True)
    normed = []
    for piece, part in pieces:
        scale, shift = part.task.affines[number]
        normed.append(F.layer_norm(piece, piece.shape[-1:], scale, shift, eps))
    return normed[0] if len(normed) == 1 else torch.cat(normed)


def _adapted(x: Tensor, y: Tensor, parts: Sequence[Part], tokens: int, number: int) -> Tensor:
    """The stream `x` and the branch `y`, and what each task's adapter adds to its rows."""
    x += y
    sizes = [part.rows * tokens for part in parts]
    for stream, branch, part in zip(x.split(sizes), y.split(sizes), parts, strict=True):
        stream += part.task.adapters[number](branch)
    return x


def _act(block: Block) -> Callable[[Tensor], Tensor]:
    """What stands between the two layers of the MLP; the usual one works in place."""
    act: nn.Module = block.mlp.act
    usual = isinstance(act, nn.GELU) and act.approximate == "none"
    return torch.ops.aten.gelu_ if usual else act


def _transposed_adapter(layer: AdapterStack) -> TransposedAdapter:
    opened = (layer.down_weight != 0).any(dim=1) | (layer.down_bias != 0)  # the others say nothing, whatever they see
    down = _transposed(layer.down_bias[opened], layer.down_weight[opened])
    return TransposedAdapter(down, _transposed(layer.up_bias, layer.up_weight[:, opened]))


def _transposed(bias: Tensor, weight: Tensor) -> Transposed:
    return Transposed(bias.detach().clone(), weight.detach().mT.contiguous())


def _in_three(layer: nn.Linear) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Biases and weights for queries, keys and values."""
    bias = torch.zeros_like(layer.weight[:, 0]) if layer.bias is None else layer.bias
    return bias.chunk(3), layer.weight.chunk(3)


def _scaled(layer: nn.Linear, scale: nn.Module | None = None) -> Transposed:
    """A layer with the layer scale that follows it."""
    gamma = getattr(scale, "gamma", torch.ones_like(layer.weight[:, 0]))
    bias = torch.zeros_like(gamma) if layer.bias is None else layer.bias
    return _transposed(bias * gamma, layer.weight * gamma.unsqueeze(1))
