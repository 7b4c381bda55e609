"""Labelled images to learn or to evaluate on: class folders, a zip of them, a CSV list, a known data set."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tpl.errors import DataError
from tpl.files import at_home
from tpl.names import close_to
from tpl.stream.folders import (
    FileImages,
    Source,
    Tree,
    image_folder,
    is_image_name,
    open_tree,
    place_of,
    unread_files,
    without_wrappers,
)
from tpl.stream.images import ImageSet, WrappedImages, in_range, relabelled
from tpl.stream.preprocess import Shrink, in_chunks, try_load
from tpl.stream.sources import load_source
from tpl.stream.task import class_counts

# What the first line of a CSV may call its columns.
PATH_COLUMNS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path")
LABEL_COLUMNS = ("label", "class", "class_name", "category", "name")
# Memory for shrunk images: about 3 500 of them at 224 x 224. The others are decoded again when needed.
MAX_SHRUNK_BYTES = 1 << 29

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Labelled:
    """Images and the names of their classes. `skipped` says what was left out without opening it, and why.

    `unread` are the paths, below the origin, of files that are no images by their suffix.
    """

    origin: str
    images: ImageSet
    class_names: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Images of each class."""
        return dict(zip(self.class_names, class_counts(self.images, len(self.class_names)), strict=True))

    def only(self, names: Sequence[str]) -> Labelled:
        """The images of these classes, in the classes' own order."""
        missing = [name for name in names if name not in self.class_names]
        if missing:
            has = _listed(self.class_names)
            meant = close_to(missing[0], self.class_names)
            rest = f". Did you mean '{meant}'? It has {has}." if meant is not None else f"; it has {has}."
            raise DataError(f"{self.origin} has no class {', '.join(missing)}{rest}")
        chosen = self._chosen([label for label, name in enumerate(self.class_names) if name in names])
        return replace(chosen, unread=tuple(f for f in self.unread if set(f.split("/")[:-1]) & set(names)))

    def with_images(self, images: ImageSet) -> Labelled:
        """These classes with other images; classes that have none left are dropped."""
        fewer = replace(self, images=images)
        return fewer._chosen([label for label, count in enumerate(fewer.counts.values()) if count])

    def _chosen(self, labels: list[int]) -> Labelled:
        new = np.full(len(self.class_names), -1, dtype=np.int64)
        new[labels] = np.arange(len(labels))
        rows = np.flatnonzero(new[self.images.labels] >= 0)
        images = relabelled(self.images, rows, new[self.images.labels[rows]])
        return replace(self, images=images, class_names=tuple(self.class_names[label] for label in labels))


def labelled_images(
    place: Path | None, data: str | None = None, download: bool = False, testing: bool = False
) -> Labelled:
    """The images in `place`: class folders, a zip of them, or a CSV of path,label; or those of the data set `data`.

    Of a data set with a training and a test part, `testing` chooses the test part; one without parts is returned
    whole either way.
    """
    if data is not None:
        source = load_source(data, place, download)
        return _part(source, source.name, testing)
    if place is None:
        raise DataError("name a folder of class folders, a zip of them, or a CSV of path,label (or use --data NAME).")
    place = place_of(place)
    if place.is_file() and not _is_zip(place):
        return _from_csv(place)
    tree = without_wrappers(open_tree(place))
    _explain_if_unusable(place, tree)
    found = _part(image_folder(place, place.stem, tree), str(place), testing)
    return found if testing else replace(found, unread=unread_files(tree))


def _part(source: Source, origin: str, testing: bool) -> Labelled:
    if not testing or source.test is None:
        return Labelled(origin, source.train, source.class_names, source.skipped)
    whole = Labelled(origin, source.test, source.class_names, source.skipped)
    return whole.with_images(source.test)


def _is_zip(file: Path) -> bool:
    if file.suffix.lower() == ".zip":
        return True
    if is_image_name(file.name):
        raise DataError(f"{file} is a single image: put the images of each class in a folder, and name their parent.")
    return False


def _explain_if_unusable(place: Path, tree: Tree) -> None:
    """Raise an error that says what is missing, unless a class folder holds an image."""
    depths = Counter(min(len(parts), 2) for parts, _ in tree.images())
    if depths[2]:
        return
    example = f"{place}/cat/1.jpg" if place.is_dir() else "cat/1.jpg inside it"
    if depths[1]:
        raise DataError(
            f"{place} holds {depths[1]} images, but not in class folders: give each class a folder of its own, "
            f"such as {example}, or name a CSV of path,label instead."
        )
    folders = sorted({parts[0] for parts in tree.folders})
    suffixes = Counter(Path(parts[-1]).suffix.lower() or "no suffix" for parts in tree.files)
    if tree.files:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common(5))
        raise DataError(
            f"{place} holds no image this program reads (JPEG, PNG, WebP, BMP, GIF, TIFF), only {kinds}: convert them."
        )
    if folders:
        raise DataError(f"{place} has class folders without any image ({_listed(folders)}): put images in them.")
    raise DataError(f"{place} is empty: put the images of each class in a folder of its own, such as {example}.")


