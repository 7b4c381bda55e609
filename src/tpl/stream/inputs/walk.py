"""Finds images to predict, one by one: files, folders, zips, paths on stdin. Never holds the list of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from tpl.stream.errors import DataError, UnreadableImage
from tpl.stream.files import Archive, Entry, ZipMember, _hidden, is_image_name, read_bytes

STDIN = "-"
# A folder is sorted in pieces of this many entries: usual folders come in order, huge ones in constant memory.
_SORTED = 10_000
_READ = 1 << 16


@dataclass(frozen=True)
class Found:
    """Something to predict: where it lies, or why it cannot be read (then `entry` is None)."""

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

    A file that is named itself is taken whatever its suffix; in folders and zips the suffix decides. What cannot
    be opened is found too, with the reason: one missing file must not end a long run.
    """
    for name in names:
        if name == STDIN and stdin is not None:
            for line in paths_from(stdin):
                yield from _below(line)
        else:
            yield from _below(name)


def paths_from(stream: BinaryIO) -> Iterator[str]:
    """Paths from a stream as they arrive: one a line, or separated by NUL as `find -print0` writes them."""
    separator, rest = b"", b""
    read = getattr(stream, "read1", stream.read)  # read1 hands on what is there; read would wait for a full piece
    while piece := read(_READ):
        rest += piece
        if not separator and (b"\0" in rest or b"\n" in rest):
            separator = b"\0" if b"\0" in rest else b"\n"
        if separator:
            *complete, rest = rest.split(separator)
            yield from filter(None, map(_as_path, complete))
    yield from filter(None, [_as_path(rest)])


def _as_path(raw: bytes) -> str:
    return os.fsdecode(raw.removesuffix(b"\r"))


def _below(name: str) -> Iterator[Found]:
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            yield from _walk(path)
        elif path.is_file() and path.suffix.lower() == ".zip":
            yield from _members(path)
        elif path.exists():
            yield Found(str(path), path)
        else:
            yield Found(str(path), None, f"{path} does not exist: check the path.")
    except (OSError, ValueError) as error:  # no permission to look, a name too long, a NUL inside
        yield Found(str(path), None, f"{path} cannot be read ({_reason(error)}).")


def _members(path: Path) -> Iterator[Found]:
    try:
        archive = Archive(path)
    except DataError as error:
        yield Found(str(path), None, str(error))
        return
    for member in archive.members():
        parts = [part for part in member.replace("\\", "/").split("/") if part]
        if parts and is_image_name(member) and not any(map(_hidden, parts)):
            entry = ZipMember(archive, member)
            yield Found(str(entry), entry)


def _walk(root: Path) -> Iterator[Found]:
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
    scan = os.scandir(folder)  # here, not in the generator: whoever calls learns at once that it cannot be opened

    def in_order() -> Iterator[os.DirEntry[str]]:
        with scan:
            while piece := list(islice(scan, _SORTED)):
                yield from sorted((e for e in piece if not _hidden(e.name)), key=lambda e: e.name)

    return in_order()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
