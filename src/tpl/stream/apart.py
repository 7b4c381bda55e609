"""Decodes many small image files in other processes.

Most of the time that a small image takes is Python's, and threads of one process share that: sixteen of them are no
faster than one. Each process gets a part of the files' names on its standard input and answers with their pixels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpl.errors import UnreadableImage
from tpl.stream.folders import Archive, Entry, FileImages, ZipMember
from tpl.stream.preprocess import decoding_workers

MANY = 5000  # images: with fewer, starting processes takes longer than it saves
FEWEST_CORES = 4
SMALL_PIXELS = 128 * 128  # of larger images, most time is a decoder's, which threads do not share


def decode_apart(entries: Sequence[Entry], most: int) -> NDArray[np.uint8] | None:
    """All pictures, `[n, height, width, 3]`; None where processes do not help, or not all pictures can be had so.

    So it is if all together would take more than `most` bytes, or if one has another size than the first or cannot be
    read: whoever loads that one hears why.
    """
    cores = decoding_workers()
    if len(entries) < MANY or cores < FEWEST_CORES or not _fit(entries, most):
        return None
    bounds = np.linspace(0, len(entries), cores + 1).astype(int)
    with ThreadPoolExecutor(cores) as pool:  # a thread waits for each process
        parts = list(pool.map(_part, (entries[a:b] for a, b in pairwise(bounds))))
    found = [part for part in parts if part is not None]
    same = len(found) == cores and len({part.shape[1:] for part in found}) == 1
    return np.concatenate(found) if same else None


def _fit(entries: Sequence[Entry], most: int) -> bool:
    """Whether all pictures are small and together take at most so many bytes, if all are as large as the first."""
    try:
        first = FileImages(entries[:1]).load(0)
    except UnreadableImage:
        return False
    return first.width * first.height <= SMALL_PIXELS and 3 * first.width * first.height * len(entries) <= most


def _part(entries: Sequence[Entry]) -> NDArray[np.uint8] | None:
    """The pictures of some files, decoded by one process; None if it fails."""
    names = [(str(e.archive.path), e.member) if isinstance(e, ZipMember) else (str(e), None) for e in entries]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(names).encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        check=False,
    )
    if done.returncode:
        return None
    pixels: NDArray[np.uint8] = np.load(BytesIO(done.stdout), allow_pickle=False)
    return pixels


def main() -> None:
    """One of the processes: names as JSON on standard input, an array of pixels on standard output."""
    names: list[tuple[str, str | None]] = json.load(sys.stdin)
    archives = {path: Archive(Path(path)) for path in {path for path, member in names if member is not None}}
    entries = [Path(path) if member is None else ZipMember(archives[path], member) for path, member in names]
    images = FileImages(entries)
    first = np.asarray(images.load(0))
    pixels = np.empty((len(images), *first.shape), dtype=np.uint8)
    for index in range(len(images)):
        picture = images.load(index)
        if (picture.height, picture.width, 3) != first.shape:
            sys.exit(1)
        pixels[index] = np.asarray(picture)
    np.save(sys.stdout.buffer, pixels)


if __name__ == "__main__":
    main()
