"""Decoding of awkward files, image sets and their views, and the encoder's preprocessing."""

import io
import struct
import threading
import time
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tpl.stream import (
    ArrayImages,
    DataError,
    FileImages,
    Preprocess,
    UnreadableImage,
    concatenate,
    decode,
)
from tpl.stream.decoding import MAX_ASPECT
from tpl.stream.folders import Archive, ZipMember
from tpl.stream.images import CachedImages

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "input_size": (3, 24, 24),
    "interpolation": "bicubic",
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "crop_pct": 0.9,
    "crop_mode": "center",
}


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def first_pixel(data: bytes) -> tuple[int, ...]:
    image = decode(data, "x")
    assert image.mode == "RGB"
    pixel = image.getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return pixel


class TestDecode:
    def test_alpha_is_laid_on_white(self) -> None:
        assert first_pixel(saved(Image.new("RGBA", (2, 2), (255, 0, 0, 0)))) == (255, 255, 255)
        assert first_pixel(saved(Image.new("RGBA", (2, 2), (255, 0, 0, 255)))) == (255, 0, 0)
        assert first_pixel(saved(Image.new("LA", (2, 2), (0, 0)))) == (255, 255, 255)
        assert first_pixel(saved(Image.new("LA", (2, 2), (40, 255)))) == (40, 40, 40)

    def test_palette_with_and_without_transparency(self) -> None:
        image = Image.new("P", (2, 2), 1)
        image.putpalette([0, 0, 0, 10, 200, 30])
        assert first_pixel(saved(image)) == (10, 200, 30)
        assert first_pixel(saved(image, transparency=1)) == (255, 255, 255)
        assert first_pixel(saved(image, "GIF")) == (10, 200, 30)

    def test_transparent_colour_of_an_rgb_file(self) -> None:
        image = Image.new("RGB", (2, 2), (1, 2, 3))
        assert first_pixel(saved(image, transparency=(1, 2, 3))) == (255, 255, 255)
        assert first_pixel(saved(image, transparency=(9, 9, 9))) == (1, 2, 3)

    def test_grey_bilevel_and_cmyk(self) -> None:
        assert first_pixel(saved(Image.new("L", (2, 2), 77))) == (77, 77, 77)
        assert first_pixel(saved(Image.new("1", (2, 2), 1))) == (255, 255, 255)
        assert first_pixel(saved(Image.new("CMYK", (2, 2), (0, 255, 255, 0)), "TIFF")) == (255, 0, 0)

    @pytest.mark.parametrize("kind", ["PNG", "TIFF"])
    def test_16_bit_grey_is_scaled_not_clipped(self, kind: str) -> None:
        values = np.array([[0, 257 * 100, 65535]], dtype=np.uint16)
        image = decode(saved(Image.fromarray(values), kind), "x")
        assert np.asarray(image)[0, :, 0].tolist() == [0, 100, 255]

    def test_transparent_level_of_16_bit_grey(self) -> None:
        values = np.array([[257 * 7, 257 * 8]], dtype=np.uint16)
        data = saved(Image.fromarray(values), transparency=257 * 7)
        assert np.asarray(decode(data, "x"))[0, :, 0].tolist() == [255, 8]

    def test_32_bit_grey_of_16_bit_range_and_wider(self) -> None:
        narrow = Image.fromarray(np.array([[0, 257 * 100, 65535]], dtype=np.int32))
        assert np.asarray(decode(saved(narrow, "TIFF"), "x"))[0, :, 0].tolist() == [0, 100, 255]
        wide = Image.fromarray(np.array([[-1000, 0, 1_000_000 - 1000]], dtype=np.int32))
        assert np.asarray(decode(saved(wide, "TIFF"), "x"))[0, :, 0].tolist() == [0, 0, 255]

    def test_float_grey(self) -> None:
        unit = Image.fromarray(np.array([[0.0, 0.2, 1.0]], dtype=np.float32))
        assert np.asarray(decode(saved(unit, "TIFF"), "x"))[0, :, 0].tolist() == [0, 51, 255]
        broken = Image.fromarray(np.array([[0.0, np.nan, 255.0]], dtype=np.float32))
        assert np.asarray(decode(saved(broken, "TIFF"), "x"))[0, :, 0].tolist() == [0, 0, 255]

    @pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
    def test_exif_orientation_is_applied(self, kind: str) -> None:
        pixels = np.zeros((8, 32, 3), dtype=np.uint8)
        pixels[:, :16] = 255  # white on the left; turned clockwise, on the top
        exif = Image.Exif()
        exif[0x0112] = 6
        image = np.asarray(decode(saved(Image.fromarray(pixels), kind, exif=exif), "x"))
        assert image.shape == (32, 8, 3)
        assert image[4, 4, 0] > 250 and image[28, 4, 0] < 5

    @pytest.mark.filterwarnings("ignore:Corrupt EXIF")
    def test_damaged_exif_leaves_the_pixels(self) -> None:
        data = saved(noise(8, 8), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\x7f")
        assert decode(data, "x").size == (8, 8)

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
    def test_truncated_file_is_named(self, kind: str) -> None:
        data = saved(noise(64, 64), kind)
        with pytest.raises(UnreadableImage, match=r"cat/one\.img .*(damaged|not an image)"):
            decode(data[: len(data) // 2], "cat/one.img")

    @pytest.mark.parametrize("data", [b"", b"not an image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"])
    def test_other_files_are_refused_by_name(self, data: bytes) -> None:
        with pytest.raises(UnreadableImage, match="notes.jpg"):
            decode(data, "notes.jpg")

    @pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
    @pytest.mark.parametrize("side", [13_400, 40_000])  # just above our bound; above Pillow's as well
    def test_decompression_bomb(self, side: int) -> None:
        with pytest.raises(UnreadableImage, match="bomb.png is too large .*million pixels"):
            decode(_png_header(side, side), "bomb.png")

    def test_the_bound_holds_even_where_pillows_own_is_lifted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
        with pytest.raises(UnreadableImage, match="bomb.png is too large .13400 x 13400"):
            decode(_png_header(13_400, 13_400), "bomb.png")

    def test_strips_are_refused_beyond_the_stated_ratio(self) -> None:
        assert decode(saved(Image.new("L", (MAX_ASPECT, 1))), "x").size == (MAX_ASPECT, 1)
        with pytest.raises(UnreadableImage, match="strip.png"):
            decode(saved(Image.new("L", (MAX_ASPECT + 1, 1))), "strip.png")


def _png_header(width: int, height: int) -> bytes:
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", b""),
        (b"IEND", b""),
    ]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


class TestSets:
    def test_array_images_grey_and_rgb(self) -> None:
        pixels = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
        images = ArrayImages(pixels, [1, 0], origin="toy")
        assert images.load(1).size == (4, 3) and images.load(1).mode == "RGB"
        assert np.array_equal(np.asarray(images.load(1))[:, :, 2], pixels[1])
        assert images.name(1) == "toy[1]"
        with pytest.raises(DataError, match="uint8"):
            ArrayImages(pixels.astype(np.float32), [1, 0])
        with pytest.raises(DataError, match="2 images need 2"):
            ArrayImages(pixels, [1, 0, 1])

    def test_labels_cannot_be_changed(self) -> None:
        images = ArrayImages(np.zeros((2, 3, 3), np.uint8), [0, 1])
        with pytest.raises(ValueError, match="read-only"):
            images.labels[0] = 1

    def test_select_of_select_keeps_names_and_labels(self) -> None:
        images = ArrayImages(np.zeros((6, 2, 2), np.uint8), [0, 1, 2, 3, 4, 5], origin="toy")
        twice = images.select([5, 3, 1]).select([2, 0])
        assert [twice.name(i) for i in range(2)] == ["toy[1]", "toy[5]"]
        assert twice.labels.tolist() == [1, 5]
        masked = images.select(np.array([True, False, False, False, False, True]))
        assert masked.labels.tolist() == [0, 5]
        assert len(images.select([])) == 0
        for wrong in ([6], [-1], [0.5], np.array([True])):
            with pytest.raises(IndexError):
                images.select(wrong)
        for index in (-1, 2):
            with pytest.raises(IndexError):
                twice.load(index)

    def test_concatenate_offsets_labels_and_finds_each_image(self) -> None:
        first = ArrayImages(np.full((2, 2, 2), 10, np.uint8), [0, 1], origin="a")
        second = ArrayImages(np.full((3, 2, 2), 20, np.uint8), [0, 0, 1], origin="b")
        joined = concatenate([first.select([1]), second, first], [0, 2, 4])
        assert joined.labels.tolist() == [1, 2, 2, 3, 4, 5]
        assert [joined.name(i) for i in range(6)] == ["a[1]", "b[0]", "b[1]", "b[2]", "a[0]", "a[1]"]
        assert joined.load(1).getpixel((0, 0)) == (20, 20, 20)
        assert joined.load(5).getpixel((0, 0)) == (10, 10, 10)
        with pytest.raises(DataError):
            concatenate([first], [0, 1])

    def test_blocks_are_the_images_in_a_row(self) -> None:
        rng = np.random.default_rng(0)
        grey = ArrayImages(rng.integers(0, 256, (4, 3, 5), dtype=np.uint8), [0] * 4)
        rgb = ArrayImages(rng.integers(0, 256, (4, 3, 5, 3), dtype=np.uint8), [0] * 4)
        mixed = concatenate([grey, rgb.select([3, 1]), grey.select([2])], [0, 0, 0]).select([6, 4, 0, 5])
        for images in (grey, rgb, rgb.select([2, 0, 0]), mixed):
            chosen = np.arange(len(images))[::-1]
            block = images.block(chosen)
            assert block is not None and block.flags.writeable
            assert np.array_equal(block, np.stack([np.asarray(images.load(int(i))) for i in chosen]))
        empty = rgb.block(np.arange(0))
        assert empty is not None and empty.shape == (0, 3, 5, 3)
        for wrong in (-1, 4):
            with pytest.raises(IndexError):
                rgb.block(np.array([wrong]))

    def test_there_is_no_block_of_several_sizes_or_of_files(self, tmp_path: Path) -> None:
        one, other = (ArrayImages(np.zeros((2, side, 2), np.uint8), [0, 0]) for side in (2, 3))
        files = FileImages([tmp_path / "absent.png"], [0])
        assert concatenate([one, other], [0, 0]).block(np.array([0, 3])) is None
        assert concatenate([one, files], [0, 0]).block(np.array([0, 2])) is None
        assert concatenate([one, files], [0, 0]).block(np.array([0, 1])) is not None  # all from one part
        assert files.block(np.arange(1)) is None

    def test_files_are_read_only_when_loaded(self, tmp_path: Path) -> None:
        path = tmp_path / "late.png"
        images = FileImages([path, tmp_path / "never.png"], [0, 1]).select([0, 1])
        noise(4, 4).save(path)
        assert images.load(0).size == (4, 4)
        with pytest.raises(UnreadableImage, match="never.png"):
            images.load(1)
        assert FileImages([path]).labels.tolist() == [-1]

    def test_a_damaged_zip_member_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "set.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("cat/1.png", saved(noise(16, 16)))
        data = bytearray(path.read_bytes())
        data[200] ^= 0xFF  # inside the stored picture: the checksum no longer fits
        path.write_bytes(bytes(data))
        images = FileImages([ZipMember(Archive(path), "cat/1.png")], [0])
        with pytest.raises(UnreadableImage, match=r"set\.zip/cat/1\.png"):
            images.load(0)

    def test_a_zip_is_safe_to_share_between_threads(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "set.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for i in range(40):
                archive.writestr(f"{i}.png", saved(Image.new("L", (9, 9), i)))
        shared = Archive(path)
        images = FileImages([ZipMember(shared, f"{i}.png") for i in range(40)], [0] * 40)
        wrong: list[object] = []
        inside: list[int] = []
        plain_read = zipfile.ZipFile.read

        def watched(self: zipfile.ZipFile, name: str) -> bytes:
            inside.append(1)
            time.sleep(0.0005)  # lets other threads in, where nothing keeps them out
            if len(inside) > 1:
                wrong.append("two threads read at once")
            data = plain_read(self, name)
            inside.pop()
            return data

        monkeypatch.setattr(zipfile.ZipFile, "read", watched)

        def read() -> None:
            for i in range(40):
                try:
                    if images.load(i).getpixel((0, 0)) != (i, i, i):
                        wrong.append(i)
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=read) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


class TestCached:
    def files(self, folder: Path, sizes: list[tuple[int, int]]) -> FileImages:
        for i, (height, width) in enumerate(sizes):
            noise(height, width, seed=i).save(folder / f"{i}.png")
        return FileImages([folder / f"{i}.png" for i in range(len(sizes))], [0] * len(sizes))

    def test_each_image_is_decoded_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        files = self.files(tmp_path, [(5, 4)] * 6)
        expected = np.stack([np.asarray(files.load(i)) for i in range(6)])
        asked: list[int] = []
        plain_load = FileImages.load
        monkeypatch.setattr(FileImages, "load", lambda self, i: asked.append(i) or plain_load(self, i))
        kept = CachedImages(files)
        assert np.array_equal(np.asarray(kept.load(3)), expected[3]) and asked == [3]
        block = kept.select([1, 3, 5]).block(np.array([2, 1, 0]))
        assert np.array_equal(block, expected[[5, 3, 1]])  # type: ignore[arg-type]
        assert sorted(asked) == [1, 3, 5]
        for i in range(6):
            changed = kept.load(i)
            assert np.array_equal(np.asarray(changed), expected[i])
            changed.paste((0, 0, 0), (0, 0, 4, 5))  # what is handed out is a copy
        kept.block(np.arange(6))[:] = 0  # type: ignore[index]
        assert np.array_equal(kept.block(np.arange(6)), expected)  # type: ignore[arg-type]
        assert sorted(asked) == [0, 1, 2, 3, 4, 5]
        assert kept.name(2) == files.name(2) and kept.identity(2) == files.identity(2)
        assert kept.labels.tolist() == [0] * 6
        for index in (-1, 6):
            with pytest.raises(IndexError):
                kept.load(index)
            with pytest.raises(IndexError):
                kept.block(np.array([index]))

    def test_other_sizes_and_large_sets_are_not_cached(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        files = self.files(tmp_path, [(5, 4), (4, 5), (5, 4)])
        kept = CachedImages(files)
        assert [kept.load(i).size for i in (0, 1, 2, 1)] == [(4, 5), (5, 4), (4, 5), (5, 4)]
        assert kept.block(np.arange(3)) is None and kept.block(np.array([0, 2])) is not None
        monkeypatch.setattr("tpl.stream.images.MAX_CACHED_BYTES", 3 * 5 * 4 * 3 - 1)
        large = CachedImages(files)
        assert large.load(0).size == (4, 5) and large.block(np.array([0, 2])) is None

    def test_an_unreadable_file_is_named_every_time(self, tmp_path: Path) -> None:
        kept = CachedImages(self.files(tmp_path, [(5, 4), (5, 4)]))
        (tmp_path / "1.png").write_bytes(b"nothing")
        for _ in range(2):
            with pytest.raises(UnreadableImage, match="1.png"):
                kept.block(np.arange(2))

    def test_many_threads_see_whole_images(self, tmp_path: Path) -> None:
        files = self.files(tmp_path, [(9, 9)] * 30)
        expected = np.stack([np.asarray(files.load(i)) for i in range(30)])
        kept = CachedImages(files)
        with ThreadPoolExecutor(8) as pool:
            blocks = list(pool.map(kept.block, [np.arange(30)] * 8))
        assert all(np.array_equal(block, expected) for block in blocks)  # type: ignore[arg-type]


SIZES = [
    (24, 24),
    (26, 26),
    (100, 37),
    (37, 100),
    (101, 53),
    (333, 47),
    (29, 401),
    (5, 7),
    (26, 500),
    (25, 80),
]
CONFIGS = [
    CONFIG,
    CONFIG | {"crop_mode": "squash", "crop_pct": 1.0},
    CONFIG | {"crop_mode": "border"},
    CONFIG | {"input_size": (3, 24, 20)},
    CONFIG | {"interpolation": "bilinear", "crop_pct": 0.875, "input_size": (3, 31, 31)},
]


class TestPreprocess:
    def test_it_is_timms_own_transform(self) -> None:
        from timm.data import create_transform

        image = noise(70, 45)
        theirs = create_transform(**CONFIG, is_training=False)(image)
        ours = Preprocess(CONFIG)
        assert torch.allclose(ours.normaliser(CPU)(ours(image)[None])[0], theirs, atol=1e-6)

    @pytest.mark.parametrize("config", CONFIGS)
    def test_shrinking_first_changes_nothing(self, config: dict[str, Any]) -> None:
        preprocess = Preprocess(config)
        for height, width in SIZES:
            image = noise(height, width, seed=height)
            small = preprocess.shrink(image)
            assert small.width * small.height <= image.width * image.height
            assert torch.equal(preprocess(small), preprocess(image)), (height, width)

    def test_shrink_keeps_small_images_and_reduces_large_ones(self) -> None:
        preprocess = Preprocess(CONFIG)
        small, large = noise(12, 20), noise(260, 521)
        assert preprocess.shrink(small) is small
        assert preprocess.shrink(large).size == (52, 26)  # floor(24 / 0.9) = 26; 26 * 521 / 260 = 52.1

    @pytest.mark.parametrize("config", CONFIGS)
    def test_batch_equals_one_by_one_and_counts(self, config: dict[str, Any]) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (70, 40, 23, 3), dtype=np.uint8)
        images = ArrayImages(pixels, [0] * 70)
        preprocess = Preprocess(config)
        counts: list[int] = []
        batch = preprocess.batch(images, progress=counts.append)
        assert batch.dtype == torch.uint8 and batch.shape[1:] == config["input_size"]
        assert all(torch.equal(batch[i], preprocess(images.load(i))) for i in range(70))
        assert sum(counts) == 70 and len(counts) > 1

    def test_images_of_the_right_size_pass_unchanged(self) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (3, 24, 24, 3), dtype=np.uint8)
        exact = Preprocess(CONFIG | {"crop_pct": 1.0})
        assert np.array_equal(exact.batch(ArrayImages(pixels, [0, 0, 0])).numpy(), pixels.transpose(0, 3, 1, 2))
        zoomed = Preprocess(CONFIG)  # same size, but resized to 26 and cropped: not the same pixels
        assert not np.array_equal(zoomed.batch(ArrayImages(pixels, [0, 0, 0])).numpy(), pixels.transpose(0, 3, 1, 2))

    def test_batch_names_the_file_it_cannot_read(self, tmp_path: Path) -> None:
        (tmp_path / "bad.png").write_bytes(b"nothing")
        noise(9, 9).save(tmp_path / "good.png")
        images = FileImages([tmp_path / "good.png", tmp_path / "bad.png"], [0, 0])
        with pytest.raises(UnreadableImage, match="bad.png"):
            Preprocess(CONFIG).batch(images)
        assert Preprocess(CONFIG).batch(images.select([])).shape == (0, 3, 24, 24)

    def test_normalise_is_totensor_and_normalize(self) -> None:
        from torchvision import transforms

        preprocess = Preprocess(CONFIG)
        image = noise(24, 24)
        theirs = transforms.Normalize(CONFIG["mean"], CONFIG["std"])(transforms.ToTensor()(image))
        pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None]
        ours = preprocess.normaliser(CPU)(pixels)
        assert ours.dtype == torch.float32
        assert (ours[0] - theirs).abs().max() <= 1e-6
        assert pixels.dtype == torch.uint8 and int(pixels.max()) > 200  # the input is left alone
        assert preprocess.normaliser(CPU, torch.bfloat16)(pixels).equal(ours.bfloat16())  # rounded once, at the end

    def test_input_size_must_be_rgb(self) -> None:
        with pytest.raises(DataError, match="input_size"):
            Preprocess(CONFIG | {"input_size": (1, 24, 24)})
