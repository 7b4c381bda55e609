"""Images to predict: found one by one in files, folders, zips and on stdin, decoded in batches ahead of their use.

Any number of images needs the same memory: the list of them is never held.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

import numpy as np
from PIL import Image

from tpl.errors import DataError, UnreadableImage
from tpl.files import at_home
from tpl.stream.decoding import decode
from tpl.stream.folders import Archive, Entry, ZipMember, is_hidden, is_image_name, read_bytes
from tpl.stream.images import ImageSet, Labels, WrappedImages, as_labels
from tpl.stream.preprocess import Preprocess, try_load

if TYPE_CHECKING:
    import torch

STDIN = "-"
BATCH_SIZE = 256
# A folder is sorted in runs of this many entries: usual folders come in order, huge ones need constant memory.
SORTED_ENTRIES = 10_000
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Found:
    """An image to predict: its file or zip member, or why it cannot be read (then `entry` is None)."""

    name: str
    entry: Entry | None
    error: str = ""

    def read(self) -> bytes:
        """The file's content."""
        if self.entry is None:
            raise UnreadableImage(self.error)
        return read_bytes(self.entry)


def find_images(names: Iterable[str], stdin: BinaryIO | None = None) -> Iterator[Found]:
    """Every image that `names` lead to, in order: files, folders with all folders inside, zips, `-` for stdin.

    A file named directly may have any suffix; in folders and zips the suffix decides. A file that cannot be opened
    is found too, with the reason: one missing file must not end a long run.
    """
    for name in names:
        if name == STDIN and stdin is not None:
            for line in paths_from(stdin):
                yield from _images_at(line)
        else:
            yield from _images_at(name)


def paths_from(stream: BinaryIO) -> Iterator[str]:
    """Paths from a stream as they arrive: one a line, or separated by NUL as `find -print0` writes them."""
    separator, rest = b"", b""
    read = getattr(stream, "read1", stream.read)  # read1 returns what is there; read would wait for a full block
    while block := read(_READ_BYTES):
        rest += block
        if not separator and (b"\0" in rest or b"\n" in rest):
            separator = b"\0" if b"\0" in rest else b"\n"
        if separator:
            *complete, rest = rest.split(separator)
            yield from filter(None, map(_as_path, complete))
    yield from filter(None, [_as_path(rest)])


def _as_path(raw: bytes) -> str:
    return os.fsdecode(raw.removesuffix(b"\r"))


def _images_at(name: str) -> Iterator[Found]:
    path = at_home(name)
    try:
        if path.is_dir():
            yield from _images_in_folder(path)
        elif path.is_file() and path.suffix.lower() == ".zip":
            yield from _images_in_zip(path)
        elif path.exists():
            yield Found(str(path), path)
        else:
            yield Found(str(path), None, f"{path} does not exist: check the path.")
    except (OSError, ValueError) as error:  # no permission to look, a name too long, a NUL inside
        yield Found(str(path), None, f"{path} cannot be read ({_reason(error)}).")


def _images_in_zip(path: Path) -> Iterator[Found]:
    try:
        archive = Archive(path)
    except DataError as error:
        yield Found(str(path), None, str(error))
        return
    for member in archive.members():
        parts = [part for part in member.replace("\\", "/").split("/") if part]
        if parts and is_image_name(member) and not any(map(is_hidden, parts)):
            entry = ZipMember(archive, member)
            yield Found(str(entry), entry)


