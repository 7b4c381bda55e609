"""A few of scikit-learn's bundled digits: real images for tests of a learner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sklearn.datasets import load_digits

from tpl.stream import ArrayImages

_DIGITS = load_digits()
# They come writer by writer: mixed, any part of them is like any other.
_MIXED = np.random.default_rng(0).permutation(len(_DIGITS.target))


def digits(classes: Sequence[int], per_class: int, start: int = 0) -> ArrayImages:
    """`per_class` images of every class, from the `start`-th on; labels count `classes`."""
    rows = [_MIXED[_DIGITS.target[_MIXED] == c][start : start + per_class] for c in classes]
    pixels = np.rint(_DIGITS.images[np.concatenate(rows)] * (255 / 16)).astype(np.uint8)
    return ArrayImages(pixels, np.repeat(np.arange(len(classes)), per_class))
