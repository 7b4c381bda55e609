"""Indexable sets of labelled images that are decoded only when they are loaded."""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from tpl.errors import DataError, TaskClosed
from tpl.stream.disk_cache import DiskCache, key_of

Labels = NDArray[np.int64]
DecodeAll = Callable[[int], NDArray[np.uint8] | None]  # all images `[n, height, width, 3]`, in at most so many bytes

MAX_CACHED_BYTES = 1 << 28  # 50 000 images of 32 x 32 take 154 MB
MAX_MAPPED_BYTES = 1 << 31  # in a file of the cache on disk: 100 000 images of 64 x 64 take 1.2 GB


class ImageSet(ABC):
    """Labelled images by index. Labels are indices into the `classes` of the task that owns the set."""

    @property
    @abstractmethod
    def labels(self) -> Labels:
        """One class index per image (int64, read-only)."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def load(self, index: int) -> Image.Image:
        """The image as RGB; raises UnreadableImage, naming the file, where it cannot be decoded."""

    def size(self, index: int) -> tuple[int, int]:
        """Width and height in pixels, as stored; of a file, its header says so. Raises UnreadableImage."""
        return self.load(index).size

    @abstractmethod
    def name(self, index: int) -> str:
        """Where the image comes from: a path, or something like "digits[17]"."""

    @abstractmethod
    def identity(self, index: int) -> bytes:
        """Bytes that identify the image's content and are cheap to read: for hashes of a data set."""

    def content(self, index: int) -> bytes:
        """Bytes that differ if the image's content differs: for a cache."""
        return self.identity(index)

    def block(self, indices: NDArray[np.int64]) -> NDArray[np.uint8] | None:
        """The images at `indices` as one array [n, h, w, 3], if the set holds arrays of one size; else None."""
        return None

    def recall(self, index: int, steps: str) -> NDArray[np.uint8] | None:
        """The pixels that `remember` was given for these `steps`, perhaps by another process; else None."""
        return None

    def remember(self, index: int, steps: str, pixels: NDArray[np.uint8]) -> None:  # noqa: B027 (most keep nothing)
        """Keep what became of an image by some `steps`, such as resizing."""

    def select(self, indices: ArrayLike) -> ImageSet:
        """The images at `indices` (or where a boolean mask is true), in that order; pixels are not copied."""
        chosen = positions(indices, len(self))
        return relabelled(self, chosen, self.labels[chosen])


class WrappedImages(ImageSet):
    """Base for a set that loads another set's images in its own way."""

    def __init__(self, images: ImageSet) -> None:
        self._images = images

    @property
    def labels(self) -> Labels:
        return self._images.labels

    def __len__(self) -> int:
        return len(self._images)

    def size(self, index: int) -> tuple[int, int]:
        return self._images.size(index)

    def name(self, index: int) -> str:
        return self._images.name(index)

    def identity(self, index: int) -> bytes:
        return self._images.identity(index)

    def content(self, index: int) -> bytes:
        return self._images.content(index)


class ArrayImages(ImageSet):
    """Images held in memory: uint8 `pixels` of shape [n, h, w, 3], or [n, h, w] for grey ones."""

    def __init__(self, pixels: NDArray[np.uint8], labels: ArrayLike, origin: str = "images") -> None:
        grey_or_rgb = pixels.ndim == 3 or (pixels.ndim == 4 and pixels.shape[3] == 3)
        if pixels.dtype != np.uint8 or not grey_or_rgb:
            raise DataError(
                f"{origin}: pixels must be uint8 of shape [n, h, w] or [n, h, w, 3], "
                f"not {pixels.dtype} of shape {list(pixels.shape)}."
            )
        self._pixels = pixels
        self._labels = as_labels(labels, len(pixels), origin)
        self._origin = origin

    @property
    def labels(self) -> Labels:
        return self._labels

    def __len__(self) -> int:
        return len(self._pixels)

    def load(self, index: int) -> Image.Image:
        return Image.fromarray(self._pixels[in_range(index, len(self))]).convert("RGB")

    def name(self, index: int) -> str:
        return f"{self._origin}[{in_range(index, len(self))}]"

    def block(self, indices: NDArray[np.int64]) -> NDArray[np.uint8] | None:
        chosen: NDArray[np.uint8] = self._pixels[positions(indices, len(self))]
        return chosen if chosen.ndim == 4 else np.stack([chosen] * 3, axis=3)

    def identity(self, index: int) -> bytes:
        content: bytes = self._pixels[in_range(index, len(self))].tobytes()
        return content


