"""The data sets known by name, from local copies in the usual layouts or downloaded on request.

A data set is read once in a process as long as its files stay the same: reading the directories of CIFAR-100's zip
archives takes over a second, and several runs in one process share the images decoded so far.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpl.errors import DataError
from tpl.files import cache_folder
from tpl.stream.apart import decode_apart
from tpl.stream.disk_cache import image_cache
from tpl.stream.folders import (
    LAYOUTS,
    Entry,
    FileImages,
    Source,
    Tree,
    image_folder,
    is_image_name,
    open_tree,
    place_of,
    read_bytes,
    without_wrappers,
)
from tpl.stream.images import ArrayImages, CachedImages, ImageSet, PreparedImages

TINY_IMAGENET_URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
_TINY_FOLDER = "tiny-imagenet-200"
_CIFAR_FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
_CLASS_COUNTS = {"cifar10": 10, "cifar100": 100, "tiny-imagenet": 200, "imagenet380": 380}

MAX_SOURCES = 4
_MAX_FILES = 100

Signature = tuple[tuple[str, int, int, int], ...]

_sources: dict[Hashable, tuple[Signature, Source]] = {}
_lock = threading.Lock()


def load_source(name: str, root: Path | None = None, download: bool = False) -> Source:
    """The data set `name`: digits, cifar10, cifar100, tiny-imagenet, imagenet380, or folder (any class folders).

    `root` is its folder; without it, the one that downloads go to. Nothing is fetched unless `download` is true. A
    second call returns the same object, with the images decoded so far, as long as its (few) files are the same.
    """
    loaders: dict[str, Callable[[Path | None, bool], Source]] = {
        "digits": lambda _root, _download: _digits(),
        "cifar10": lambda root, download: _cifar("cifar10", root, download),
        "cifar100": lambda root, download: _cifar("cifar100", root, download),
        "tiny-imagenet": _tiny_imagenet,
        "imagenet380": _imagenet380,
        "folder": _folder,
    }
    if name not in loaders:
        raise DataError(f"unknown data set {name!r}: choose one of {', '.join(loaders)}.")
    place = place_of(root) if root is not None else None
    return reused((name, place, download), place or download_root(), lambda: loaders[name](place, download))


def download_root() -> Path:
    """The folder downloads go to when none is named: tpl/data in the user's cache folder."""
    return cache_folder() / "data"


