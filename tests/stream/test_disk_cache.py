"""Pixels kept on disk: the same bits as decoded ones, never those of another image, and never more than the limit."""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from tpl.errors import DataError
from tpl.stream import Preprocess, Source, concatenate, sources
from tpl.stream import folders as folders_module
from tpl.stream.disk_cache import DiskCache, image_cache, key_of
from tpl.stream.images import CachedImages
from tpl.stream.sources import load_source

CONFIG = {"input_size": (3, 16, 16), "interpolation": "bicubic", "crop_pct": 0.9}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskCache:
    """A cache of its own, as the environment asks for."""
    monkeypatch.setenv("TPL_IMAGE_CACHE", str(tmp_path / "cache"))
    found = image_cache()
    assert found is not None
    return found


def pixels(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def photos(root: Path, suffix: str = "jpg", size: tuple[int, int] = (50, 41)) -> Path:
    for label, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for number in range(3):
            Image.fromarray(pixels(*size, seed=10 * label + number)).save(root / name / f"{number}.{suffix}")
    return root


def fresh(root: Path) -> Source:
    """The data set as a new process reads it."""
    sources._sources.clear()
    return load_source("folder", root)


def entries(cache: DiskCache) -> list[Path]:
    return sorted(cache.folder.glob("*/*.npy"))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the images that are decoded from now on."""
    names: list[str] = []
    decode: Callable[[bytes, str], Image.Image] = folders_module.decode

    def counted(data: bytes, name: str) -> Image.Image:
        names.append(name)
        return decode(data, name)

    monkeypatch.setattr(folders_module, "decode", counted)
    return names


def test_the_second_time_nothing_is_decoded_and_every_pixel_is_the_same(
    tmp_path: Path, cache: DiskCache, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = photos(tmp_path / "photos")
    first = Preprocess(CONFIG).batch(fresh(root).train)
    assert len(decoded) == 6 == len(entries(cache))
    train = fresh(root).train
    assert torch.equal(Preprocess(CONFIG).batch(train), first)
    both = concatenate([train.select([4, 1]), train.select([0])], [0, 2])  # parts of it, in any order
    assert torch.equal(Preprocess(CONFIG).batch(both), first[[4, 1, 0]])
    assert len(decoded) == 6
    Preprocess(CONFIG | {"crop_pct": 1.0}).batch(train)  # for another encoder they are others
    assert len(decoded) == 12 == len(entries(cache))
    monkeypatch.setenv("TPL_IMAGE_CACHE", "off")
    assert torch.equal(Preprocess(CONFIG).batch(fresh(root).train), first) and len(decoded) == 18


def test_a_file_that_changes_is_decoded_again(tmp_path: Path, cache: DiskCache, decoded: list[str]) -> None:
    root = photos(tmp_path / "photos", "bmp")
    before = Preprocess(CONFIG).batch(fresh(root).train)
    changed = root / "cat" / "1.bmp"
    size, time = changed.stat().st_size, changed.stat().st_mtime_ns
    Image.fromarray(pixels(50, 41, seed=99)).save(changed)
    os.utime(changed, ns=(time, time))
    assert changed.stat().st_size == size
    after = Preprocess(CONFIG).batch(fresh(root).train)
    same = [bool(torch.equal(*pair)) for pair in zip(before, after, strict=True)]
    assert same == [True, False, True, True, True, True]


def test_small_images_are_not_kept_one_by_one(tmp_path: Path, cache: DiskCache) -> None:
    Preprocess(CONFIG).batch(fresh(photos(tmp_path / "photos", "png", (12, 9))).train)
    assert not entries(cache)


def test_a_set_of_small_images_is_one_entry(tmp_path: Path, cache: DiskCache, decoded: list[str]) -> None:
    folder = photos(tmp_path / "photos", "png", (8, 9))
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        for file in sorted(folder.rglob("*.png")):
            archive.write(file, file.relative_to(folder))
    for root in (folder, tmp_path / "photos.zip"):
        decoded.clear()
        plain = folders_module.image_folder(root).train
        once = CachedImages(plain, cache)
        first = once.block(np.arange(5))
        assert first is not None and len(decoded) == 5
        assert once.load(5).tobytes() == pixels(8, 9, 12).tobytes()
        later = CachedImages(plain, cache)
        again = later.block(np.arange(5))
        assert again is not None and np.array_equal(again, first) and again.flags.writeable
        assert later.load(5).tobytes() == once.load(5).tobytes() and len(decoded) == 6
    assert len(entries(cache)) == 2


def test_entries_that_were_not_used_for_longest_go_first(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, limit=5_000)
    for number in range(4):
        cache.write(key_of([bytes([number])]), pixels(18, 18, number))  # 972 bytes and a header each
        os.utime(cache._file(key_of([bytes([number])])), (number, number))
    assert cache.read(key_of([b"\0"])) is not None  # the oldest one is used again
    cache.write(key_of([b"new"]), pixels(18, 18, 5))
    left = [cache.read(key_of([bytes([number])])) is not None for number in range(4)]
    assert left == [True, False, True, True] and cache.read(key_of([b"new"])) is not None
    assert sum(file.stat().st_size for file in entries(cache)) <= 5_000
    cache.write(key_of([b"huge"]), np.zeros(6_000, np.uint8))
    assert cache.read(key_of([b"huge"])) is None and len(entries(cache)) == 4


@pytest.mark.parametrize("damage", [b"", b"nothing", None])
def test_a_damaged_entry_is_made_again(
    damage: bytes | None, tmp_path: Path, cache: DiskCache, decoded: list[str]
) -> None:
    root = photos(tmp_path / "photos")
    first = Preprocess(CONFIG).batch(fresh(root).train)
    victim = entries(cache)[2]
    victim.write_bytes(victim.read_bytes()[:300] if damage is None else damage)
    assert torch.equal(Preprocess(CONFIG).batch(fresh(root).train), first)
    decoded.clear()
    assert torch.equal(Preprocess(CONFIG).batch(fresh(root).train), first) and not decoded


def test_many_writers_and_readers_see_whole_entries(tmp_path: Path) -> None:
    key, content = key_of([b"x"]), pixels(200, 200, 0)
    wrong: list[int] = []

    def work(own: int) -> None:
        cache = DiskCache(tmp_path, 1e9)  # as in another process
        for _ in range(20):
            cache.write(key, content)
            found = cache.read(key, mapped=own % 2 == 0)
            if found is None or not np.array_equal(found, content):
                wrong.append(own)

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(list(tmp_path.rglob("*.npy"))) == 1 and not list(tmp_path.rglob("*.partial"))


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TPL_IMAGE_CACHE", str(tmp_path / "file" / "below"))
    root = photos(tmp_path / "photos")
    assert len(Preprocess(CONFIG).batch(fresh(root).train)) == 6
    monkeypatch.setenv("TPL_IMAGE_CACHE_GB", "much")
    with pytest.raises(DataError, match="TPL_IMAGE_CACHE_GB takes a number of gigabytes; got 'much'"):
        image_cache()
