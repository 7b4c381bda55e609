"""Resizes and crops images as the encoder expects them, with the encoder's own settings.

The two steps for one image are timm's evaluation transform with Pillow alone: timm and torchvision take as long to
import as torch itself. Sizes, corners and borders are rounded as they round them, so every pixel is the same
(`tests/stream/test_preprocess.py`).
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tpl.errors import DataError, UnreadableImage
from tpl.stream.decoding import to_rgb
from tpl.stream.images import ImageSet
from tpl.stream.resample import FILTERS, Geometry, matching, resample

if TYPE_CHECKING:  # torch takes seconds to import, and finding images does not need it
    import torch

# What timm fills in for a data config that does not say
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
INTERPOLATION, SHARE = "bilinear", 0.875
BLACK = (0, 0, 0)

# An image with more pixels than this many times the encoder's input is resized before it is sent to a device.
_LARGE = 4
# On a CPU Pillow's threads are as fast as matrix products, and much faster with large images.
RESIZING_DEVICES = frozenset({"cuda"})
_CHUNK = 32  # images decoded by a thread at a time, at most
_DECODED = 512  # images at a time that need not be decoded, only sent to a device and resized there
_KEYS = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")

Shrink = Callable[[Image.Image], Image.Image]
Result = TypeVar("Result")


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


class Preprocess:
    """The encoder's evaluation transform in two steps: uint8 pixels once, normalisation whenever they are used.

    `data_config` is what timm calls the data config of a model. Only `input_size` (3, height, width) must be
    given; timm's defaults fill the rest.
    """

    def __init__(self, data_config: Mapping[str, Any]) -> None:
        config = {key: data_config[key] for key in _KEYS if data_config.get(key) is not None}
        size = tuple(config.get("input_size", ()))
        if len(size) != 3 or size[0] != 3:
            raise DataError(f"the encoder's input_size must be (3, height, width), not {size}.")
        config["input_size"] = size
        self.height, self.width = int(size[1]), int(size[2])
        self.mean: tuple[float, ...] = tuple(config.setdefault("mean", MEAN))
        self.std: tuple[float, ...] = tuple(config.setdefault("std", STD))
        self._geometries: dict[tuple[int, int, torch.device], Geometry | None] = {}
        self._lock = threading.Lock()
        self._resize, self._crop = evaluation_steps(config)
        self._steps = f"{self._resize} {self._crop}"  # names them in a cache

    @property
    def bytes_per_image(self) -> int:
        """Size of one image as `batch` gives it."""
        return 3 * self.height * self.width

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """An `image` of any mode resized and cropped: uint8 [3, height, width]."""
        import torch

        cropped = self._crop(self._resize(to_rgb(image)))
        return torch.from_numpy(np.array(cropped)).permute(2, 0, 1).contiguous()

    def shrink(self, image: Image.Image) -> Image.Image:
        """An RGB `image` at the size of the resize step if that is smaller, else as it is.

        Resizing an image of that size changes nothing, so shrinking first never changes a pixel of what `__call__`
        returns.
        """
        width, height = self._resize.size(image)
        return image if width * height >= image.width * image.height else self._resize(image)

    def batch(
        self,
        images: ImageSet,
        progress: Callable[[int], None] | None = None,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """All `images` decoded, resized and cropped: uint8 [n, 3, height, width], on `device` (else on the CPU).

        A GPU resizes images of one size itself, to the same pixels. `progress` is called in this thread with
        the number of images finished since its last call.
        """
        import torch

        out = torch.empty((len(images), 3, self.height, self.width), dtype=torch.uint8, device=device or "cpu")
        resizer = out.device if out.device.type in RESIZING_DEVICES else None

        def read(chunk: range) -> tuple[range, NDArray[np.uint8], Geometry | None]:
            return chunk, *self._read(images, chunk, resizer)

        decoded = resizer is not None and len(images) > 0 and images.block(np.arange(1)) is not None
        with closing(in_chunks(read, len(images), _DECODED if decoded else None)) as chunks:
            for chunk, pixels, geometry in chunks:
                sent = torch.from_numpy(pixels).to(out.device)
                out[chunk.start : chunk.stop] = sent if geometry is None else resample(sent, geometry)
                if progress is not None:
                    progress(len(chunk))
        return out

    def normaliser(
        self, device: torch.device, dtype: torch.dtype | None = None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that normalises uint8 pixels [n, 3, h, w] on `device` as the encoder was trained.

        Its constants are on the device already: no call copies them again. The arithmetic is float32 whatever
        `dtype` the result has (by default float32, too).
        """
        import torch

        mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (self.mean, self.std))
        scale, shift = (1 / (255 * std)).float().to(device), (mean / std).float().to(device)
        wanted = dtype or torch.float32
        return lambda pixels: (pixels.float() * scale - shift).to(wanted)

    def _read(
        self, images: ImageSet, chunk: range, resizer: torch.device | None
    ) -> tuple[NDArray[np.uint8], Geometry | None]:
        """Some images [n, h, w, 3] and how to resize them, or, finished here, [n, 3, height, width] and None."""
        if resizer is not None:
            block = images.block(np.arange(chunk.start, chunk.stop))
            geometry = self._geometry(block.shape[2], block.shape[1], resizer) if block is not None else None
            if block is not None and geometry is not None:
                return block, geometry
        known = [images.recall(index, self._steps) for index in chunk]
        if all(pixels is not None and pixels.shape == (3, self.height, self.width) for pixels in known):
            return np.stack([pixels for pixels in known if pixels is not None]), None
        loaded: list[Image.Image] = []  # of one small size while `waiting`; else resized and cropped
        sizes: list[bool] = []  # whether each image is larger than what becomes of it
        waiting = resizer is not None
        for index in chunk:
            image = images.load(index)
            sizes.append(image.width * image.height > self.width * self.height)
            if waiting and not (self._small(image) and image.size == (loaded or [image])[0].size):
                waiting = False
                loaded = [self._cropped(early, images, i) for early, i in zip(loaded, chunk, strict=False)]
            loaded.append(image if waiting else self._cropped(image, images, index))
            del image  # one large image at a time
        geometry = self._geometry(*loaded[0].size, resizer) if resizer is not None and waiting else None
        if geometry is not None:
            return np.stack([np.asarray(image) for image in loaded]), geometry
        finished = np.empty((len(chunk), 3, self.height, self.width), dtype=np.uint8)
        for row, image, index in zip(finished, loaded, chunk, strict=True):
            row[:] = np.asarray(self._cropped(image, images, index) if waiting else image).transpose(2, 0, 1)
        for row, index, large in zip(finished, chunk, sizes, strict=True):
            if large:
                images.remember(index, self._steps, row)
        return finished, None

    def _cropped(self, image: Image.Image, images: ImageSet, index: int) -> Image.Image:
        """`image` resized and cropped. `images` and `index` name it in error messages."""
        target = (self.width, self.height)
        try:
            if image.size == target == self._resize.size(image):
                return image  # neither step would change a pixel
            return self._crop(self._resize(image))
        except (ValueError, MemoryError) as error:  # e.g. a strip whose short side rounds to nothing
            raise UnreadableImage(
                f"{images.name(index)} ({image.width} x {image.height}) cannot be resized: {error}"
            ) from error

    def _small(self, image: Image.Image) -> bool:
        return image.width * image.height <= _LARGE * self.width * self.height

    def _geometry(self, width: int, height: int, device: torch.device) -> Geometry | None:
        """What resize and crop do to images of this size, if the device does the same in every bit; else None."""
        key = (width, height, device)
        with self._lock:
            if key not in self._geometries:
                self._geometries[key] = self._find_geometry(Image.new("RGB", (width, height)), device)
            return self._geometries[key]

    def _find_geometry(self, blank: Image.Image, device: torch.device) -> Geometry | None:
        name = self._resize.interpolation
        width, height = self._resize.size(blank)
        if name not in FILTERS or not self._small(blank) or width < self.width or height < self.height:
            return None  # another filter, a large image, or borders to add: left to Pillow
        corner = round((height - self.height) / 2), round((width - self.width) / 2)
        crop = (self.height, self.width)
        likely = Geometry((blank.height, blank.width), (height, width), corner, crop, name)
        return matching(likely, lambda image: self._crop(self._resize(image)), device)


def try_load(images: ImageSet, index: int, shrink: Shrink) -> Image.Image | str:
    """One image, shrunk; if it cannot be read or resized, the reason as a text."""
    try:
        return shrink(images.load(index))
    except UnreadableImage as error:
        return str(error)
    except (ValueError, MemoryError) as error:
        return f"{images.name(index)} cannot be resized: {error}"


def in_chunks(work: Callable[[range], Result], count: int, size: int | None = None) -> Generator[Result]:
    """The results of `work` on chunks of the positions 0 .. count-1, in order, computed in threads.

    Without a `size`, few positions are shared out among all threads. Only a few chunks are computed ahead, as all
    results at once may not fit in memory. Close it to stop early.
    """
    workers = decoding_workers()
    size = size or max(1, min(_CHUNK, math.ceil(count / workers)))
    pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="decode")
    ahead: deque[Future[Result]] = deque()
    try:
        for start in range(0, count, size):
            ahead.append(pool.submit(work, range(start, min(start + size, count))))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def decoding_workers() -> int:
    """How many images are decoded at a time: one on each core that this process may use, at most sixteen."""
    # Affinity rather than the machine's core count: containers are often given a part of it.
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(16, available))
