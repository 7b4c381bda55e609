"""A small ViT for 32-pixel images whose weights ship inside the package.

It works offline: a convolutional stem turns 32 x 32 pixels into 16 tokens for six
transformer blocks. `recipes/pretrain_compact.py` trains it on CIFAR-100;
`pretrained/compact.json` records how, how well, and the hash of the weights.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from torch import Tensor, nn

from tpl.nets.plain import PlainViT
from tpl.pretraining import COMPACT

NAME = COMPACT
WEIGHTS = files("tpl") / "nets" / "pretrained" / "compact.safetensors"
RECORD = files("tpl") / "nets" / "pretrained" / "compact.json"

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


class Convolution(nn.Module):
    """A 3 x 3 convolution, with batch norm and GELU unless it is the `last`."""

    def __init__(self, channels: int, out: int, stride: int, last: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, 3, stride, padding=1, bias=last)
        self.bn = nn.Identity() if last else nn.BatchNorm2d(out)
        self.act = nn.Identity() if last else nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """The next feature map."""
        out: Tensor = self.act(self.bn(self.conv(x)))
        return out


class Stem(nn.Module):
    """Convolutions whose last feature map is the sequence of tokens."""

    def __init__(self) -> None:
        super().__init__()
        layers = zip((3, *CHANNELS), CHANNELS, STRIDES, strict=False)
        self.backbone = nn.Sequential(*(Convolution(*layer, last=layer[1] == DIM) for layer in layers))

    def forward(self, images: Tensor) -> Tensor:
        """Tokens `[n, 16, dim]` of normalised images."""
        tokens: Tensor = self.backbone(images).flatten(2).transpose(1, 2)
        return tokens


def create_compact() -> PlainViT:
    """The network, without its weights."""
    return PlainViT(Stem(), TOKENS, DIM, DEPTH, HEADS)


def record() -> dict[str, Any]:
    """How the shipped weights were made: recipe, accuracy, sha256."""
    content: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return content
