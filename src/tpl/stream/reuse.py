"""Data sets that were read before in this process, handed out again while their files are the same.

Reading the directories of CIFAR-100's zip archives takes over a second, and the images decoded so far are kept with
the data set: several runs in one process share both.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from pathlib import Path

from tpl.stream.layouts import Source

MAX_SOURCES = 4
_MAX_FILES = 100

Signature = tuple[tuple[str, int, int, int], ...]

_sources: dict[Hashable, tuple[Signature, Source]] = {}
_lock = threading.Lock()


def reused(key: Hashable, place: Path, read: Callable[[], Source]) -> Source:
    """What `read` gave for this key the last time, if what lies in `place` has not changed since; else `read()`."""
    current = signature(place)
    with _lock:
        known = _sources.get(key)
    if known is not None and current is not None and known[0] == current:
        return known[1]
    source = read()
    with _lock:
        _sources.pop(key, None)
        if current is not None:
            _sources[key] = (current, source)
        while len(_sources) > MAX_SOURCES:
            del _sources[next(iter(_sources))]
    return source


def signature(place: Path) -> Signature | None:
    """Name, number, size and time of each file in `place`, two folders deep; None for larger trees.

    Looking at every file of those would take as long as reading the data set's layout again.
    """
    place = place.resolve()
    try:
        if place.is_file():
            return (_mark(str(place), place.stat()),)
        found, folders = [], [str(place)]
        for folder in folders:  # grows by the folders found in the first
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir() and folder != str(place):
                        return None
                    if entry.is_dir():
                        folders.append(entry.path)
                    found.append(_mark(entry.path, entry.stat()))
                    if len(found) > _MAX_FILES:
                        return None
        return tuple(sorted(found)) or None
    except OSError:  # not there, or not to be read: whoever reads it will say so
        return None


def _mark(path: str, status: os.stat_result) -> tuple[str, int, int, int]:
    return path, status.st_ino, status.st_size, status.st_mtime_ns
