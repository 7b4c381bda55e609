"""The transformer block with a task's adapters in it: its mathematics once, in two memory layouts.

    x = x + A_1(attention(N_1(x))),    x = x + A_2(MLP(N_2(x)))

Attention and MLP are the frozen network's. The layer norms N and the adapters A are a task's own:

    A(y) = y + m_up * (W_up relu(m_down * (W_down y + b_down)) + b_up)

The inner residual is never masked, so an adapter with closed masks is exactly the identity. All adapters of a network
are four stacked tensors: one optimiser step, one gate and one file entry for all. Masks are not negative, so
one that holds for a whole batch can be multiplied into the weights (`fold`): thousands of numbers instead of the
millions of activations.

`TimmLayout` runs timm's own modules and is differentiable; so is `FirstTokenLayout`, for the last block of a network
that reads the class token alone. `TransposedLayout` only predicts, on a CPU: multiplying by a
matrix stored as `[in, out]` is up to five times faster there than by one stored as `[out, in]`, as torch does it; the
fewer rows, the greater the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.nets.base import Trainable
from tpl.nets.plain import Attention, Mlp, of_timm

if TYPE_CHECKING:
    from timm.models.vision_transformer import Block


class BlockLayout(Protocol):
    """A block's operations in one memory layout; branch 0 is attention, branch 1 the MLP."""

    def norm(self, x: Tensor, branch: int) -> Tensor:
        """The task's layer norm before a branch."""

    def attention(self, y: Tensor) -> Tensor:
        """Attention with its projection and layer scale."""

    def mlp(self, y: Tensor) -> Tensor:
        """The MLP with its layer scale."""

    def add(self, x: Tensor, y: Tensor, branch: int) -> Tensor:
        """`x + A(y)`: the residual stream and the adapted branch."""


def run_block(layout: BlockLayout, x: Tensor) -> Tensor:
    """One pre-norm transformer block with an adapter behind both branches."""
    x = layout.add(x, layout.attention(layout.norm(x, 0)), 0)
    return layout.add(x, layout.mlp(layout.norm(x, 1)), 1)


# Adapters


class AdapterMasks(NamedTuple):
    """Masks for the hidden units and for the outputs of an adapter, or of a stack of them."""

    down: Tensor
    up: Tensor


class AdapterStack(NamedTuple):
    """The weights of all adapters, `[count, ...]`, or of several networks at once, `[networks, count, ...]`."""

    down_weight: Tensor
    down_bias: Tensor
    up_weight: Tensor
    up_bias: Tensor

    def split(self, masks: Tensor) -> AdapterMasks:
        """Flat masks `[..., units]` as `[..., count, latent]` and `[..., count, dim]`.

        Order: adapter by adapter, hidden units before outputs.
        """
        count, dim, latent = self.up_weight.shape[-3:]
        return AdapterMasks(*masks.unflatten(-1, (count, latent + dim)).split((latent, dim), dim=-1))

    def fold(self, masks: Tensor) -> AdapterStack:
        """The weights of the masked adapters; `masks` is `[units]`, or `[networks, units]` for a stack of several."""
        down, up = self.split(masks)
        return AdapterStack(
            self.down_weight * down.unsqueeze(-1),
            self.down_bias * down,
            self.up_weight * up.unsqueeze(-1),
            self.up_bias * up,
        )

    def gates(self, used: Tensor) -> AdapterStack:
        """A factor for every weight's update, 1 = free and 0 = frozen, given the units in use.

        A weight is protected when the unit it feeds *and* the unit it reads are in use; the input of the first layer is
        the residual stream, which is always in use.
        """
        down, up = self.split(used)
        return AdapterStack(
            (1 - down).unsqueeze(-1).expand_as(self.down_weight),
            1 - down,
            1 - torch.minimum(up.unsqueeze(-1), down.unsqueeze(-2)),
            1 - up,
        )

    def to(self, dtype: torch.dtype) -> AdapterStack:
        """The weights in another precision."""
        return AdapterStack(*(tensor.to(dtype) for tensor in self))

    def layers(self) -> list[AdapterStack]:
        """One set of weights per adapter, in the order of the forward pass."""
        axis = self.down_bias.dim() - 2
        return [AdapterStack(*parts) for parts in zip(*(tensor.unbind(axis) for tensor in self), strict=True)]


