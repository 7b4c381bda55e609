"""A ViT of two narrow blocks, known to timm: a tenth of the compact encoder's time, where features need not be good.

Random weights of the right size keep colours, stripes and strokes apart well enough to learn them. For a process of its
own there is `python -m small_encoder`, the program `tpl` with one encoder more.
"""

from __future__ import annotations

import torch
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from tpl import cli
from tpl.nets.compact import DATA_CONFIG

SMALL_VIT = "vit_small_enough_for_tests"


@register_model
def vit_small_enough_for_tests(pretrained: bool = False, num_classes: int = 0, **_: object) -> VisionTransformer:
    """Always the same weights: they stand for the pre-trained ones."""
    vit = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=num_classes, weight_init="skip"
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in vit.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                module.weight.normal_(0, module.weight[0].numel() ** -0.5, generator=generator)
                nn.init.zeros_(module.bias)
        for place in (vit.cls_token, vit.pos_embed):
            place.normal_(0, 0.3, generator=generator)
    vit.pretrained_cfg = dict(DATA_CONFIG)
    return vit


if __name__ == "__main__":
    cli.main()
