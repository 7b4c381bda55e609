"""Many small images are decoded by other processes, to the same pixels; anything unusual is left to the usual way."""

from __future__ import annotations

import io
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tpl.stream import FileImages, UnreadableImage
from tpl.stream.apart import decode_apart
from tpl.stream.disk_cache import DiskCache
from tpl.stream.folders import Archive, Entry, ZipMember
from tpl.stream.images import CachedImages
from tpl.stream.sources import load_source

COUNT = 9
PLENTY = 1 << 20


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """Small images, some in an archive, some as files; few of them count as many here, and this machine has cores."""
    monkeypatch.setattr("tpl.stream.apart.MANY", 5)
    monkeypatch.setattr("tpl.stream.apart.decoding_workers", lambda: 4)
    pixels = np.random.default_rng(0).integers(0, 256, (COUNT, 6, 5, 3), dtype=np.uint8)
    with zipfile.ZipFile(tmp_path / "some.zip", "w") as archive:
        for number in range(5):
            file = io.BytesIO()
            Image.fromarray(pixels[number]).save(file, "WEBP", lossless=True)
            archive.writestr(f"ä/{number}.webp", file.getvalue())
    for number in range(5, COUNT):
        Image.fromarray(pixels[number]).save(tmp_path / f"{number}.png")
    opened = Archive(tmp_path / "some.zip")
    members = [ZipMember(opened, f"ä/{number}.webp") for number in range(5)]
    return [*members, *(tmp_path / f"{number}.png" for number in range(5, COUNT))]


def loaded(images: FileImages) -> np.ndarray:
    return np.stack([np.asarray(images.load(index)) for index in range(len(images))])


def test_the_pixels_are_those_of_loading(entries: list[Entry]) -> None:
    found = decode_apart(entries, PLENTY)
    assert found is not None and np.array_equal(found, loaded(FileImages(entries)))


def cached_set(images: FileImages, cache: DiskCache | None = None) -> CachedImages:
    """As `load_source` makes it."""
    return CachedImages(images, cache, partial(decode_apart, images.entries))


def test_a_cached_set_decodes_nothing_itself(entries: list[Entry], monkeypatch: pytest.MonkeyPatch) -> None:
    images = FileImages(entries)
    expected = loaded(images)
    cached = cached_set(images)
    cached.load(0)
    monkeypatch.setattr(FileImages, "load", lambda self, index: pytest.fail("decoded again"))
    assert np.array_equal(np.asarray(cached.block(np.arange(COUNT))), expected)


def test_more_images_than_memory_may_hold_are_read_from_the_disk_cache(
    entries: list[Entry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = FileImages(entries)
    expected = loaded(images)
    total = expected.nbytes
    monkeypatch.setattr("tpl.stream.images.MAX_CACHED_BYTES", total - 1)
    assert cached_set(images).block(np.arange(COUNT)) is None  # without a cache: each is decoded when it is used
    assert cached_set(images, DiskCache(tmp_path / "small", limit=total - 1)).block(np.arange(COUNT)) is None
    cache = DiskCache(tmp_path / "cache", limit=1e6)
    first = cached_set(images, cache)
    first.load(0)
    assert first._pixels is not None and not first._pixels.flags.writeable  # a file, not this process's memory
    monkeypatch.setattr("tpl.stream.apart._part", lambda entries: pytest.fail("decoded again"))
    monkeypatch.setattr(FileImages, "load", lambda self, index: pytest.fail("decoded again"))
    for kept in (first, cached_set(images, cache)):
        assert np.array_equal(np.asarray(kept.block(np.arange(COUNT))), expected)


def test_a_disk_that_keeps_nothing_costs_no_image(
    entries: list[Entry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = loaded(FileImages(entries))
    monkeypatch.setattr("tpl.stream.images.MAX_CACHED_BYTES", expected.nbytes - 1)
    (tmp_path / "cache").write_text("a file where the folder should be")
    images = cached_set(FileImages(entries), DiskCache(tmp_path / "cache", limit=1e6))
    assert np.array_equal(np.asarray(images.block(np.arange(COUNT))), expected)


def test_few_images_few_cores_or_too_many_bytes_are_left_alone(
    entries: list[Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decode_apart(entries[:4], PLENTY) is None
    assert decode_apart(entries, COUNT * 6 * 5 * 3 - 1) is None
    monkeypatch.setattr("tpl.stream.apart.SMALL_PIXELS", 29)
    assert decode_apart(entries, PLENTY) is None
    monkeypatch.setattr("tpl.stream.apart.SMALL_PIXELS", 30)
    monkeypatch.setattr("tpl.stream.apart.decoding_workers", lambda: 3)
    assert decode_apart(entries, PLENTY) is None


@pytest.mark.parametrize("place", [0, COUNT - 1])
def test_a_damaged_image_is_named_by_whoever_loads_it(entries: list[Entry], tmp_path: Path, place: int) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    entries[place] = broken
    assert decode_apart(entries, PLENTY) is None
    with pytest.raises(UnreadableImage, match=r"broken\.png"):
        cached_set(FileImages(entries)).load(place)


def test_an_image_of_another_size_is_loaded_one_by_one(entries: list[Entry], tmp_path: Path) -> None:
    Image.new("RGB", (7, 7)).save(tmp_path / "other.png")
    entries[-1] = tmp_path / "other.png"
    assert decode_apart(entries, PLENTY) is None
    assert cached_set(FileImages(entries)).load(COUNT - 1).size == (7, 7)


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("tiny-imagenet", 200)])
@pytest.mark.usefixtures("entries")
def test_data_sets_of_small_images_come_so(
    name: str, classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPL_IMAGE_CACHE", str(tmp_path / "cache"))
    for part in ("train", "test"):
        for number in range(classes):
            folder = tmp_path / "data" / part / f"class {number:03}"
            folder.mkdir(parents=True)
            Image.new("RGB", (4, 4), (number, 0, 0)).save(folder / "0.png")
    monkeypatch.setattr("tpl.stream.sources._sources", {})
    source = load_source(name, tmp_path / "data")
    monkeypatch.setattr(FileImages, "load", lambda self, index: Image.new("RGB", (4, 4)))  # asked for the first's size
    for images in (source.train, source.test):
        assert images is not None
        block = images.block(np.arange(classes))
        assert block is not None and block[:, 0, 0, 0].tolist() == list(range(classes))
