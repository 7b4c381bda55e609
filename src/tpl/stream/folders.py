"""Images in folders and zip archives: their files, the data set they form, and reading them from any thread."""

from __future__ import annotations

import hashlib
import os
import threading
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image

from tpl.errors import DataError, UnreadableImage
from tpl.files import at_home, read_bounded
from tpl.stream.decoding import SUFFIXES, decode, size_of, to_rgb
from tpl.stream.images import ImageSet, Labels, as_labels, in_range

TEST_NAMES = ("test", "val")

LAYOUTS = (
    "train/CLASS/*.jpg with test/CLASS/*.jpg or val/CLASS/*.jpg (or CLASS/*.jpg alone, without test images), "
    "as a folder, as one zip of it, or as a folder of train*.zip and test*.zip or val*.zip"
)
# No photograph is this large; a file that claims to be is a mistake or an attack on memory.
MAX_FILE_BYTES = 256 << 20


class Archive:
    """An open zip file, safe to share between threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except Exception as error:  # zipfile raises many kinds
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
        self.entries = tuple(entries)
        unknown = np.full(len(self.entries), -1, dtype=np.int64)
        self._labels = as_labels(unknown if labels is None else labels, len(self.entries), "files")

    @property
    def labels(self) -> Labels:
        return self._labels

    def __len__(self) -> int:
        return len(self.entries)

    def load(self, index: int) -> Image.Image:
        entry = self.entries[in_range(index, len(self))]
        return decode(read_bytes(entry), str(entry))

    def size(self, index: int) -> tuple[int, int]:
        entry = self.entries[in_range(index, len(self))]
        return size_of(entry if isinstance(entry, Path) else BytesIO(read_bytes(entry)), str(entry))

    def name(self, index: int) -> str:
        return str(self.entries[in_range(index, len(self))])

    def identity(self, index: int) -> bytes:
        """The archive's checksum of a zip member, or name and size of a file: no image is read for it."""
        entry = self.entries[in_range(index, len(self))]
        if isinstance(entry, ZipMember):
            return entry.archive.checksum(entry.member)
        return f"{entry.parent.name}/{entry.name} {entry.stat().st_size}".encode()

    def content(self, index: int) -> bytes:
        """The archive's checksum of a zip member, or a hash of a file's content."""
        entry = self.entries[in_range(index, len(self))]
        return self.identity(index) if isinstance(entry, ZipMember) else hashlib.blake2b(read_bytes(entry)).digest()


class MixedImages(ImageSet):
    """Images as a program holds them: paths, Pillow images or uint8 arrays, all of unknown class (label -1)."""

    def __init__(self, images: Sequence[Any]) -> None:
        self._images = images
        self._labels = as_labels([-1] * len(images), len(images), "images")

    @property
    def labels(self) -> Labels:
        return self._labels

    def __len__(self) -> int:
        return len(self._images)

    def load(self, index: int) -> Image.Image:
        image = self._images[index]
        if isinstance(image, (str, Path)):
            return decode(read_bytes(Path(image)), str(image))
        if isinstance(image, Image.Image):
            return to_rgb(image)
        array = np.asarray(image)
        try:
            return to_rgb(Image.fromarray(array))
        except (TypeError, ValueError) as error:
            raise UnreadableImage(
                f"{self.name(index)} is no picture ({array.dtype} of shape {list(array.shape)}); "
                "give a path, a Pillow image, or a uint8 array of shape [h, w], [h, w, 3] or [h, w, 4]."
            ) from error

    def name(self, index: int) -> str:
        image = self._images[index]
        return str(image) if isinstance(image, (str, Path)) else f"image {index}"

    def identity(self, index: int) -> bytes:
        return self.load(index).tobytes()


