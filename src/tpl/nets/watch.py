"""What adapters get to see: the inputs of their layers, for methods that protect weights by what they act on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.nets.adapters import AdapterStack, linear
from tpl.nets.blocks import layer_norm
from tpl.nets.encoder import ViTEncoder


def adapter_inputs(
    encoder: ViTEncoder, images: Tensor, norms: Tensor, adapters: AdapterStack, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Inputs of all adapters' layers, each image's mean over its tokens: `[n, count, dim]`, `[n, count, latent]`.

    The same pass as the encoder's own, for one network without masks, that notes what comes by.
    """
    vit = encoder.trunk(dtype)
    affines, layers = norms.to(dtype).unbind(0), adapters.to(dtype).layers()
    outer, inner = [], []

    def adapted(y: Tensor, adapter: AdapterStack) -> Tensor:
        hidden = F.relu(linear(y, adapter.down_weight, adapter.down_bias))
        outer.append(y.float().mean(dim=1))
        inner.append(hidden.float().mean(dim=1))
        return y + linear(hidden, adapter.up_weight, adapter.up_bias)

    x = encoder.tokens(images, dtype)
    for i, block in enumerate(vit.blocks):
        y = block.ls1(block.attn(layer_norm(x, affines[2 * i], block.norm1.eps)))
        x = x + adapted(y, layers[2 * i])
        y = block.ls2(block.mlp(layer_norm(x, affines[2 * i + 1], block.norm2.eps)))
        x = x + adapted(y, layers[2 * i + 1])
    return torch.stack(outer, dim=1), torch.stack(inner, dim=1)