class CachedImages(WrappedImages):
    """Images of another set, each decoded when it is first loaded and then held in memory; safe to use from any thread.

    Only images of the first one's size are held, and none if all of that size would take more than
    `MAX_CACHED_BYTES`: the others are decoded every time. When all images are held, `cache` keeps them for later
    processes, which decode none. Where other processes decode all images at once, up to `MAX_MAPPED_BYTES` are kept
    there, and read from the file when they are used.
    """

    def __init__(self, images: ImageSet, cache: DiskCache | None = None, decode_all: DecodeAll | None = None) -> None:
        super().__init__(images)
        self._decode_all = decode_all
        self._lock = threading.Lock()
        self._pixels: NDArray[np.uint8] | None = None  # allocated for the first image, filled one by one
        self._cached = np.zeros(len(images), dtype=bool)
        self._cache = cache
        self._key = ""  # of all images in the cache
        self._prepared = False

    def load(self, index: int) -> Image.Image:
        self._prepare()
        if self._pixels is not None and 0 <= index < len(self) and self._cached[index]:
            return Image.fromarray(self._pixels[index])
        image = self._images.load(index)
        self._store(index, image)
        return image

    def block(self, indices: NDArray[np.int64]) -> NDArray[np.uint8] | None:
        self._prepare()
        chosen = positions(indices, len(self))
        for index in chosen[~self._cached[chosen]].tolist():
            if not self._store(index, self._images.load(index)):
                return None
        return self._pixels[chosen] if self._pixels is not None else None

    def _store(self, index: int, image: Image.Image) -> bool:
        """Whether the image could be cached. Two threads may both do so: they write the same pixels."""
        shape = (image.height, image.width, 3)
        with self._lock:
            if self._pixels is None and len(self) * image.height * image.width * 3 <= MAX_CACHED_BYTES:
                self._pixels = np.zeros((len(self), *shape), dtype=np.uint8)
        if self._pixels is None or self._pixels.shape[1:] != shape:
            return False
        self._pixels[index] = np.asarray(image)
        with self._lock:
            last = np.count_nonzero(self._cached) == len(self) - 1 and not self._cached[index]
            self._cached[index] = True  # after the pixels, which another thread may read from now on
        if last and self._cache is not None:
            self._cache.write(self._key, self._pixels)
        return True

    def _prepare(self) -> None:
        """Take all images from the cache, or decode all at once if that is faster; when the first one is needed."""
        with self._lock:
            if self._prepared:
                return
            self._prepared = True
            found = self._kept()
            if found is None:
                mapped = min(MAX_MAPPED_BYTES, self._cache.limit) if self._cache is not None else 0
                most = max(MAX_CACHED_BYTES, int(mapped))
                found = self._decode_all(most) if self._decode_all is not None else None
                if found is not None and self._cache is not None:
                    self._cache.write(self._key, found)
                    kept = self._kept() if found.nbytes > MAX_CACHED_BYTES else None
                    found = found if kept is None else kept
            if found is not None:
                self._pixels, self._cached = found, np.ones(len(self), dtype=bool)

    def _kept(self) -> NDArray[np.uint8] | None:
        """All images, from the cache on disk."""
        if self._cache is None:
            return None
        if not self._key:
            self._key = key_of(self.content(index) for index in range(len(self)))
        found = self._cache.read(self._key, mapped=True)
        return found if found is not None and found.ndim == 4 and found.shape[::3] == (len(self), 3) else None


