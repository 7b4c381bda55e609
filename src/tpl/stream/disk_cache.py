"""Pixels kept on disk between processes, so that a benchmark that runs again decodes nothing again.

An entry is an array in a file that is named by the hash of all that decides its pixels: the content of the image files,
what was done to them, and the version of Pillow. Entries lie in `tpl/images` of the user's cache folder. Any number of
processes may share them: a file appears in one step, complete, and a missing or damaged one is made again. When
all entries take more than the limit, those that were not used for longest are deleted.

    TPL_IMAGE_CACHE=off          nothing is read or written
    TPL_IMAGE_CACHE=FOLDER       another folder
    TPL_IMAGE_CACHE_GB=2         another limit than 8 GB

Only benchmarks use it: of what `tpl learn` and `tpl predict` see, no copy is kept.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import __version__ as pillow
from PIL import features

from tpl.errors import DataError
from tpl.files import at_home, cache_folder

FOLDER, LIMIT = "TPL_IMAGE_CACHE", "TPL_IMAGE_CACHE_GB"
OFF = "off"
DEFAULT_GB = 8.0
_PARTS = 20  # a part of the limit is written between two looks at how much there is

Pixels = NDArray[np.uint8]


class DiskCache:
    """Arrays by key in a folder of at most `limit` bytes."""

    def __init__(self, folder: Path, limit: float) -> None:
        self.folder, self.limit = folder, limit
        self._lock = threading.Lock()
        self._unseen = limit  # bytes written since the last look at the folder: the first write looks

    def read(self, key: str, mapped: bool = False) -> Pixels | None:
        """The array of that key, or None; `mapped`: its pages are read from disk when they are used."""
        file = self._file(key)
        try:
            found = np.asarray(np.load(file, mmap_mode="r" if mapped else None, allow_pickle=False))
            os.utime(file)  # used just now
        except (OSError, ValueError, EOFError):  # not there, or damaged
            return None
        return found if found.dtype == np.uint8 else None

    def write(self, key: str, pixels: Pixels) -> None:
        """Keep an array; a disk that is full or not writable is no failure."""
        if pixels.nbytes > self.limit:
            return
        file = self._file(key)
        partial = ""
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".partial", delete=False) as stream:
                partial = stream.name
                np.save(stream, pixels)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, file)
        except OSError:
            with suppress(OSError):
                os.unlink(partial)
            return
        with self._lock:
            self._unseen += pixels.nbytes
            due = self._unseen > self.limit / _PARTS
            self._unseen = 0 if due else self._unseen
        if due:
            self.trim()

    def trim(self) -> None:
        """Delete the entries that were not used for longest, until the limit is kept."""
        found = []
        for file in self.folder.glob("*/*"):
            with suppress(OSError):  # another process may delete it just now
                status = file.stat()
                found.append((status.st_mtime, status.st_size, file))
        total = sum(size for _, size, _ in found)
        for _, size, file in sorted(found):
            if total <= self.limit:
                return
            with suppress(OSError):
                file.unlink()
            total -= size

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.npy"


def image_cache() -> DiskCache | None:
    """The cache that the environment asks for; None if it is off."""
    chosen = os.environ.get(FOLDER, "")
    if chosen.lower() == OFF:
        return None
    try:
        gigabytes = float(os.environ.get(LIMIT) or DEFAULT_GB)
    except ValueError:
        raise DataError(f"{LIMIT} takes a number of gigabytes; got '{os.environ[LIMIT]}'.") from None
    return DiskCache(at_home(chosen) if chosen else cache_folder() / "images", gigabytes * 1e9)


def key_of(parts: Iterable[bytes]) -> str:
    """The hash of byte strings, in order, and of the libraries that decode images."""
    digest = hashlib.sha256(_libraries())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


@cache
def _libraries() -> bytes:
    decoders = {name: features.version(name) for name in ("jpg", "webp", "zlib", "libtiff")}
    return f"Pillow {pillow} {decoders}".encode()
