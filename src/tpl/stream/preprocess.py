"""Resizes and crops images as the encoder expects them, with the encoder's own settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np
import torch
from PIL import Image

from tpl.stream.decoding import to_rgb
from tpl.stream.errors import DataError, UnreadableImage
from tpl.stream.images import ImageSet

_CHUNK = 32
_KEYS = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")


class Preprocess:
    """The encoder's evaluation transform, cut in two: uint8 pixels on the CPU, normalisation on the device.

    `data_config` is what timm calls the data config of a model. Only `input_size` (3, height, width) must be
    given; timm's defaults fill the rest.
    """

    def __init__(self, data_config: Mapping[str, Any]) -> None:
        # Imported here: slow to import, and not needed to handle image sets.
        from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
        from timm.data.transforms_factory import create_transform

        config = {key: data_config[key] for key in _KEYS if data_config.get(key) is not None}
        size = tuple(config.get("input_size", ()))
        if len(size) != 3 or size[0] != 3:
            raise DataError(f"the encoder's input_size must be (3, height, width), not {size}.")
        config["input_size"] = size
        self.height, self.width = int(size[1]), int(size[2])
        self.mean: tuple[float, ...] = tuple(config.setdefault("mean", IMAGENET_DEFAULT_MEAN))
        self.std: tuple[float, ...] = tuple(config.setdefault("std", IMAGENET_DEFAULT_STD))
        self._affines: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._transform = create_transform(**config, is_training=False, use_prefetcher=True)
        self._resize, self._crop = self._transform.transforms[:2]

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """`image` resized and cropped: uint8 [3, height, width]."""
        pixels: torch.Tensor = self._transform(to_rgb(image))
        return pixels

    def shrink(self, image: Image.Image) -> Image.Image:
        """All of `image` that is worth keeping: resized if that makes it smaller, else as it is.

        The resize leaves an image of its own output size alone, so shrinking first never changes a pixel of
        what `__call__` returns.
        """
        image = to_rgb(image)
        width, height = self._resized(image)
        if width * height >= image.width * image.height:
            return image
        smaller: Image.Image = self._resize(image)
        return smaller

    def batch(self, images: ImageSet, progress: Callable[[int], None] | None = None) -> torch.Tensor:
        """All `images` decoded, resized and cropped: uint8 [n, 3, height, width].

        `progress` is called in this thread with the number of images finished since its last call.
        """
        out = torch.empty((len(images), 3, self.height, self.width), dtype=torch.uint8)
        rows = out.numpy()  # the same memory: torch's own copy would start threads of its own in each of ours

        def fill(start: int) -> int:
            stop = min(start + _CHUNK, len(images))
            for index in range(start, stop):
                rows[index] = np.asarray(self._cropped(images, index)).transpose(2, 0, 1)
            return stop - start

        pool = ThreadPoolExecutor(max_workers=_workers(), thread_name_prefix="decode")
        try:
            for done in as_completed([pool.submit(fill, start) for start in range(0, len(images), _CHUNK)]):
                count = done.result()
                if progress is not None:
                    progress(count)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        return out

    def normalise(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 pixels [n, 3, h, w] as the float32 the encoder was trained on, on the same device."""
        if pixels.dtype != torch.uint8:
            raise TypeError(f"normalise wants uint8 pixels, not {pixels.dtype}")
        scale, shift = self._affine(pixels.device)
        return pixels.float() * scale - shift

    def _affine(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """1 / (255 std) and mean / std, copied to a device once: nothing is sent there step by step."""
        if device not in self._affines:
            mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (self.mean, self.std))
            self._affines[device] = ((1 / (255 * std)).float().to(device), (mean / std).float().to(device))
        return self._affines[device]

    def _cropped(self, images: ImageSet, index: int) -> Image.Image:
        """What `__call__` does to the image, but for its last step to a tensor."""
        image = to_rgb(images.load(index))
        target = (self.width, self.height)
        try:
            if image.size == target == self._resized(image):
                return image  # neither step would change a pixel
            cropped: Image.Image = self._crop(self._resize(image))
            return cropped
        except (ValueError, MemoryError) as error:  # e.g. a strip whose short side rounds to nothing
            raise UnreadableImage(
                f"{images.name(index)} ({image.width} x {image.height}) cannot be resized: {error}"
            ) from error

    def _resized(self, image: Image.Image) -> tuple[int, int]:
        """Width and height after the resize step, without doing it."""
        size = getattr(self._resize, "size", None)
        if isinstance(size, int):  # the short side becomes `size`, the long one keeps the ratio, truncated
            short, long = sorted(image.size)
            side = int(size * long / short)
            return (size, side) if image.width <= image.height else (side, size)
        if hasattr(self._resize, "get_params"):  # timm's ResizeKeepRatio
            height, width = self._resize.get_params(image, self._resize.size, self._resize.longest)
            return width, height
        height, width = self._resize.size
        return width, height


def _workers() -> int:
    # Affinity rather than the machine's core count: containers are often given a part of it.
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(16, available))
