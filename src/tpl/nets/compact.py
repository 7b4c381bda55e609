"""A small ViT for 32-pixel images whose weights ship inside the package.

It works offline: a convolutional stem turns 32 x 32 pixels into 16 tokens for six
transformer blocks. `recipes/pretrain_compact.py` trains it on CIFAR-100;
`pretrained/compact.json` records how, how well, and the hash of the weights.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from tpl.nets.plain import ConvStem, PlainViT
from tpl.pretraining import COMPACT, packaged_record

NAME = COMPACT
WEIGHTS = files("tpl") / "nets" / "pretrained" / "compact.safetensors"

DATA_CONFIG: dict[str, Any] = {
    "input_size": (3, 32, 32),
    "interpolation": "bicubic",
    "mean": (0.5071, 0.4865, 0.4409),
    "std": (0.2673, 0.2564, 0.2762),
    "crop_pct": 1.0,
    "crop_mode": "center",
}
DIM, DEPTH, HEADS, TOKENS = 128, 6, 4, 16
CHANNELS, STRIDES = (24, 48, 96, DIM), (1, 2, 2, 2)  # of the convolutions of the stem


def create_compact() -> PlainViT:
    """The network, without its weights."""
    return PlainViT(ConvStem(CHANNELS, STRIDES), TOKENS, DIM, DEPTH, HEADS)


def record() -> dict[str, Any]:
    """How the shipped weights were made: recipe, accuracy, sha256."""
    return packaged_record(NAME)
