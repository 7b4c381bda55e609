"""Images in folders and zip archives: what is there, and reading it lazily from any thread."""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image

from tpl.stream.decoding import SUFFIXES, decode
from tpl.stream.errors import DataError, UnreadableImage
from tpl.stream.images import ImageSet, Labels, as_labels, in_range

# No photograph is this large; a file that claims to be is a mistake or an attack on memory.
MAX_FILE_BYTES = 1 << 30


class Archive:
    """A zip file kept open for reading; a lock makes it safe to share between threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} cannot be opened as a zip archive ({error}): get it again.") from error
        self._lock = threading.Lock()

    def members(self) -> list[str]:
        """The names of all members, folders with a trailing slash."""
        return self._zip.namelist()

    def checksum(self, member: str) -> bytes:
        """CRC and size of one member, from the archive's directory."""
        info = self._zip.getinfo(member)
        return f"{member} {info.CRC:08x} {info.file_size}".encode()

    def read(self, member: str) -> bytes:
        """The content of one member, checked against the archive's checksum."""
        with self._lock:
            if self._zip.getinfo(member).file_size > MAX_FILE_BYTES:
                raise OSError(f"larger than {MAX_FILE_BYTES >> 20} MiB")
            return self._zip.read(member)


@dataclass(frozen=True)
class ZipMember:
    """One file inside a zip archive."""

    archive: Archive
    member: str

    def __str__(self) -> str:
        return f"{self.archive.path}/{self.member}"


Entry = Path | ZipMember


class FileImages(ImageSet):
    """Images in files or zip members, read when loaded. Without `labels`, all are -1: class unknown."""

    def __init__(self, entries: Sequence[Entry], labels: ArrayLike | None = None) -> None:
        self._entries = tuple(entries)
        unknown = np.full(len(self._entries), -1, dtype=np.int64)
        self._labels = as_labels(unknown if labels is None else labels, len(self._entries), "files")

    @property
    def labels(self) -> Labels:
        return self._labels

    def __len__(self) -> int:
        return len(self._entries)

    def load(self, index: int) -> Image.Image:
        entry = self._entries[in_range(index, len(self))]
        return decode(read_bytes(entry), str(entry))

    def name(self, index: int) -> str:
        return str(self._entries[in_range(index, len(self))])

    def identity(self, index: int) -> bytes:
        """Zip members by the archive's checksum, files by name and size: neither needs to be read."""
        entry = self._entries[in_range(index, len(self))]
        if isinstance(entry, ZipMember):
            return entry.archive.checksum(entry.member)
        return f"{entry.parent.name}/{entry.name} {entry.stat().st_size}".encode()


def read_bytes(entry: Entry) -> bytes:
    """The content of a file or zip member; UnreadableImage, with its name, where that fails."""
    try:
        if isinstance(entry, ZipMember):
            return entry.archive.read(entry.member)
        if entry.stat().st_size > MAX_FILE_BYTES:
            raise OSError(f"larger than {MAX_FILE_BYTES >> 20} MiB")
        return entry.read_bytes()
    except FileNotFoundError as error:
        raise UnreadableImage(f"{entry} does not exist (any more): restore it.") from error
    except Exception as error:  # zipfile raises many kinds: bad checksum, password, unknown compression, ...
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UnreadableImage(f"{entry} cannot be read ({reason}): restore or remove it.") from error


Parts = tuple[str, ...]


@dataclass(frozen=True)
class Tree:
    """The files under a root, folder or zip alike, by path relative to it; hidden ones are left out."""

    origin: str
    files: dict[Parts, Entry]
    folders: frozenset[Parts]

    def images(self) -> Iterator[tuple[Parts, Entry]]:
        """The files with an image's suffix, in the order of their paths."""
        return ((parts, self.files[parts]) for parts in sorted(self.files) if is_image_name(parts[-1]))

    def below(self, *top: str) -> Tree:
        """The part of the tree inside folder `top`, with paths relative to that."""
        depth = len(top)
        return Tree(
            "/".join((self.origin, *top)),
            {parts[depth:]: entry for parts, entry in self.files.items() if parts[:depth] == top},
            frozenset(parts[depth:] for parts in self.folders if parts[:depth] == top and len(parts) > depth),
        )


def read_tree(root: Path) -> Tree:
    """All files under a folder, or in a zip archive."""
    if root.is_dir():
        files, folders = _walk(root)
    elif root.is_file():
        files, folders = _list_zip(Archive(root))
    else:
        raise DataError(f"there is no folder or zip archive {root}: check the path.")
    for parts in list(files):
        folders.update(parts[:depth] for depth in range(1, len(parts)))
    return Tree(str(root), files, frozenset(folders))


def merge(trees: Sequence[Tree]) -> Tree:
    """Several trees as one; a path found in two of them is an error, since it would count twice."""
    files: dict[Parts, Entry] = {}
    for tree in trees:
        twice = next((parts for parts in tree.files if parts in files and is_image_name(parts[-1])), None)
        if twice is not None:
            raise DataError(f"{'/'.join(twice)} is in {tree.origin} and in another part too: give each part once.")
        files |= tree.files
    return Tree(", ".join(tree.origin for tree in trees), files, frozenset().union(*(t.folders for t in trees)))


def is_image_name(name: str) -> bool:
    """Whether a file's suffix is that of an image format this package reads."""
    return name.lower().endswith(SUFFIXES)


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _walk(root: Path) -> tuple[dict[Parts, Entry], set[Parts]]:
    files: dict[Parts, Entry] = {}
    folders: set[Parts] = set()
    for folder, inner, names in os.walk(root, followlinks=True):
        here = Path(folder)
        parts = here.relative_to(root).parts
        folders.add(parts)
        # A link to a folder that contains it would be followed for ever.
        real = here.resolve()
        inner[:] = [n for n in inner if not _hidden(n) and not real.is_relative_to((here / n).resolve())]
        files.update({(*parts, name): here / name for name in names if not _hidden(name)})
    folders.discard(())
    return files, folders


def _list_zip(archive: Archive) -> tuple[dict[Parts, Entry], set[Parts]]:
    files: dict[Parts, Entry] = {}
    folders: set[Parts] = set()
    for member in archive.members():
        path = member.replace("\\", "/")  # some archives made on Windows
        parts = tuple(part for part in path.split("/") if part)
        if not parts or any(_hidden(part) for part in parts):
            continue
        if path.endswith("/"):
            folders.add(parts)
        else:
            files[parts] = ZipMember(archive, member)
    return files, folders