def read_bytes(entry: Entry) -> bytes:
    """The content of a file or zip member; UnreadableImage, with its name, where that fails."""
    try:
        if isinstance(entry, ZipMember):
            return entry.archive.read(entry.member)
        return read_bounded(entry, MAX_FILE_BYTES)
    except FileNotFoundError as error:
        raise UnreadableImage(f"{entry} does not exist (any more): restore it.") from error
    except Exception as error:  # zipfile raises many kinds: bad checksum, password, unknown compression, ...
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UnreadableImage(f"{entry} cannot be read ({reason}): restore or remove it.") from error


Parts = tuple[str, ...]


@dataclass(frozen=True)
class Tree:
    """The files in a folder or zip archive, by path relative to it; hidden ones are left out."""

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
        files, folders = _list_folder(root)
    elif root.is_file():
        files, folders = _list_zip(Archive(root))
    else:
        raise DataError(f"there is no folder or zip archive {root}: check the path.")
    for parts in list(files):
        folders.update(parts[:depth] for depth in range(1, len(parts)))
    return Tree(str(root), files, frozenset(folders))


def merge(trees: Sequence[Tree]) -> Tree:
    """Several trees as one; an image with the same path in two of them is an error."""
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


def unread_files(tree: Tree) -> tuple[str, ...]:
    """The files without an image's suffix, by path; of a data set in parts, those of the training part."""
    train = _is_split(tree)
    return tuple(
        "/".join(parts)
        for parts in sorted(tree.files)
        if not is_image_name(parts[-1]) and (not train or parts[0] == "train")
    )


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name holds no data: dot files, and what macOS adds to zip archives."""
    return name.startswith(".") or name == "__MACOSX"


def _list_folder(root: Path) -> tuple[dict[Parts, Entry], set[Parts]]:
    files: dict[Parts, Entry] = {}
    folders: set[Parts] = set()
    for folder, inner, names in os.walk(root, followlinks=True):
        here = Path(folder)
        parts = here.relative_to(root).parts
        folders.add(parts)
        # A link to a folder that contains it would be followed for ever.
        real = here.resolve()
        inner[:] = [n for n in inner if not is_hidden(n) and not real.is_relative_to((here / n).resolve())]
        files.update({(*parts, name): here / name for name in names if not is_hidden(name)})
    folders.discard(())
    return files, folders


def _list_zip(archive: Archive) -> tuple[dict[Parts, Entry], set[Parts]]:
    files: dict[Parts, Entry] = {}
    folders: set[Parts] = set()
    for member in archive.members():
        path = member.replace("\\", "/")  # some archives made on Windows
        parts = tuple(part for part in path.split("/") if part)
        if not parts or any(is_hidden(part) for part in parts):
            continue
        if path.endswith("/"):
            folders.add(parts)
        else:
            files[parts] = ZipMember(archive, member)
    return files, folders


@dataclass(frozen=True)
class Source:
    """A data set before it is split into tasks. `skipped` lists what was left out, and why."""

    name: str
    train: ImageSet
    test: ImageSet | None
    class_names: tuple[str, ...]
    skipped: tuple[str, ...] = ()


def image_folder(root: Path | str | Sequence[Path | str], name: str = "folder", tree: Tree | None = None) -> Source:
    """A data set in class folders, from a folder, a zip archive, or a list of these that belong together.

    Class names are the folders' names, in alphabetical order. `tree` are the files of the root, if already listed.
    """
    if tree is None:
        roots = [root] if isinstance(root, (str, Path)) else root
        tree = without_wrappers(merge([open_tree(r) for r in roots]))
    skipped: list[str] = []
    if not _is_split(tree):
        classes = _by_class(tree, skipped, tree.origin)
        return Source(name, _files(classes, list(classes)), None, tuple(classes), tuple(skipped))
    classes = _by_class(tree.below("train"), skipped, "train")
    test = _test_part(tree, classes, skipped)
    return Source(name, _files(classes, list(classes)), test, tuple(classes), tuple(skipped))


def place_of(path: Path | str) -> Path:
    """The path of a data set, with `~` for the home folder; an error if the system cannot even look it up."""
    place = at_home(path)
    try:
        place.exists()
    except (OSError, ValueError) as error:  # a name too long, no permission to look, a NUL inside
        raise DataError(f"{place} cannot be looked up: {getattr(error, 'strerror', None) or error}.") from error
    return place


def open_tree(root: Path | str) -> Tree:
    """The tree under a folder or zip; a folder of train*.zip and test*.zip reads as one tree with both parts."""
    root = place_of(root)
    tree = read_tree(root)
    if root.is_file() or _top_folders(tree):
        return tree
    parts = []
    for part in ("train", *TEST_NAMES):
        for archive in sorted(root.glob(f"{part}*.zip")):
            inside = read_tree(archive)
            parts.append(inside if _top_folders(inside) == {part} else _below(part, inside))
    return merge(parts) if parts else tree


def without_wrappers(tree: Tree) -> Tree:
    """`tree` without outer folders that only wrap the data set, as archives often have."""
    while True:
        tops = _top_folders(tree)
        images = [parts for parts in tree.files if is_image_name(parts[-1])]
        if len(tops) != 1 or tops == {"train"} or not images or min(map(len, images)) < 3:
            return tree
        tree = tree.below(*tops)


def _top_folders(tree: Tree) -> set[str]:
    """The folders at the top that hold images."""
    return {parts[0] for parts in tree.files if len(parts) > 1 and is_image_name(parts[-1])}


def _below(part: str, tree: Tree) -> Tree:
    tree = without_wrappers(tree)
    files: dict[Parts, Entry] = {(part, *parts): entry for parts, entry in tree.files.items()}
    return Tree(tree.origin, files, frozenset({(part,), *((part, *parts) for parts in tree.folders)}))


def _is_split(tree: Tree) -> bool:
    # "train" may also be a class (the vehicle): as a part of the data set it holds class folders, not images.
    return any(parts[0] == "train" and len(parts) > 2 for parts, _ in tree.images())


def _by_class(tree: Tree, skipped: list[str], where: str) -> dict[str, list[Entry]]:
    """The images below each top folder; folders without any, and images outside, are noted as skipped."""
    classes: dict[str, list[Entry]] = {parts[0]: [] for parts in sorted(tree.folders) if len(parts) == 1}
    stray = 0
    for parts, entry in tree.images():
        if len(parts) > 1:
            classes[parts[0]].append(entry)
        else:
            stray += 1
    empty = [name for name, entries in classes.items() if not entries]
    if len(empty) == len(classes):
        found = f"empty class folders: {', '.join(empty)}" if empty else "no class folders"
        raise DataError(f"{tree.origin} holds no images in class folders ({found}). Accepted: {LAYOUTS}.")
    skipped += [f"{where}/{name}: no images" for name in empty]
    if stray:
        skipped.append(f"{where}: {stray} image{'s' * (stray != 1)} outside class folders")
    return {name: entries for name, entries in classes.items() if entries}


def _test_part(tree: Tree, classes: dict[str, list[Entry]], skipped: list[str]) -> ImageSet | None:
    """The test images from test/ or else val/, whichever first shares a class with train/."""
    tops = _top_folders(tree)
    present = [part for part in TEST_NAMES if part in tops]
    skipped += [f"{part}: no images" for part in TEST_NAMES if (part,) in tree.folders and part not in tops]
    for part in present:
        notes: list[str] = []
        try:
            found = _by_class(tree.below(part), notes, part)
        except DataError:  # test/ without labels, as challenges publish it
            continue
        if known := {label: entries for label, entries in found.items() if label in classes}:
            skipped += notes
            skipped += [f"{part}/{label}: no training images" for label in found if label not in known]
            return _files(known, list(classes))
    if present:
        raise DataError(
            f"{tree.origin}: {' and '.join(present)} share no class folder with train. Accepted: {LAYOUTS}."
        )
    return None


def _files(classes: dict[str, list[Entry]], names: list[str]) -> FileImages:
    number = {name: label for label, name in enumerate(names)}
    pairs = [(entry, number[name]) for name in names for entry in classes.get(name, [])]
    return FileImages([entry for entry, _ in pairs], [label for _, label in pairs])
