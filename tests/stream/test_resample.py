"""Resizing by matrix products gives Pillow's own pixels."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from tpl.stream import ArrayImages, FileImages, ImageSet, Preprocess, UnreadableImage, preprocess
from tpl.stream.resample import FILTERS, Geometry, matching, resample, weights

RESIZES = [
    ((32, 32), (248, 248)),
    ((37, 53), (19, 100)),  # taller shrinks, wider grows: Pillow 13 takes the height first
    ((53, 37), (100, 19)),
    ((64, 64), (64, 30)),
    ((64, 64), (30, 64)),
    ((101, 133), (57, 11)),
    ((1, 9), (50, 2)),
    ((3, 2), (56, 84)),
    ((201, 29), (13, 17)),
    ((5, 7), (5, 7)),
]


def pictures(kind: str, size: tuple[int, int], count: int = 3) -> NDArray[np.uint8]:
    rng = np.random.default_rng([len(kind), *size])
    if kind == "noise":
        return rng.integers(0, 256, (count, *size, 3), dtype=np.uint8)
    if kind == "black and white":  # overshoots, which Pillow cuts off after each side
        return rng.choice(np.array([0, 255], np.uint8), (count, *size, 3))
    return np.full((count, *size, 3), [255, 254, 1], dtype=np.uint8)


def pillows(pixels: NDArray[np.uint8], geometry: Geometry) -> torch.Tensor:
    height, width = geometry.resized
    method = Image.Resampling[geometry.filter.upper()]
    resized = np.stack([np.asarray(Image.fromarray(image).resize((width, height), method)) for image in pixels])
    (top, left), (tall, wide) = geometry.corner, geometry.crop
    return torch.from_numpy(resized[:, top : top + tall, left : left + wide]).permute(0, 3, 1, 2)


def as_pillow_does(geometry: Geometry) -> Geometry:
    def transform(image: Image.Image) -> Image.Image:
        pixels = pillows(np.asarray(image)[None], geometry)[0]
        return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())

    found = matching(geometry, transform, torch.device("cpu"))
    assert found is not None
    return found


@pytest.mark.parametrize("kind", ["noise", "black and white", "plain"])
@pytest.mark.parametrize(("source", "resized"), RESIZES, ids=str)
@pytest.mark.parametrize("name", FILTERS)
def test_every_bit_is_pillows(name: str, source: tuple[int, int], resized: tuple[int, int], kind: str) -> None:
    pixels = pictures(kind, source)
    whole = as_pillow_does(Geometry(source, resized, (0, 0), resized, name))
    assert torch.equal(resample(torch.from_numpy(pixels), whole), pillows(pixels, whole))
    if min(resized) > 4:  # a part of it, off the centre
        crop = resized[0] - 3, resized[1] - 4
        part = Geometry(source, resized, (2, 1), crop, name, whole.height_first)
        assert torch.equal(resample(torch.from_numpy(pixels), part), pillows(pixels, part))


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = Geometry((20, 30), (40, 44), (3, 5), (32, 32), "bicubic")
    pixels = torch.from_numpy(pictures("noise", (20, 30), 7))
    together = resample(pixels, geometry)
    monkeypatch.setattr("tpl.stream.resample.MAX_BYTES", 2 * 3 * 32 * 32 * 3 * 8)
    assert torch.equal(resample(pixels, geometry), together)
    assert resample(pixels[:0], geometry).shape == (0, 3, 32, 32)


def test_weights_are_pillows_whole_numbers() -> None:
    for name in FILTERS:
        for size, new in ((7, 19), (19, 7), (32, 248)):
            matrix = weights(name, size, new)
            assert matrix.shape == (new, size)
            assert (matrix * 2**22 == np.rint(matrix * 2**22)).all()
            assert np.abs(matrix.sum(axis=1) - 1).max() < 1e-5


def test_a_transform_that_does_something_else_is_noticed() -> None:
    geometry = Geometry((20, 30), (40, 44), (3, 5), (32, 32), "bicubic")
    assert as_pillow_does(geometry) == geometry
    assert matching(geometry, lambda image: image.resize((32, 32)), torch.device("cpu")) is None


CONFIG: dict[str, Any] = {"input_size": (3, 24, 24), "interpolation": "bicubic", "crop_pct": 0.9}
CONFIGS = [
    CONFIG,
    *(CONFIG | {"interpolation": name} for name in ("bilinear", "lanczos", "box", "hamming", "nearest")),
    CONFIG | {"crop_mode": "squash"},
    CONFIG | {"crop_mode": "border"},  # adds borders, except to squares
    CONFIG | {"input_size": (3, 24, 20)},
    CONFIG | {"input_size": (3, 31, 31), "crop_pct": 0.875},
    CONFIG | {"crop_pct": 1.0},
]


class Loaded(ImageSet):
    """Pictures of any sizes, as from files; `asked` counts how often each was decoded."""

    def __init__(self, arrays: list[NDArray[np.uint8]]) -> None:
        self.arrays, self.asked = arrays, [0] * len(arrays)

    @property
    def labels(self) -> NDArray[np.int64]:
        return np.zeros(len(self.arrays), np.int64)

    def __len__(self) -> int:
        return len(self.arrays)

    def load(self, index: int) -> Image.Image:
        self.asked[index] += 1
        return Image.fromarray(self.arrays[index])

    def name(self, index: int) -> str:
        return f"picture {index}"

    def identity(self, index: int) -> bytes:
        return self.arrays[index].tobytes()


class TestDeviceBatches:
    """What is done where a GPU resizes, with the CPU in its place."""

    @pytest.fixture(autouse=True)
    def _device_resizes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.resampled: list[Geometry] = []

        def watched(pixels: torch.Tensor, geometry: Geometry) -> torch.Tensor:
            self.resampled.append(geometry)
            return resample(pixels, geometry)

        monkeypatch.setattr(preprocess, "RESIZING_DEVICES", {"cpu"})
        monkeypatch.setattr(preprocess, "_DECODED", 32)
        monkeypatch.setattr(preprocess, "resample", watched)

    @pytest.mark.parametrize("size", [(8, 8), (24, 24), (26, 26), (40, 23), (31, 47)], ids=str)
    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    def test_arrays(self, config: dict[str, Any], size: tuple[int, int]) -> None:
        images = ArrayImages(pictures("noise", size, 40), [0] * 40).select(np.arange(39, -1, -1))
        transform = Preprocess(config)
        counts: list[int] = []
        batch = transform.batch(images, counts.append)
        assert all(torch.equal(batch[i], transform(images.load(i))) for i in range(40))
        assert sum(counts) == 40 and len(counts) > 1
        square = size[0] == size[1]
        left_to_pillow = config["interpolation"] == "nearest" or (config.get("crop_mode") == "border" and not square)
        assert bool(self.resampled) != left_to_pillow

    def test_files_of_one_size_and_of_several(self) -> None:
        small, other = pictures("noise", (30, 20), 70), pictures("noise", (20, 30), 1)
        images = Loaded([*small[:40], *other, *small[40:]])
        transform = Preprocess(CONFIG)
        batch = transform.batch(images)
        assert images.asked == [1] * 71  # none is decoded again where sizes turn out to differ
        assert all(torch.equal(batch[i], transform(images.load(i))) for i in range(71))
        assert len(self.resampled) == 2  # the first chunk and the last

    def test_large_images_are_not_sent(self) -> None:
        images = Loaded(list(pictures("noise", (100, 90), 3)))
        transform = Preprocess(CONFIG)
        assert torch.equal(transform.batch(images), torch.stack([transform(images.load(i)) for i in range(3)]))
        assert not self.resampled

    def test_errors_name_the_image(self, tmp_path: Any) -> None:
        (tmp_path / "bad.png").write_bytes(b"nothing")
        Image.new("RGB", (9, 9)).save(tmp_path / "good.png")
        with pytest.raises(UnreadableImage, match="bad.png"):
            Preprocess(CONFIG).batch(FileImages([tmp_path / "good.png", tmp_path / "bad.png"], [0, 0]))
        strips = Loaded(list(pictures("noise", (2, 400), 2)))
        with pytest.raises(UnreadableImage, match=r"picture 0 .400 x 2. cannot be resized"):
            Preprocess(CONFIG | {"crop_mode": "border"}).batch(strips)

    def test_no_images(self) -> None:
        assert Preprocess(CONFIG).batch(Loaded([])).shape == (0, 3, 24, 24)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_gpu_gives_the_same_pixels(config: dict[str, Any]) -> None:
    transform = Preprocess(config)
    for images in (ArrayImages(pictures("noise", (32, 32), 100), [0] * 100), Loaded([*pictures("noise", (31, 47))])):
        batch = transform.batch(images, device="cuda")
        assert batch.is_cuda
        assert torch.equal(batch.cpu(), transform.batch(images))