class PreparedImages(WrappedImages):
    """Images of another set; what preprocessing makes of the large ones is kept in a cache on disk."""

    def __init__(self, images: ImageSet, cache: DiskCache) -> None:
        super().__init__(images)
        self._cache = cache

    def load(self, index: int) -> Image.Image:
        return self._images.load(index)

    def recall(self, index: int, steps: str) -> NDArray[np.uint8] | None:
        return self._cache.read(self._key(index, steps))

    def remember(self, index: int, steps: str, pixels: NDArray[np.uint8]) -> None:
        self._cache.write(self._key(index, steps), pixels)

    def _key(self, index: int, steps: str) -> str:
        return key_of((self.content(index), steps.encode()))


class _View(ImageSet):
    """Images selected from one or several sets, with labels of its own. Views of views are flattened."""

    def __init__(
        self, parts: Sequence[ImageSet], part: NDArray[np.int64], index: NDArray[np.int64], labels: Labels
    ) -> None:
        self._parts = tuple(parts)
        self._part = part
        self._index = index
        self._labels = as_labels(labels, len(index), "selection")

    @property
    def labels(self) -> Labels:
        return self._labels

    def __len__(self) -> int:
        return len(self._index)

    def load(self, index: int) -> Image.Image:
        part, position = self._locate(index)
        return part.load(position)

    def size(self, index: int) -> tuple[int, int]:
        part, position = self._locate(index)
        return part.size(position)

    def name(self, index: int) -> str:
        part, position = self._locate(index)
        return part.name(position)

    def identity(self, index: int) -> bytes:
        part, position = self._locate(index)
        return part.identity(position)

    def content(self, index: int) -> bytes:
        part, position = self._locate(index)
        return part.content(position)

    def recall(self, index: int, steps: str) -> NDArray[np.uint8] | None:
        part, position = self._locate(index)
        return part.recall(position, steps)

    def remember(self, index: int, steps: str, pixels: NDArray[np.uint8]) -> None:
        part, position = self._locate(index)
        part.remember(position, steps, pixels)

    def block(self, indices: NDArray[np.int64]) -> NDArray[np.uint8] | None:
        chosen = positions(indices, len(self))
        joined: NDArray[np.uint8] | None = None
        for number, part in enumerate(self._parts):
            mine = self._part[chosen] == number
            if not mine.any():
                continue
            block = part.block(self._index[chosen[mine]])
            if block is None or (joined is not None and block.shape[1:] != joined.shape[1:]):
                return None
            if len(block) == len(chosen):
                return block
            if joined is None:
                joined = np.empty((len(chosen), *block.shape[1:]), dtype=np.uint8)
            joined[mine] = block
        return joined

    def _locate(self, index: int) -> tuple[ImageSet, int]:
        index = in_range(index, len(self))
        return self._parts[int(self._part[index])], int(self._index[index])

    def _selected(self, chosen: NDArray[np.int64], labels: Labels) -> _View:
        return _View(self._parts, self._part[chosen], self._index[chosen], labels)


class TrainingAccess:
    """Whether a task's training data may still be read; shared by a guarded set and everything selected from it."""

    def __init__(self, task: str) -> None:
        self.task = task
        self.closed = False


class GuardedImages(ImageSet):
    """A set whose images and labels can be read only while the training data of all its tasks is open."""

    def __init__(self, inner: ImageSet, access: Sequence[TrainingAccess]) -> None:
        outer: Sequence[TrainingAccess] = inner._access if isinstance(inner, GuardedImages) else ()
        self._inner: ImageSet = inner._open() if isinstance(inner, GuardedImages) else inner
        self._access: tuple[TrainingAccess, ...] = tuple(dict.fromkeys([*outer, *access]))

    @property
    def labels(self) -> Labels:
        return self._open().labels

    def __len__(self) -> int:
        return len(self._inner)

    def load(self, index: int) -> Image.Image:
        return self._open().load(index)

    def name(self, index: int) -> str:
        return self._inner.name(index)

    def identity(self, index: int) -> bytes:
        return self._open().identity(index)

    def content(self, index: int) -> bytes:
        return self._open().content(index)

    def recall(self, index: int, steps: str) -> NDArray[np.uint8] | None:
        return self._open().recall(index, steps)

    def remember(self, index: int, steps: str, pixels: NDArray[np.uint8]) -> None:
        self._open().remember(index, steps, pixels)

    def block(self, indices: NDArray[np.int64]) -> NDArray[np.uint8] | None:
        return self._open().block(indices)

    def _open(self) -> ImageSet:
        for access in self._access:
            if access.closed:
                raise TaskClosed(
                    f"The training data of {access.task!r} is closed: it is handed over once, and the next task has "
                    "begun. Keep what later tasks need (features, a replay memory) while the task is open."
                )
        return self._inner