def _images_in_folder(root: Path) -> Iterator[Found]:
    """All images below a folder. Links are followed, but not back into a folder that contains them."""
    open_folders: list[tuple[tuple[int, int], Iterator[os.DirEntry[str]]]] = []

    def enter(folder: str) -> Iterator[Found]:
        status = os.stat(folder)
        identity = status.st_dev, status.st_ino
        if identity in (outer for outer, _ in open_folders):
            return
        try:
            open_folders.append((identity, _entries(folder)))
        except OSError as error:
            yield Found(folder, None, f"{folder} cannot be read ({_reason(error)}).")

    yield from enter(str(root))
    while open_folders:
        entry = next(open_folders[-1][1], None)
        if entry is None:
            open_folders.pop()
        elif entry.is_dir():
            yield from enter(entry.path)
        elif is_image_name(entry.name):
            yield Found(entry.path, Path(entry.path))


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    scan = os.scandir(folder)  # here, not in the generator: a folder that cannot be opened is an error at once

    def in_order() -> Iterator[os.DirEntry[str]]:
        with scan:
            while run := list(islice(scan, SORTED_ENTRIES)):
                yield from sorted((e for e in run if not is_hidden(e.name)), key=lambda e: e.name)

    return in_order()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


@dataclass(frozen=True)
class Batch:
    """Some images as the encoder takes them. `errors` has a reason for each unreadable one, None for the others.

    `pixels` holds the readable ones alone, in order: uint8 [n, 3, height, width].
    """

    names: tuple[str, ...]
    labels: Labels
    errors: tuple[str | None, ...]
    pixels: torch.Tensor


class ImageFile(Protocol):
    """An image file of any kind; `read` raises UnreadableImage where its content cannot be read."""

    @property
    def name(self) -> str:
        """What error messages and results call the file."""

    def read(self) -> bytes:
        """The file's content."""


def batches(found: Iterable[ImageFile], preprocess: Preprocess, size: int = BATCH_SIZE) -> Generator[Batch]:
    """`found` in batches of `size`, decoded in threads while the one before is in use. Three are held at most."""
    source = iter(found)
    parts = iter(lambda: tuple(islice(source, size)), ())
    return _in_background(_decoded(_FoundImages(part), preprocess) for part in parts)


def batches_of(images: ImageSet, preprocess: Preprocess, size: int = BATCH_SIZE) -> Generator[Batch]:
    """Labelled images in batches of `size`, decoded in threads while the one before is in use."""
    starts = range(0, len(images), size)
    parts = (images.select(np.arange(start, min(start + size, len(images)))) for start in starts)
    return _in_background(_decoded(part, preprocess) for part in parts)


def _in_background(items: Iterable[Batch]) -> Generator[Batch]:
    """`items`, made in a background thread, one ahead of their use; close the generator to stop early.

    Finding the next image may wait for input on stdin. Neither a batch that is ready nor the end of the program
    waits for that, hence a daemon thread rather than a pool, which is joined at the end.
    """
    made: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=1)
    stopped = threading.Event()

    def put(item: Batch | BaseException | None) -> None:
        while not stopped.is_set():
            with suppress(queue.Full):
                made.put(item, timeout=0.1)
                return

    def work() -> None:
        try:
            for item in items:
                put(item)
                if stopped.is_set():
                    return
            put(None)
        except BaseException as error:  # raised again in the consumer's thread
            put(error)

    threading.Thread(target=work, name="batches", daemon=True).start()
    try:
        while (item := made.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()


def _decoded(images: ImageSet, preprocess: Preprocess) -> Batch:
    tolerant = _Tolerant(images, preprocess)
    pixels = preprocess.batch(tolerant)
    readable = [i for i, error in enumerate(tolerant.errors) if error is None]
    names = tuple(images.name(i) for i in range(len(images)))
    if len(readable) < len(images):
        pixels = pixels[readable]
    return Batch(names, images.labels, tuple(tolerant.errors), pixels)


class _FoundImages(ImageSet):
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


class _Tolerant(WrappedImages):
    """Images of another set; an unreadable one is replaced by a blank image and its reason noted in `errors`."""

    def __init__(self, images: ImageSet, preprocess: Preprocess) -> None:
        super().__init__(images)
        self._preprocess = preprocess
        self.errors: list[str | None] = [None] * len(images)

    def load(self, index: int) -> Image.Image:
        loaded = try_load(self._images, index, self._preprocess.shrink)
        if isinstance(loaded, Image.Image):
            return loaded
        self.errors[index] = loaded
        return Image.new("RGB", (self._preprocess.width, self._preprocess.height))
