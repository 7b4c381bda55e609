"""Recognises how a data set lies in folders: train and test parts, class folders, parts in several zips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tpl.stream.errors import DataError
from tpl.stream.files import Entry, FileImages, Tree, is_image_name, merge, read_tree
from tpl.stream.images import ImageSet

TEST_NAMES = ("test", "val")

LAYOUTS = (
    "train/CLASS/*.jpg with test/CLASS/*.jpg or val/CLASS/*.jpg (or CLASS/*.jpg alone, without test images), "
    "as a folder, as one zip of it, or as a folder of train*.zip and test*.zip or val*.zip"
)


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

    Class names are the folders' names, in alphabetical order. `tree` spares reading the root again.
    """
    if tree is None:
        tree = unwrap(merge([open_tree(root)] if isinstance(root, (str, Path)) else [open_tree(r) for r in root]))
    skipped: list[str] = []
    if not _is_split(tree):
        classes = _by_class(tree, skipped, tree.origin)
        return Source(name, _files(classes, list(classes)), None, tuple(classes), tuple(skipped))
    classes = _by_class(tree.below("train"), skipped, "train")
    test = _test_part(tree, classes, skipped)
    return Source(name, _files(classes, list(classes)), test, tuple(classes), tuple(skipped))


def open_tree(root: Path | str) -> Tree:
    """The tree under a folder or zip; a folder of train*.zip and test*.zip reads as one tree with both parts."""
    root = Path(root).expanduser()
    tree = read_tree(root)
    if root.is_file() or _tops(tree):
        return tree
    parts = []
    for part in ("train", *TEST_NAMES):
        for archive in sorted(root.glob(f"{part}*.zip")):
            inside = read_tree(archive)
            parts.append(inside if _tops(inside) == {part} else _inside(part, inside))
    return merge(parts) if parts else tree


def unwrap(tree: Tree) -> Tree:
    """`tree` without outer folders that only wrap the data set, as archives often have."""
    while True:
        tops = _tops(tree)
        images = [parts for parts in tree.files if is_image_name(parts[-1])]
        if len(tops) != 1 or tops == {"train"} or not images or min(map(len, images)) < 3:
            return tree
        tree = tree.below(*tops)


def _tops(tree: Tree) -> set[str]:
    """The folders at the top that hold images."""
    return {parts[0] for parts in tree.files if len(parts) > 1 and is_image_name(parts[-1])}


def _inside(part: str, tree: Tree) -> Tree:
    tree = unwrap(tree)
    files: dict[tuple[str, ...], Entry] = {(part, *parts): entry for parts, entry in tree.files.items()}
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
        skipped.append(f"{where}: {stray} images outside class folders")
    return {name: entries for name, entries in classes.items() if entries}


def _test_part(tree: Tree, classes: dict[str, list[Entry]], skipped: list[str]) -> ImageSet | None:
    """The test images from test/ or else val/, whichever first shares a class with train/."""
    tops = _tops(tree)
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
