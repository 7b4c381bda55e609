"""Resizing and cropping of one image, with Pillow alone: the two geometric steps of timm's evaluation transform.

timm and torchvision take as long to import as torch itself. Sizes, corners and borders are rounded as they round them,
so every pixel is the same (`tests/stream/test_crop.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

from tpl.errors import DataError

# What timm fills in for a data config that does not say
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
INTERPOLATION, SHARE = "bilinear", 0.875
BLACK = (0, 0, 0)


@dataclass(frozen=True)
class Resize:
    """The first step: `mode` is center (the short side fits), border (the long side fits) or squash (both sides)."""

    height: int
    width: int
    mode: str
    interpolation: str

    def size(self, image: Image.Image) -> tuple[int, int]:
        """Width and height that an image gets."""
        if self.mode == "squash":
            return self.width, self.height
        if self.mode == "center" and self.height == self.width:
            short, long = sorted(image.size)
            side = int(self.width * long / short)
            return (self.width, side) if image.width <= image.height else (side, self.width)
        ratios = image.height / self.height, image.width / self.width
        ratio = max(ratios) if self.mode == "border" else min(ratios)
        return round(image.width / ratio), round(image.height / ratio)

    def __call__(self, image: Image.Image) -> Image.Image:
        """The image in its new size."""
        size = self.size(image)
        return image if size == image.size else image.resize(size, Image.Resampling[self.interpolation.upper()])


@dataclass(frozen=True)
class CenterCrop:
    """The second step: the middle of an image, with borders of colour `fill` where the image is too small."""

    height: int
    width: int
    fill: tuple[int, ...] = BLACK

    def __call__(self, image: Image.Image) -> Image.Image:
        """The middle of the image."""
        if self.width > image.width or self.height > image.height:
            larger = Image.new("RGB", (max(self.width, image.width), max(self.height, image.height)), self.fill)
            larger.paste(image, ((larger.width - image.width) // 2, (larger.height - image.height) // 2))
            image = larger
        top, left = round((image.height - self.height) / 2), round((image.width - self.width) / 2)
        return image.crop((left, top, left + self.width, top + self.height))


def evaluation_steps(data_config: Mapping[str, Any]) -> tuple[Resize, CenterCrop]:
    """Both steps as timm's data config of a network states them."""
    _, height, width = data_config["input_size"]
    share, mode = data_config.get("crop_pct") or SHARE, data_config.get("crop_mode") or "center"
    interpolation = data_config.get("interpolation", INTERPOLATION)
    if mode not in ("center", "border", "squash") or interpolation.upper() not in Image.Resampling.__members__:
        raise DataError(f"crop mode '{mode}' with interpolation '{interpolation}' is not supported.")
    if mode == "center" and math.floor(height / share) != math.floor(width / share):
        interpolation = INTERPOLATION  # timm has one filter for images that are not square
    fill = tuple(round(255 * value) for value in data_config.get("mean", MEAN)) if mode == "border" else BLACK
    resize = Resize(math.floor(height / share), math.floor(width / share), mode, interpolation)
    return resize, CenterCrop(height, width, fill)