def _digits() -> Source:
    """1797 scanned 8 x 8 digits that come with scikit-learn; a fixed fifth of each class is for testing."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    pixels: NDArray[np.uint8] = np.rint(data.images * (255 / 16)).astype(np.uint8)
    images = ArrayImages(pixels, data.target, origin="digits")
    train, test = train_test_split(np.arange(len(images)), test_size=0.2, random_state=0, stratify=data.target)
    names = tuple(str(digit) for digit in range(10))
    return Source("digits", images.select(np.sort(train)), images.select(np.sort(test)), names)


def _folder(root: Path | None, download: bool) -> Source:
    if root is None:
        raise DataError(f"the data set 'folder' needs --data FOLDER. Accepted: {LAYOUTS}.")
    return _prepared(image_folder(root))


def _cifar(name: str, root: Path | None, download: bool) -> Source:
    place = root or download_root()
    stock = (place / _CIFAR_FOLDERS[name]).is_dir()
    if root is not None and not stock and _has_own_layout(root, download):
        tree = without_wrappers(open_tree(root))
        if any(True for _ in tree.images()):
            return _cached(_complete(image_folder(root, name, tree), root))
    if stock or download:
        return _torchvision_cifar(name, place, download)
    raise _missing(name, root, f"a torchvision root (with {_CIFAR_FOLDERS[name]}/), or {LAYOUTS}")


def _cached(source: Source) -> Source:
    """`source` with images that are decoded once: they are small, and every run goes through all of them."""
    cache = image_cache()

    def cached(images: ImageSet) -> ImageSet:
        decode_all = partial(decode_apart, images.entries) if isinstance(images, FileImages) else None
        return CachedImages(images, cache, decode_all)

    return replace(source, train=cached(source.train), test=cached(source.test) if source.test is not None else None)


def _prepared(source: Source) -> Source:
    """`source` with large images that are decoded and resized once, where the cache on disk is on."""
    cache = image_cache()
    if cache is None:
        return source
    test = PreparedImages(source.test, cache) if source.test is not None else None
    return replace(source, train=PreparedImages(source.train, cache), test=test)


def _has_own_layout(root: Path, download: bool) -> bool:
    # When a download is allowed, other data sets in the same root must not be taken for this one.
    if root.is_dir() and download:
        return (root / "train").is_dir() or any(root.glob("train*.zip"))
    return root.exists()


def _torchvision_cifar(name: str, place: Path, download: bool) -> Source:
    from torchvision import datasets

    kind = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
    try:
        train = kind(str(place), train=True, download=download)
        test = kind(str(place), train=False)
    except (RuntimeError, OSError) as error:  # torchvision: no network, a wrong checksum, a missing batch
        raise DataError(
            f"{name} in {place} is incomplete or damaged, or could not be downloaded ({error}). Remove the folder "
            f"{place / _CIFAR_FOLDERS[name]} and pass --download again, or point --data FOLDER to a full copy."
        ) from error
    return Source(
        name,
        ArrayImages(train.data, train.targets, origin=f"{name} train"),
        ArrayImages(test.data, test.targets, origin=f"{name} test"),
        tuple(train.classes),
    )


def _tiny_imagenet(root: Path | None, download: bool) -> Source:
    """Tiny-ImageNet: its labelled validation images serve as the test set, since its test set has no labels."""
    place = root or download_root()
    found = _tiny_place(place)
    if found is None and download:
        from torchvision.datasets.utils import download_and_extract_archive

        try:
            download_and_extract_archive(TINY_IMAGENET_URL, str(place))
        except (RuntimeError, OSError) as error:
            raise DataError(
                f"tiny-imagenet could not be downloaded from {TINY_IMAGENET_URL} ({error}): fetch it by other "
                "means and pass --data FOLDER."
            ) from error
        found = _tiny_place(place)
    if found is None:
        raise _missing(
            "tiny-imagenet",
            root,
            "train/WNID/images/*.JPEG with val/images/ and val/val_annotations.txt, as a folder or one zip; or "
            + LAYOUTS,
        )
    tree = without_wrappers(open_tree(found))
    annotations = tree.files.get(("val", "val_annotations.txt"))
    loose = {parts[-1]: entry for parts, entry in tree.images() if parts[:2] == ("val", "images")}
    if annotations is None or not loose:
        return _cached(_complete(image_folder(found, "tiny-imagenet", tree), found))
    train = image_folder(found, "tiny-imagenet", _only(tree, "train"))
    test = _annotated(read_bytes(annotations).decode(), loose, train.class_names, str(annotations))
    return _cached(_complete(Source(train.name, train.train, test, train.class_names, train.skipped), found))


def _imagenet380(root: Path | None, download: bool) -> Source:
    """380 classes of ImageNet, picked by the user: the paper names none of its own.

    It drew them from the 389 classes that its encoder had not been trained on.
    """
    if root is None:
        raise DataError(
            "imagenet380 cannot be downloaded: ImageNet needs an account, and no list of the paper's 380 classes was "
            f"published. Pass --data FOLDER with the 380 class folders you choose: {LAYOUTS}."
        )
    return _prepared(_complete(image_folder(root, "imagenet380"), root))


def _tiny_place(place: Path) -> Path | None:
    candidates = [place / _TINY_FOLDER, place, place / f"{_TINY_FOLDER}.zip"]
    for candidate in candidates:
        split = (candidate / "train").is_dir() or any(candidate.glob("train*.zip"))
        if split or (candidate.is_file() and candidate.suffix.lower() == ".zip"):
            return candidate
    return None


def _annotated(text: str, loose: dict[str, Entry], class_names: tuple[str, ...], where: str) -> FileImages:
    """The images of val/images with the class that val_annotations.txt gives each of them."""
    number = {name: label for label, name in enumerate(class_names)}
    entries, labels = [], []
    for line in filter(str.strip, text.splitlines()):
        file, _, rest = line.partition("\t")
        wnid = rest.split("\t")[0].strip()
        if file not in loose or wnid not in number:
            raise DataError(f"{where}: no image or no training class for the line {line.strip()!r}.")
        entries.append(loose[file])
        labels.append(number[wnid])
    return FileImages(entries, labels)


def _only(tree: Tree, top: str) -> Tree:
    return Tree(
        tree.origin,
        {parts: entry for parts, entry in tree.files.items() if parts[0] == top and is_image_name(parts[-1])},
        frozenset(parts for parts in tree.folders if parts[0] == top),
    )


def _complete(source: Source, place: Path) -> Source:
    """`source` if no class is missing: published class orders number the classes of the whole data set."""
    count = _CLASS_COUNTS[source.name]
    if len(source.class_names) != count or source.test is None:
        parts = f"{len(source.class_names)} classes" + ("" if source.test is not None else " and no test images")
        left_out = f" (skipped: {'; '.join(source.skipped)})" if source.skipped else ""
        fetch = "add or remove some" if source.name == "imagenet380" else "pass --download with --data EMPTY_FOLDER"
        raise DataError(
            f"{place} holds {parts}{left_out}, but {source.name} has {count} with test images. "
            f"For another data set, or a part of this one, use the benchmark 'folder'; or {fetch}."
        )
    return source


def _missing(name: str, root: Path | None, layouts: str) -> DataError:
    place = f"in {root}" if root else f"in {download_root()} (where downloads go)"
    return DataError(
        f"{name} was not found {place}. Either pass --download to fetch it, or --data FOLDER to use a copy you "
        f"have: {layouts}."
    )


def reused(key: Hashable, place: Path, read: Callable[[], Source]) -> Source:
    """The data set that `read` returned for this key before, if the files in `place` are the same; else `read()`."""
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
    """Path, inode, size and time of each file in `place`, two folders deep; None for larger trees.

    To check every file of a large tree would take as long as reading the data set's layout again.
    """
    place = place.resolve()
    try:
        if place.is_file():
            return (_file_state(str(place), place.stat()),)
        found, folders = [], [str(place)]
        for folder in folders:  # grows by the folders found in the first one
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir() and folder != str(place):
                        return None
                    if entry.is_dir():
                        folders.append(entry.path)
                    found.append(_file_state(entry.path, entry.stat()))
                    if len(found) > _MAX_FILES:
                        return None
        return tuple(sorted(found)) or None
    except OSError:  # missing or not readable: reading it will say so
        return None


def _file_state(path: str, status: os.stat_result) -> tuple[str, int, int, int]:
    return path, status.st_ino, status.st_size, status.st_mtime_ns
