"""Small images that are decoded once and then kept: a data set of them fits in memory many times over."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tpl.stream.images import ImageSet, Wrapped, positions

# 50 000 images of 32 x 32 take 154 MB.
MAX_BYTES = 1 << 28


class KeptImages(Wrapped):
    """`images`, each decoded the first time it is asked for and then held in memory, from any thread.

    Only images of one size are held, that of the first, and none if they would take more than `MAX_BYTES`: those
    are decoded every time.
    """

    def __init__(self, images: ImageSet) -> None:
        super().__init__(images)
        self._lock = threading.Lock()
        self._pixels: NDArray[np.uint8] | None = None  # made for the first image; its pages fill as images do
        self._known = np.zeros(len(images), dtype=bool)

    def load(self, index: int) -> Image.Image:
        if self._pixels is not None and 0 <= index < len(self) and self._known[index]:
            return Image.fromarray(self._pixels[index])
        image = self._images.load(index)
        self._keep(index, image)
        return image

    def block(self, indices: NDArray[np.int64]) -> NDArray[np.uint8] | None:
        chosen = positions(indices, len(self))
        for index in chosen[~self._known[chosen]].tolist():
            if not self._keep(index, self._images.load(index)):
                return None
        return self._pixels[chosen] if self._pixels is not None else None

    def _keep(self, index: int, image: Image.Image) -> bool:
        """Whether the image could be kept. Two threads may both do so: they write the same pixels."""
        shape = (image.height, image.width, 3)
        with self._lock:
            if self._pixels is None and len(self) * image.height * image.width * 3 <= MAX_BYTES:
                self._pixels = np.zeros((len(self), *shape), dtype=np.uint8)
        if self._pixels is None or self._pixels.shape[1:] != shape:
            return False
        self._pixels[index] = np.asarray(image)
        self._known[index] = True  # only now: another thread may read as soon as it is
        return True