def _from_csv(file: Path) -> Labelled:
    """A list of path,label: paths relative to the file itself, a line with names of columns optional."""
    entries: dict[Path, tuple[str, int]] = {}
    bad: list[str] = []
    columns = (0, 1)
    for line, row in _rows(file):
        if not any(cell.strip() for cell in row):
            continue
        if not entries and not bad and (named := _header(row)) is not None:
            columns = named
            continue
        if problem := _take(file, line, row, columns, entries):
            bad.append(f"{file}, line {line}: {problem}")
    if not entries:
        why = f" ({'; '.join(bad[:3])}{'; ...' if len(bad) > 3 else ''})" if bad else ""
        raise DataError(f"{file} names no image with a class{why}. A line is path,label, such as photos/1.jpg,cat.")
    names = sorted({label for label, _ in entries.values()})
    number = {name: i for i, name in enumerate(names)}
    images = FileImages(list(entries), [number[label] for label, _ in entries.values()])
    return Labelled(str(file), images, tuple(names), tuple(bad))


def _take(
    file: Path, line: int, row: list[str], columns: tuple[int, int], entries: dict[Path, tuple[str, int]]
) -> str | None:
    """Add the line's image to `entries`, or say what is wrong with it."""
    if len(row) <= max(columns):
        return f"{len(row)} field{'s' * (len(row) > 1)}, but a path and a label are needed"
    name, label = (row[column].strip() for column in columns)
    if not name or not label:
        return "no path" if not name else "no label"
    path = file.parent / at_home(name)
    try:
        if not path.is_file():
            return f"there is no file {path}"
    except (OSError, ValueError) as error:
        return f"{name[:80]!r} is no path ({error})"
    if path in entries:
        return f"{path} was named before, in line {entries[path][1]}"
    entries[path] = label, line
    return None


def _rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            first = text.readline()
            text.seek(0)
            separator = "," if "," in first else next((s for s in "\t;" if s in first), ",")
            reader = csv.reader(text, delimiter=separator)
            for row in reader:
                yield reader.line_num, row
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise DataError(
            f"{file} cannot be read as a list of images ({error}): it must be a CSV of path,label in UTF-8, a zip, "
            "or a folder."
        ) from error


def _header(row: list[str]) -> tuple[int, int] | None:
    """Where path and label stand, if the row names columns rather than an image."""
    names = [cell.strip().lower() for cell in row]
    path = next((i for i, name in enumerate(names) if name in PATH_COLUMNS), None)
    label = next((i for i, name in enumerate(names) if name in LABEL_COLUMNS and i != path), None)
    return None if path is None or label is None else (path, label)


def _listed(names: Sequence[str]) -> str:
    """Names for a sentence, the first twelve of many."""
    return ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:12])} and {len(names) - 12} more"


def readable(
    images: ImageSet, shrink: Shrink, progress: Callable[[int], None] | None = None
) -> tuple[ImageSet, list[str]]:
    """Read all images once, before any training: the readable ones, shrunk, and the reasons for the others.

    `shrink` makes an image as small as the encoder allows. `progress` is called with the number of images read since
    its last call.
    """

    def read(chunk: range) -> list[Pixels | str]:
        loaded = [try_load(images, index, shrink) for index in chunk]
        return [image if isinstance(image, str) else np.array(image) for image in loaded]

    good: list[int] = []
    shrunk: list[Pixels | None] = []
    problems: list[str] = []
    taken = 0
    with closing(in_chunks(read, len(images))) as chunks:
        for chunk in chunks:
            for index, found in enumerate(chunk, start=len(good) + len(problems)):
                if isinstance(found, str):
                    problems.append(found)
                    continue
                good.append(index)
                taken += found.nbytes
                shrunk.append(found if taken <= MAX_SHRUNK_BYTES else None)
            if progress is not None:
                progress(len(chunk))
    return _ShrunkImages(images.select(good), shrunk, shrink), problems


class _ShrunkImages(WrappedImages):
    """Images of another set in their shrunk form, held in memory where there was room."""

    def __init__(self, images: ImageSet, shrunk: list[Pixels | None], shrink: Shrink) -> None:
        super().__init__(images)
        self._shrunk, self._shrink = shrunk, shrink

    def load(self, index: int) -> Image.Image:
        pixels = self._shrunk[in_range(index, len(self))]
        return self._shrink(self._images.load(index)) if pixels is None else Image.fromarray(pixels)
