"""Decodes found images in batches, one batch ahead of whoever predicts them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import numpy as np
from PIL import Image

from tpl.stream.decoding import decode
from tpl.stream.errors import UnreadableImage
from tpl.stream.images import ImageSet, Labels, Wrapped, as_labels
from tpl.stream.preprocess import Preprocess

if TYPE_CHECKING:
    import torch

SIZE = 256


@dataclass(frozen=True)
class Batch:
    """Some images made ready. `errors` has a reason for each that cannot be read and None for the others.

    `pixels` holds the readable ones alone, in order: uint8 [n, 3, height, width].
    """

    names: tuple[str, ...]
    labels: Labels
    errors: tuple[str | None, ...]
    pixels: torch.Tensor


class ImageFile(Protocol):
    """An image file, wherever it lies; UnreadableImage where its content cannot be had."""

    @property
    def name(self) -> str:
        """What it is called where it came from."""

    def read(self) -> bytes:
        """Its content."""


def batches(found: Iterable[ImageFile], preprocess: Preprocess, size: int = SIZE) -> Generator[Batch]:
    """`found` in batches of `size`, decoded in threads while the one before is in use. Three are held at most."""
    source = iter(found)
    return _ahead(_ready(_Found(some), preprocess) for some in iter(lambda: tuple(islice(source, size)), ()))


def batches_of(images: ImageSet, preprocess: Preprocess, size: int = SIZE) -> Generator[Batch]:
    """The same for labelled images."""
    starts = range(0, len(images), size)
    parts = (images.select(np.arange(start, min(start + size, len(images)))) for start in starts)
    return _ahead(_ready(part, preprocess) for part in parts)


def _ahead(items: Iterable[Batch]) -> Generator[Batch]:
    """`items`, made in a thread of its own, one ahead of whoever takes them; close it to stop early.

    Finding the next image may wait for whoever writes to stdin. Neither a batch that is ready nor the end of the
    program waits for that, hence a daemon thread rather than a pool, which is joined at the end.
    """
    made: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=1)
    stopped = threading.Event()

    def hand_over(item: Batch | BaseException | None) -> None:
        while not stopped.is_set():
            with suppress(queue.Full):
                made.put(item, timeout=0.1)
                return

    def work() -> None:
        try:
            for item in items:
                hand_over(item)
                if stopped.is_set():
                    return
            hand_over(None)
        except BaseException as error:  # raised where the batches are taken
            hand_over(error)

    threading.Thread(target=work, name="batches ahead", daemon=True).start()
    try:
        while (item := made.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()


def _ready(images: ImageSet, preprocess: Preprocess) -> Batch:
    tolerant = _Tolerant(images, preprocess)
    pixels = preprocess.batch(tolerant)
    readable = [i for i, error in enumerate(tolerant.errors) if error is None]
    names = tuple(images.name(i) for i in range(len(images)))
    kept = pixels if len(readable) == len(images) else pixels[readable]
    return Batch(names, images.labels, tuple(tolerant.errors), kept)


class _Found(ImageSet):
    """Found images, without labels."""

    def __init__(self, found: tuple[ImageFile, ...]) -> None:
        self._found = found

    @property
    def labels(self) -> Labels:
        return as_labels([-1] * len(self), len(self), "found images")

    def __len__(self) -> int:
        return len(self._found)

    def load(self, index: int) -> Image.Image:
        item = self._found[index]
        return decode(item.read(), item.name)

    def name(self, index: int) -> str:
        return self._found[index].name

    def identity(self, index: int) -> bytes:
        return self._found[index].name.encode(errors="surrogateescape")


class _Tolerant(Wrapped):
    """Images of which an unreadable one is a blank, and its reason noted."""

    def __init__(self, images: ImageSet, preprocess: Preprocess) -> None:
        super().__init__(images)
        self._preprocess = preprocess
        self.errors: list[str | None] = [None] * len(images)

    def load(self, index: int) -> Image.Image:
        try:
            return self._preprocess.shrink(self._images.load(index))
        except UnreadableImage as error:
            self.errors[index] = str(error)
        except (ValueError, MemoryError) as error:
            self.errors[index] = f"{self.name(index)} cannot be resized: {error}"
        return Image.new("RGB", (self._preprocess.width, self._preprocess.height))
