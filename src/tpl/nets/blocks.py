"""A transformer block with a task's norms and adapters inside."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from timm.layers import Mlp
from timm.models.vision_transformer import Attention, Block
from torch import Tensor, nn

from tpl.nets.adapters import AdapterMasks, AdapterStack, adapt


def adapted_block(
    block: Block,
    x: Tensor,
    norms: Sequence[Tensor],
    adapters: Sequence[AdapterStack | None],
    masks: Sequence[AdapterMasks | None],
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