class Adapters(Trainable):
    """A stack of `count` adapters of one width; two for every transformer block."""

    def __init__(self, count: int, dim: int, latent: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.count, self.dim, self.latent = count, dim, latent
        self.down_weight = nn.Parameter(torch.empty(count, latent, dim))
        self.down_bias = nn.Parameter(torch.zeros(count, latent))
        self.up_weight = nn.Parameter(torch.empty(count, dim, latent))
        self.up_bias = nn.Parameter(torch.zeros(count, dim))
        # The generic ViT initialisation, which the public codes use, too.
        for weight in (self.down_weight, self.up_weight):
            nn.init.trunc_normal_(weight, std=0.02, generator=generator)

    @property
    def units(self) -> int:
        """Number of maskable units: hidden units and outputs of every adapter."""
        return self.count * (self.latent + self.dim)

    @property
    def weights(self) -> AdapterStack:
        """The parameters as a stack, every unit open."""
        return AdapterStack(self.down_weight, self.down_bias, self.up_weight, self.up_bias)

    def stack(self, *tensors: Tensor) -> AdapterStack:
        """Other tensors in the place of the parameters."""
        return AdapterStack(*tensors)


Watch = Callable[[Tensor, Tensor], None]


def adapt(x: Tensor, weights: AdapterStack, masks: AdapterMasks | None = None, watch: Watch | None = None) -> Tensor:
    """One adapter applied to `x`, `[n, ..., dim]`; rows of `masks` act on the activations of equal parts of the batch.

    `watch` is called with the inputs of both linear layers: `x` and the hidden units.
    """
    hidden = F.relu(_linear(x, weights.down_weight, weights.down_bias))
    if masks is not None:
        hidden = _masked(hidden, masks.down)
    if watch is not None:
        watch(x, hidden)
    out = _linear(hidden, weights.up_weight, weights.up_bias)
    return x + (out if masks is None else _masked(out, masks.up))


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear layer; weights `[networks, out, in]` each serve an equal part of the batch, in order."""
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    parts = x.reshape(len(weight), -1, x.shape[-1])
    # Not baddbmm, which writes the bias out to the size of the result first.
    return (parts @ weight.mT + bias.unsqueeze(1)).reshape(*x.shape[:-1], -1)


def _masked(x: Tensor, masks: Tensor) -> Tensor:
    return (x.reshape(len(masks), -1, x.shape[-1]) * masks.unsqueeze(1)).reshape(x.shape)


def layer_norm(x: Tensor, affine: Tensor, eps: float) -> Tensor:
    """A layer norm with scale and shift `[2, dim]`, or `[networks, 2, dim]` for equal parts of the batch."""
    if affine.dim() == 2:
        return F.layer_norm(x, x.shape[-1:], affine[0], affine[1], eps)
    plain = F.layer_norm(x, x.shape[-1:], None, None, eps).reshape(len(affine), -1, x.shape[-1])
    return (plain * affine[:, :1] + affine[:, 1:]).reshape(x.shape)


# timm's own modules


class BlockWeights(NamedTuple):
    """A task's weights for one block: norms, adapters and masks of its two branches."""

    norms: Sequence[Tensor]
    adapters: Sequence[AdapterStack | None] = (None, None)
    masks: Sequence[AdapterMasks | None] = (None, None)


class TimmLayout(NamedTuple):
    """A block of timm on tokens `[n, tokens, dim]`, under the weights of one task or of several."""

    block: Block
    own: BlockWeights
    watch: Watch | None = None

    def norm(self, x: Tensor, branch: int) -> Tensor:
        """The task's layer norm, with timm's epsilon."""
        return layer_norm(x, self.own.norms[branch], (self.block.norm2 if branch else self.block.norm1).eps)

    def attention(self, y: Tensor) -> Tensor:
        """timm's attention and layer scale."""
        out: Tensor = self.block.ls1(self.block.attn(y))
        return out

    def mlp(self, y: Tensor) -> Tensor:
        """timm's MLP and layer scale."""
        out: Tensor = self.block.ls2(self.block.mlp(y))
        return out

    def add(self, x: Tensor, y: Tensor, branch: int) -> Tensor:
        """The residual sum; a block without adapters adds the branch as it is."""
        adapter = self.own.adapters[branch]
        return x + (y if adapter is None else adapt(y, adapter, self.own.masks[branch], self.watch))


class FirstTokenLayout(TimmLayout):
    """A standard block that computes the first token of every image alone; the others are only keys and values."""

    def attention(self, y: Tensor) -> Tensor:
        """Attention of the first tokens to all tokens, `[n, 1, dim]`."""
        layer, heads, (images, tokens, dim) = self.block.attn.qkv, self.block.attn.num_heads, y.shape
        bias = (None, None) if layer.bias is None else (layer.bias[:dim], layer.bias[dim:])
        query = F.linear(y[:, :1], layer.weight[:dim], bias[0]).view(images, 1, heads, -1).transpose(1, 2)
        both = F.linear(y, layer.weight[dim:], bias[1]).view(images, tokens, 2, heads, -1)
        key, value = both.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(query, key, value)
        scaled: Tensor = self.block.ls1(self.block.attn.proj(out.transpose(1, 2).reshape(images, 1, dim)))
        return scaled

    def add(self, x: Tensor, y: Tensor, branch: int) -> Tensor:
        """The residual sum of the first tokens."""
        return super().add(x[:, :1], y, branch)


def run_timm_block(block: Block, x: Tensor, own: BlockWeights) -> Tensor:
    """Output of a timm block under a task's weights; `ViTEncoder.fuse` compiles this function."""
    return run_block(TimmLayout(block, own), x)


# Transposed weights: prediction on a CPU


class Transposed(NamedTuple):
    """A linear layer: bias `[out]` and weight `[in, out]`."""

    bias: Tensor
    weight: Tensor

    @classmethod
    def of(cls, bias: Tensor, weight: Tensor) -> Transposed:
        """A layer by its weight `[out, in]`."""
        return cls(bias.detach().clone(), weight.detach().mT.contiguous())

    def __call__(self, x: Tensor, buffer: Tensor | None = None) -> Tensor:
        """The layer's values `[rows, out]`, written into `buffer`, of any sufficient length, if there is one."""
        if len(x) == 1:  # one row alone would be a vector, which has kernels that round differently
            return torch.addmm(self.bias, x.expand(2, -1), self.weight)[:1]
        if buffer is None:
            return torch.addmm(self.bias, x, self.weight)
        shape = len(x), len(self.bias)
        return torch.addmm(self.bias, x, self.weight, out=buffer[: shape[0] * shape[1]].view(shape))


class TransposedAdapter(NamedTuple):
    """An adapter without its closed hidden units."""

    down: Transposed
    up: Transposed

    @classmethod
    def of(cls, layer: AdapterStack) -> TransposedAdapter:
        """An adapter by its weights, a mask folded in."""
        opened = (layer.down_weight != 0).any(dim=1) | (layer.down_bias != 0)  # the others are always zero
        down = Transposed.of(layer.down_bias[opened], layer.down_weight[opened])
        return cls(down, Transposed.of(layer.up_bias, layer.up_weight[:, opened]))

    def __call__(self, y: Tensor) -> Tensor:
        """The adapter's output, to be added to the branch `y`."""
        return self.up(self.down(y).relu_())


class TransposedTask(NamedTuple):
    """A task's norms, the same as pairs of scale and shift, and its adapters."""

    norms: Tensor
    affines: list[tuple[Tensor, Tensor]]
    adapters: Sequence[TransposedAdapter | None]

    @classmethod
    def of(cls, norms: Tensor, weights: Iterable[Tensor]) -> TransposedTask:
        """A task by its norms and the adapters' weights under its mask."""
        return cls(norms, _affines(norms), [TransposedAdapter.of(layer) for layer in AdapterStack(*weights).layers()])

    @classmethod
    def plain(cls, norms: Tensor) -> TransposedTask:
        """Norms without adapters: the network as it was pre-trained."""
        return cls(norms, _affines(norms), [None] * len(norms))


def _affines(norms: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*norms.unbind(1), strict=True))


