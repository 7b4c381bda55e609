"""Resize and crop give timm's pixels, every one of them."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from PIL import Image
from timm.data.transforms_factory import create_transform

from tpl.errors import DataError
from tpl.stream import preprocess
from tpl.stream.preprocess import evaluation_steps, in_chunks

SIZES = [(24, 24), (24, 31), (13, 70), (70, 13), (45, 46), (97, 64), (201, 350), (3, 5), (26, 26)]
MODES = ["center", "border", "squash"]
SHAPES = [(24, 24), (24, 20), (31, 31), (16, 33)]
REST: list[dict[str, Any]] = [
    {"interpolation": "bicubic", "crop_pct": 0.9, "mean": (0.5, 0.4, 0.3)},
    {"interpolation": "lanczos", "crop_pct": 1.0},
    {},
]


@pytest.mark.parametrize("mode", MODES)
def test_pixels_are_timms(mode: str) -> None:
    for number, ((height, width), shape, rest) in enumerate(product(SIZES, SHAPES, REST)):
        config = {"input_size": (3, *shape), "crop_mode": mode} | rest
        noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        resize, crop = evaluation_steps(config)
        image = Image.fromarray(noise)
        ours = np.asarray(crop(resize(image))).transpose(2, 0, 1)
        theirs = create_transform(**config, is_training=False, use_prefetcher=True)(image)
        assert np.array_equal(ours, np.asarray(theirs)), (config, noise.shape)


def test_a_mode_that_timm_does_not_have_is_refused() -> None:
    with pytest.raises(DataError, match="crop mode 'corner' with interpolation 'bilinear' is not supported"):
        evaluation_steps({"input_size": (3, 8, 8), "crop_mode": "corner"})


@pytest.mark.parametrize(
    ("count", "size", "lengths"),
    [
        (0, None, []),
        (1, None, [1]),
        (6, None, [2, 2, 2]),
        (7, None, [3, 3, 1]),
        (70, None, [24, 24, 22]),
        (200, None, [32] * 6 + [8]),
        (6, 4, [4, 2]),
    ],
)
def test_few_images_are_shared_out_among_all_threads(
    count: int, size: int | None, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocess, "decoding_workers", lambda: 3)
    found = list(in_chunks(list, count, size))
    assert [len(chunk) for chunk in found] == lengths
    assert [index for chunk in found for index in chunk] == list(range(count))