def relabelled(images: ImageSet, indices: ArrayLike, labels: ArrayLike) -> ImageSet:
    """The images at `indices` under new `labels`; what is selected from a guarded set is closed with it."""
    chosen = positions(indices, len(images))
    new = as_labels(labels, len(chosen), "selection")
    if isinstance(images, GuardedImages):
        return GuardedImages(relabelled(images._open(), chosen, new), images._access)
    if isinstance(images, _View):
        return images._selected(chosen, new)
    return _View([images], np.zeros(len(chosen), np.int64), chosen, new)


def concatenate(sets: Sequence[ImageSet], label_offsets: Sequence[int]) -> ImageSet:
    """All `sets` in a row; `label_offsets[i]` is added to the labels of set i."""
    if not sets or len(sets) != len(label_offsets):
        raise DataError(f"cannot join {len(sets)} image sets with {len(label_offsets)} label offsets.")
    access: list[TrainingAccess] = []
    labels = np.concatenate([images.labels + offset for images, offset in zip(sets, label_offsets, strict=True)])
    parts: dict[ImageSet, int] = {}  # tasks cut from one data set share it: list it once
    part_columns, index_columns = [], []
    for images in sets:
        if isinstance(images, GuardedImages):
            access += images._access
            images = images._open()
        view = images if isinstance(images, _View) else _whole(images)
        numbers = np.array([parts.setdefault(part, len(parts)) for part in view._parts], dtype=np.int64)
        part_columns.append(numbers[view._part])
        index_columns.append(view._index)
    joined = _View(list(parts), np.concatenate(part_columns), np.concatenate(index_columns), labels)
    return GuardedImages(joined, access) if access else joined


def fingerprint(sets: Sequence[ImageSet | None]) -> str:
    """The sha256 of a data set: over every image's identity and label, in order."""
    digest = hashlib.sha256()
    for images in sets:
        if images is None:
            continue
        for index, label in enumerate(images.labels.tolist()):
            digest.update(f"{label} ".encode())
            digest.update(images.identity(index))
    return digest.hexdigest()


def as_labels(labels: ArrayLike, count: int, origin: str) -> Labels:
    """`labels` as a read-only int64 vector of length `count`."""
    given = np.asarray(labels)
    if given.shape != (count,) or (count and given.dtype.kind not in "iu"):
        raise DataError(
            f"{origin}: {count} images need {count} whole-number labels, not {given.dtype} of shape {given.shape}."
        )
    fixed: Labels = given.astype(np.int64)
    fixed.flags.writeable = False
    return fixed


def in_range(index: int, count: int) -> int:
    """`index`, if it is in 0 .. count-1. Negative indices are refused: a label of -1 is no position."""
    if not 0 <= index < count:
        raise IndexError(f"image {index} of {count}")
    return index


def _whole(images: ImageSet) -> _View:
    return _View([images], np.zeros(len(images), np.int64), np.arange(len(images)), images.labels)


def positions(indices: ArrayLike, count: int) -> NDArray[np.int64]:
    """Indices, or where a mask is true, as positions in 0 .. count-1."""
    given = np.asarray(indices)
    if given.dtype == np.bool_ and given.shape == (count,):
        return np.flatnonzero(given)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise IndexError(f"select wants a list of indices or a mask of length {count}, not shape {given.shape}")
    found: NDArray[np.int64] = given.astype(np.int64)
    if found.size and not (found.min() >= 0 and found.max() < count):
        raise IndexError(f"select: indices {found.min()} .. {found.max()} of {count} images")
    return found