class Part(NamedTuple):
    """The next `rows` images of a batch belong to this task."""

    task: TransposedTask
    rows: int


class TransposedBlock:
    """A block's frozen weights, transposed; layer scales are multiplied into the weights before them."""

    def __init__(self, block: Block) -> None:
        self.heads = int(block.attn.num_heads)
        qkv, mlp = block.attn.qkv, block.mlp
        bias = torch.zeros_like(qkv.weight[:, 0]) if qkv.bias is None else qkv.bias
        query, *both = (Transposed.of(*each) for each in zip(bias.chunk(3), qkv.weight.chunk(3), strict=True))
        self.query, self.key_value = query, Transposed(*(torch.cat(pair, dim=-1) for pair in zip(*both, strict=True)))
        self.qkv = Transposed(*(torch.cat(pair, dim=-1) for pair in zip(query, self.key_value, strict=True)))
        self.project = _scaled(block.attn.proj, block.ls1)
        self.widen, self.narrow = _scaled(mlp.fc1), _scaled(mlp.fc2, block.ls2)
        in_place = isinstance(mlp.act, nn.GELU) and mlp.act.approximate == "none"
        self.act: Callable[[Tensor], Tensor] = torch.ops.aten.gelu_ if in_place else mlp.act
        self.eps = block.norm1.eps, block.norm2.eps
        self.width = max(len(self.qkv.bias), len(self.widen.bias))

    @staticmethod
    def supports(block: Block) -> bool:
        """Whether both branches are timm's standard ones, with nothing in between: no norm of queries, no gate."""
        attention, mlp = block.attn, block.mlp
        between = (attention, ("q_norm", "k_norm", "norm", "gate")), (mlp, ("norm",))
        empty = all(isinstance(getattr(of, name, None), nn.Identity | None) for of, names in between for name in names)
        standard = type(attention) in (Attention, *of_timm("Attention")) and type(mlp) in (Mlp, *of_timm("Mlp"))
        linear = standard and isinstance(mlp.fc1, nn.Linear)
        return linear and empty and attention.qkv.out_features == 3 * attention.qkv.in_features


