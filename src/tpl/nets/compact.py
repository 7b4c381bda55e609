"""A small ViT for 32-pixel images whose weights ship inside the package.

It works offline: a convolutional stem turns 32 x 32 pixels into 16 tokens for six of timm's
transformer blocks. `recipes/pretrain_compact.py` trains it on CIFAR-100;
`pretrained/compact.json` records how, how well, and the hash of the weights.
"""

from __future__ import annotations

import json
from functools import partial
from importlib.resources import files
from typing import Any

import torch
from timm.layers import HybridEmbed
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import ConvStem

from tpl.pretraining import COMPACT

NAME = COMPACT
WEIGHTS = files(__package__) / "pretrained" / "compact.safetensors"
RECORD = files(__package__) / "pretrained" / "compact.json"

DATA_CONFIG: dict[str, Any] = {
    "input_size": (3, 32, 32),
    "interpolation": "bicubic",
    "mean": (0.5071, 0.4865, 0.4409),
    "std": (0.2673, 0.2564, 0.2762),
    "crop_pct": 1.0,
    "crop_mode": "center",
}


def create_compact(num_classes: int = 0) -> VisionTransformer:
    """The network with random weights; `num_classes=0` leaves the classifier out."""
    stem = ConvStem(depth=4, channels=(24, 48, 96, 128), stride=(1, 2, 2, 2), act_layer=torch.nn.GELU)
    return VisionTransformer(
        img_size=32,
        patch_size=1,
        embed_dim=128,
        depth=6,
        num_heads=4,
        mlp_ratio=4.0,
        num_classes=num_classes,
        embed_layer=partial(HybridEmbed, backbone=stem, proj=False),
    )


def record() -> dict[str, Any]:
    """How the shipped weights were made: recipe, accuracy, sha256."""
    content: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return content
