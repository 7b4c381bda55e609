"""Reads images to learn from once, before any training: the unreadable are named, the others stay at hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tpl.stream.errors import UnreadableImage
from tpl.stream.images import ImageSet, Wrapped, in_range
from tpl.stream.threads import in_chunks

# Shrunk images that are kept: about 3 500 of them for an encoder of 224 pixels. Others are decoded again when needed.
MAX_BYTES = 1 << 29

Shrink = Callable[[Image.Image], Image.Image]
Pixels = NDArray[np.uint8]


def readable(
    images: ImageSet, shrink: Shrink, progress: Callable[[int], None] | None = None
) -> tuple[ImageSet, list[str]]:
    """Those of `images` that can be read, shrunk as far as the encoder allows, and why the others cannot be.

    `progress` is called with the number of images tried since its last call.
    """

    def read(chunk: range) -> list[Pixels | str]:
        return [_read(images, index, shrink) for index in chunk]

    good: list[int] = []
    kept: list[Pixels | None] = []
    problems: list[str] = []
    taken = 0
    with closing(in_chunks(read, len(images))) as chunks:
        for chunk in chunks:
            for index, found in enumerate(chunk, start=len(good) + len(problems)):
                if isinstance(found, str):
                    problems.append(found)
                    continue
                good.append(index)
                taken += found.nbytes
                kept.append(found if taken <= MAX_BYTES else None)
            if progress is not None:
                progress(len(chunk))
    return Shrunk(images.select(good), kept, shrink), problems


class Shrunk(Wrapped):
    """Images that were read before and, where there was room, kept at the size that is worth keeping."""

    def __init__(self, images: ImageSet, kept: list[Pixels | None], shrink: Shrink) -> None:
        super().__init__(images)
        self._kept, self._shrink = kept, shrink

    def load(self, index: int) -> Image.Image:
        pixels = self._kept[in_range(index, len(self))]
        return self._shrink(self._images.load(index)) if pixels is None else Image.fromarray(pixels)


def _read(images: ImageSet, index: int, shrink: Shrink) -> Pixels | str:
    try:
        return np.array(shrink(images.load(index)))
    except UnreadableImage as error:
        return str(error)
    except (ValueError, MemoryError) as error:
        return f"{images.name(index)} cannot be resized: {error}"