class TransposedLayout(NamedTuple):
    """A transposed block on the tokens of `images` images, `[images * tokens, dim]`, of several tasks part after part.

    With `first_only`, the output is the first tokens alone: the others are only keys and values. The input is
    written over, and `buffer` holds the widest results.
    """

    block: TransposedBlock
    number: int  # of the block, among those that the tasks have weights for
    parts: Sequence[Part]
    images: int
    first_only: bool
    buffer: Tensor

    def norm(self, x: Tensor, branch: int) -> Tensor:
        """Each task's own layer norm of its rows."""
        normed = []
        for rows, part in zip(self._split(x), self.parts, strict=True):
            scale, shift = part.task.affines[2 * self.number + branch]
            normed.append(F.layer_norm(rows, rows.shape[-1:], scale, shift, self.block.eps[branch]))
        return normed[0] if len(normed) == 1 else torch.cat(normed)

    def attention(self, y: Tensor) -> Tensor:
        """Attention of all tokens, or of the first ones, to all tokens."""
        tokens, heads = len(y) // self.images, self.block.heads
        if self.first_only:
            query = self.block.query(y[::tokens]).view(self.images, 1, heads, -1).transpose(1, 2)
            both = self.block.key_value(y, self.buffer).view(self.images, tokens, 2, heads, -1)
            key, value = both.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            qkv = self.block.qkv(y, self.buffer).view(self.images, tokens, 3, heads, -1)
            query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(query, key, value)
        return self.block.project(out.transpose(1, 2).reshape(-1, y.shape[1]))

    def mlp(self, y: Tensor) -> Tensor:
        """Two linear layers with an activation in between."""
        return self.block.narrow(self.block.act(self.block.widen(y, self.buffer)))

    def add(self, x: Tensor, y: Tensor, branch: int) -> Tensor:
        """The residual sum, in place, plus each task's adapter output for its rows; `y` may be first tokens only."""
        x = x[:: len(x) // len(y)]
        x += y
        for stream, rows, part in zip(self._split(x), self._split(y), self.parts, strict=True):
            if (adapter := part.task.adapters[2 * self.number + branch]) is not None:
                stream += adapter(rows)
        return x

    def _split(self, x: Tensor) -> Sequence[Tensor]:
        tokens = len(x) // self.images
        parts: Sequence[Tensor] = x.split([part.rows * tokens for part in self.parts])
        return parts


def _scaled(layer: nn.Linear, scale: nn.Module | None = None) -> Transposed:
    """A layer with the layer scale that follows it."""
    gamma = getattr(scale, "gamma", torch.ones_like(layer.weight[:, 0]))
    bias = torch.zeros_like(gamma) if layer.bias is None else layer.bias
    return Transposed.of(bias * gamma, layer.weight * gamma.unsqueeze(1))
