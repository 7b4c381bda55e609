"""Pillow's image resize as matrix products on any device that has float64, equal to it in every bit.

Pillow resizes 8-bit images one side after the other. In each of the two steps an output pixel is a sum of input
pixels, with weights that are multiples of 2^-22, then rounded and cut to 0..255. Such sums are exact in float64 in
whatever order they are added up, so a matrix product gives the same bits.

Which side comes first depends on the sizes and on Pillow's version (before 13, always the width). So nothing is
assumed: `matching` tries both on an image of noise, and finds none where Pillow does something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ONE = 1 << 22  # Pillow keeps weights as whole multiples of 1 / _ONE
MAX_BYTES = 1 << 28  # float64 held at one time; a large batch goes through in chunks of this size


def _box(x: float) -> float:
    return 1.0 if -0.5 < x <= 0.5 else 0.0


def _bilinear(x: float) -> float:
    return max(1.0 - abs(x), 0.0)


def _hamming(x: float) -> float:
    x = abs(x)
    if x == 0.0:
        return 1.0
    if x >= 1.0:
        return 0.0
    x *= math.pi
    return math.sin(x) / x * (0.54 + 0.46 * math.cos(x))


def _bicubic(x: float) -> float:
    a, x = -0.5, abs(x)
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    if x < 2.0:
        return (((x - 5) * x + 8) * x - 4) * a
    return 0.0


def _lanczos(x: float) -> float:
    return _sinc(x) * _sinc(x / 3) if -3.0 <= x < 3.0 else 0.0


def _sinc(x: float) -> float:
    return math.sin(x * math.pi) / (x * math.pi) if x != 0.0 else 1.0


# Each with its support: how far from its centre, in pixels of the smaller image, a weight may be other than 0.
_FILTERS: dict[str, tuple[Callable[[float], float], float]] = {
    "box": (_box, 0.5),
    "bilinear": (_bilinear, 1.0),
    "hamming": (_hamming, 1.0),
    "bicubic": (_bicubic, 2.0),
    "lanczos": (_lanczos, 3.0),
}
FILTERS = tuple(_FILTERS)


@dataclass(frozen=True)
class Geometry:
    """What a resize and a crop do to images of one size; sizes are (height, width), `corner` is (top, left)."""

    source: tuple[int, int]
    resized: tuple[int, int]
    corner: tuple[int, int]
    crop: tuple[int, int]
    filter: str
    height_first: bool = False


def matching(
    geometry: Geometry, transform: Callable[[Image.Image], Image.Image], device: torch.device
) -> Geometry | None:
    """`geometry`, with its sides in the order in which `transform` takes them; None if it is not what that does.

    Tried on `device`, so one whose float64 is not exact is found out as well.
    """
    import torch

    noise = np.random.default_rng(0).choice(np.array([0, 255], np.uint8), (*geometry.source, 3))
    expected = np.asarray(transform(Image.fromarray(noise))).transpose(2, 0, 1)
    for candidate in (geometry, replace(geometry, height_first=True)):
        tried = resample(torch.from_numpy(noise[None]).to(device), candidate)[0]
        if np.array_equal(tried.cpu().numpy(), expected):
            return candidate
    return None


def resample(pixels: Tensor, geometry: Geometry) -> Tensor:
    """uint8 images `[n, h, w, 3]` resized and cropped as `geometry` says: uint8 `[n, 3, height, width]`.

    Only what the crop keeps is computed, on the device of `pixels`.
    """
    rows, columns, vertical, horizontal = _steps(geometry, pixels.device)
    height, width = geometry.crop
    out = pixels.new_empty((len(pixels), 3, height, width))
    tallest = max(rows.stop - rows.start, height)
    widest = max(columns.stop - columns.start, width)
    chunk = max(1, MAX_BYTES // (3 * tallest * widest * 3 * 8))  # a step has its input, output and a copy
    for start in range(0, len(pixels), chunk):
        part = pixels[start : start + chunk, rows, columns].permute(0, 3, 1, 2)
        for along_height in (geometry.height_first, not geometry.height_first):
            if along_height and vertical is not None:
                part = _rounded(vertical @ part.double())
            elif not along_height and horizontal is not None:
                part = _rounded(part.double() @ horizontal)
        out[start : start + chunk] = part
    return out


def _rounded(sums: Tensor) -> Tensor:
    """Halves up, within 0..255. In place: the sums are by far the largest thing there is."""
    return sums.add_(0.5).clamp_(0, 255).floor_()


@lru_cache(maxsize=64)
def _steps(geometry: Geometry, device: torch.device) -> tuple[slice, slice, Tensor | None, Tensor | None]:
    """The rows and columns that matter, the matrix over rows, and the one over columns, transposed."""
    import torch

    rows, vertical = _step(geometry, 0)
    columns, horizontal = _step(geometry, 1)
    return (
        rows,
        columns,
        None if vertical is None else torch.tensor(vertical, device=device),
        None if horizontal is None else torch.tensor(horizontal.T.copy(), device=device),
    )


def _step(geometry: Geometry, side: int) -> tuple[slice, NDArray[np.float64] | None]:
    """The part of the source that the crop depends on, and their weights; none for a side left as it is."""
    size, new, first = geometry.source[side], geometry.resized[side], geometry.corner[side]
    cropped = slice(first, first + geometry.crop[side])
    if size == new:
        return cropped, None
    matrix = weights(geometry.filter, size, new)[cropped]
    used = np.flatnonzero(matrix.any(axis=0))
    part = slice(int(used[0]), int(used[-1]) + 1)
    return part, matrix[:, part]


@lru_cache(maxsize=64)
def weights(filter_name: str, size: int, new: int) -> NDArray[np.float64]:
    """Pillow's weights for a side of `size` pixels that becomes `new` long: `[new, size]`, multiples of 2^-22."""
    function, support = _FILTERS[filter_name]
    scale = size / new
    stretch = max(scale, 1.0)  # a filter grows as the image shrinks: it then averages
    support *= stretch
    matrix = np.zeros((new, size))
    for row in range(new):
        centre = (row + 0.5) * scale
        low = max(int(centre - support + 0.5), 0)
        high = min(int(centre + support + 0.5), size)
        values = [function((x - centre + 0.5) * (1.0 / stretch)) for x in range(low, high)]
        total = 0.0
        for value in values:  # one by one, as Pillow does: `sum` would round otherwise
            total += value
        scaled = [value / total * _ONE for value in values]
        matrix[row, low:high] = [math.trunc(value - 0.5 if value < 0 else value + 0.5) / _ONE for value in scaled]
    matrix.flags.writeable = False  # the cache shares it between callers
    return matrix
