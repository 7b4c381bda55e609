"""The frozen trunk with all tasks' networks side by side: a first axis of networks, and every image in each of them.

The trunk and the adapters' weights are there once, however many tasks there are; a task adds norms and masks. The same
pass as the encoder's own, written for tracing: what a layer needs is cut out of the stacks beforehand, as every cut
would become a node of the graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.methods.tpl import TPL
from tpl.nets import AdapterStack
from tpl.nets.encoder import ViTEncoder


class Norm(NamedTuple):
    """Scale and shift of one norm in all networks, `[networks, 1, 1, dim]`."""

    scale: Tensor
    shift: Tensor

    def __call__(self, x: Tensor, eps: float) -> Tensor:
        """The norm of `x`, `[networks, n, tokens, dim]`."""
        return F.layer_norm(x, x.shape[-1:], None, None, eps) * self.scale + self.shift


class Adapter(NamedTuple):
    """One adapter in all networks: `[in, out]` weights shared under masks, or `[networks, 1, in, out]` ones."""

    down_weight: Tensor
    down_bias: Tensor
    down_mask: Tensor | None
    up_weight: Tensor
    up_bias: Tensor
    up_mask: Tensor | None

    def __call__(self, y: Tensor) -> Tensor:
        """The adapted branch."""
        hidden = F.relu(y @ self.down_weight + self.down_bias)
        hidden = hidden if self.down_mask is None else hidden * self.down_mask
        out = hidden @ self.up_weight + self.up_bias
        return y + (out if self.up_mask is None else out * self.up_mask)


class Trunk(nn.Module):
    """Normalised images `[n, 3, height, width]` to features `[networks, n, dim]`, float32; it computes in `dtype`."""

    def __init__(self, encoder: ViTEncoder, norms: Tensor, adapters: list[Adapter], dtype: torch.dtype) -> None:
        super().__init__()
        self.encoder, self.dtype, self.networks = encoder, dtype, len(norms)
        self.norms = [Norm(*(part.unsqueeze(1).unsqueeze(1) for part in each.unbind(1))) for each in norms.unbind(1)]
        self.inner = [Norm(*(part.to(dtype) for part in norm)) for norm in self.norms[: encoder.adapters_needed]]
        self.adapters = adapters

    def forward(self, images: Tensor) -> Tensor:
        """Patches are embedded once; then every network has its own copy of them."""
        vit = self.encoder.trunk(self.dtype)
        x = self.encoder.tokens(images, self.dtype)
        x = x.unsqueeze(0).expand(self.networks, -1, -1, -1)
        for i, block in enumerate(vit.blocks):
            first, second = 2 * i, 2 * i + 1
            y = self.inner[first](x, block.norm1.eps)
            y = block.attn(y.flatten(0, 1)).unflatten(0, (self.networks, images.shape[0]))
            x = x + self.adapters[first](block.ls1(y))
            x = x + self.adapters[second](block.ls2(block.mlp(self.inner[second](x, block.norm2.eps))))
        rest = self.norms[len(self.inner) :]
        x = x.float()
        x = rest.pop(0)(x, vit.norm.eps) if isinstance(vit.norm, nn.LayerNorm) else vit.norm(x)
        x = vit.pool(x.flatten(0, 1)).unflatten(0, (self.networks, images.shape[0]))
        if isinstance(vit.fc_norm, nn.LayerNorm):
            x = rest.pop(0)(x.unsqueeze(2), vit.fc_norm.eps).squeeze(2)
        return x


def trunk_of(method: TPL, encoder: ViTEncoder, dtype: torch.dtype) -> Trunk:
    """The trunk with a network for each of the method's models, and last, where it asks it, the encoder as it is."""
    norms = [model.norms.detach() for model in method.models]
    if method.asks_encoder:  # its own norms, and nothing adapted
        norms.append(method.encoder.new_norms())
    return Trunk(encoder, torch.stack(norms), _adapters(method, len(norms), dtype), dtype)


def _adapters(method: TPL, networks: int, dtype: torch.dtype) -> list[Adapter]:
    bank, models = method.bank, method.models
    bare = networks - len(models)
    shared = AdapterStack(*(weight.detach() for weight in bank.adapters.weights))
    claims = [bank.protection.claim(model.embedding.detach()) for model in models]
    masks = [claim for claim in claims if claim is not None]
    if len(masks) == len(claims):  # masks of units: they act on what the units say
        masks += [torch.zeros_like(masks[0])] * bare
        down, up = (part.to(dtype)[:, None, None] for part in shared.split(torch.stack(masks)))
        rows = zip(shared.to(dtype).layers(), down.unbind(3), up.unbind(3), strict=True)
        return [
            Adapter(_transposed(w.down_weight), w.down_bias, d, _transposed(w.up_weight), w.up_bias, u)
            for w, d, u in rows
        ]
    folded = [  # masks of weights: weights of its own for each network
        AdapterStack(*bank.protection.finished(bank.adapters.weights, model.embedding.detach())) for model in models
    ]
    folded += [AdapterStack(*(torch.zeros_like(weight) for weight in shared))] * bare
    layers = zip(*(stack.to(dtype).layers() for stack in folded), strict=True)
    stacked = [AdapterStack(*(torch.stack(parts).detach() for parts in zip(*each, strict=True))) for each in layers]
    return [
        Adapter(
            _transposed(w.down_weight).unsqueeze(1), w.down_bias[:, None, None], None,
            _transposed(w.up_weight).unsqueeze(1), w.up_bias[:, None, None], None,
        )
        for w in stacked
    ]  # fmt: skip


def _transposed(weight: Tensor) -> Tensor:
    return weight.mT.contiguous()
