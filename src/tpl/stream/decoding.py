"""Decodes image files of any mode to upright 8-bit RGB images."""

from __future__ import annotations

import io
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from tpl.errors import UnreadableImage

# Twice Pillow's own warning level.
MAX_PIXELS = 178_956_970
# Images that a process decodes at the same time may take this many bytes together; one that needs more is refused.
DECODING_BYTES = 360 << 20
# A larger image is made smaller by a whole factor before it is converted, a JPEG while it is decoded.
LARGE_PIXELS = 32_000_000
# A thinner strip would grow to hundreds of megabytes when its short side is resized to an encoder's input.
MAX_ASPECT = 200
# Only these decoders may run, whatever a file's name says (Pillow would start Ghostscript for an EPS file).
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")

STRIP = 64  # rows of an image that are converted at a time: only the result has the full size
_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}  # a pixel in Pillow; others take 4
_BUFFERED = {"WEBP": 3, "TIFF": 2}  # decoders that hold the image more than once

_ORIENTATION = 0x0112

warnings.filterwarnings("ignore", message="Image size .* decompression bomb")  # the limits are those above


def decode(data: bytes, name: str) -> Image.Image:
    """The picture in `data` as RGB; of an animation, the first frame. `name` is what error messages call it.

    A picture of more than `LARGE_PIXELS` comes smaller than it is.
    """
    if not data:
        raise UnreadableImage(f"{name} is empty (0 bytes): restore or remove the file.")
    try:
        with Image.open(io.BytesIO(data), formats=_formats()) as image:
            _check_size(image, name)
            if image.format == "JPEG" and _pixels(image) > LARGE_PIXELS:
                factor = 2 ** math.ceil(math.log2(_reduction(image)))
                image.draft(image.mode, (image.width // factor, image.height // factor))
            with BUDGET.decoding(_bytes_needed(image, name)):
                image.load()
                return BUDGET.counted(_upright(image, to_rgb(image, _reduction(image))))
    except UnreadableImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(name) from error
    except UnidentifiedImageError as error:
        raise UnreadableImage(
            f"{name} is not an image this program reads (JPEG, PNG, WebP, BMP, GIF, TIFF): remove or convert it."
        ) from error
    except Exception as error:  # a broken file can make a decoder raise nearly anything
        raise UnreadableImage(
            f"{name} cannot be decoded ({error or type(error).__name__}): the file is damaged or incomplete; "
            "restore or remove it."
        ) from error


def size_of(file: Path | io.BytesIO, name: str) -> tuple[int, int]:
    """Width and height from a file's header; UnreadableImage where it has none."""
    try:
        with Image.open(file, formats=_formats()) as image:
            return image.size
    except Exception as error:  # as in `decode`
        raise UnreadableImage(f"{name} has no size that can be read ({error or type(error).__name__}).") from error


class Budget:
    """Bytes that decoded images may take in this process: whoever wants to decode waits until there is room.

    Results count as long as they are in use. One image is always decoded, so that nobody waits for ever for results
    that somebody keeps.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.decoded = self.kept = self.active = 0
        self._changed = threading.Condition(threading.RLock())  # a result may end while its own thread is in here

    @contextmanager
    def decoding(self, needed: int) -> Iterator[None]:
        """Wait for room for one image, and hold it."""
        with self._changed:
            while self.active and self.decoded + self.kept + needed > self.limit:
                self._changed.wait()
            self.decoded, self.active = self.decoded + needed, self.active + 1
        try:
            yield
        finally:
            with self._changed:
                self.decoded, self.active = self.decoded - needed, self.active - 1
                self._changed.notify_all()

    def counted(self, image: Image.Image) -> Image.Image:
        """`image`, counted until nobody uses it any more."""
        size = 4 * _pixels(image)
        with self._changed:
            self.kept += size
        weakref.finalize(image, self._dropped, size).atexit = False
        return image

    def _dropped(self, size: int) -> None:
        with self._changed:
            self.kept -= size
            self._changed.notify_all()


BUDGET = Budget(DECODING_BYTES)


def _pixels(image: Image.Image) -> int:
    return image.width * image.height


def _reduction(image: Image.Image) -> int:
    """The whole factor that makes an image no larger than `LARGE_PIXELS`."""
    return math.ceil(math.sqrt(_pixels(image) / LARGE_PIXELS)) or 1


def _bytes_needed(image: Image.Image, name: str) -> int:
    """Bytes to decode and convert an image; UnreadableImage if no room is large enough."""
    own = _pixels(image) * _BYTES.get(image.mode, 4) * _BUFFERED.get(image.format or "", 1)
    needed = own + 2 * 4 * _pixels(image) // _reduction(image) ** 2
    if own > DECODING_BYTES:
        raise UnreadableImage(
            f"{name} is too large ({image.width} x {image.height}, {own >> 20} MiB once decoded; at most "
            f"{DECODING_BYTES >> 20} MiB): make it smaller first."
        )
    return needed


def to_rgb(image: Image.Image, factor: int = 1) -> Image.Image:
    """`image` as 8-bit RGB: transparency laid on white, deep grey levels scaled rather than clipped.

    `factor` makes it smaller by averaging squares of pixels. Rows are converted in strips, to the same pixels as all at
    once: only the result has the full size.
    """
    if image.mode == "RGB" and "transparency" not in image.info:
        return image if factor == 1 else image.reduce(factor)
    convert = _deep_grey(image) if image.mode.startswith("I") or image.mode == "F" else _colours
    rows = STRIP * factor
    if image.height <= rows and factor == 1:
        return convert(image)
    size = math.ceil(image.width / factor), math.ceil(image.height / factor)
    whole = Image.new("RGB", size)
    for top in range(0, image.height, rows):
        strip = convert(image.crop((0, top, image.width, min(top + rows, image.height))))
        whole.paste(strip if factor == 1 else strip.reduce(factor), (0, top // factor))
    return whole


def _colours(image: Image.Image) -> Image.Image:
    if image.mode == "La":  # Pillow converts premultiplied grey to "LA" alone
        image = image.convert("LA")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


@cache
def _formats() -> tuple[str, ...]:
    # A Pillow built without one of the libraries has no such decoder, and to request it is a KeyError.
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _check_size(image: Image.Image, name: str) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise _too_large(name, f"{width} x {height} = ")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise UnreadableImage(
            f"{name} is {width} x {height}: strips longer than {MAX_ASPECT} times their width are refused; crop it."
        )


def _too_large(name: str, size: str = "") -> UnreadableImage:
    return UnreadableImage(
        f"{name} is too large ({size}more than {MAX_PIXELS // 10**6} million pixels): make it smaller first."
    )


_TURNED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def _upright(image: Image.Image, converted: Image.Image) -> Image.Image:
    """`converted` turned as the camera that took `image` was held."""
    try:
        turn = _TURNED.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:
        return converted
    return converted if turn is None else converted.transpose(turn)


def _deep_grey(image: Image.Image) -> Callable[[Image.Image], Image.Image]:
    """Converts strips of 16-bit, 32-bit or float grey. 16 bits map 65535 to 255; a wider range is stretched to fit."""
    if image.mode.startswith("I;16"):
        return lambda strip: _levels((np.asarray(strip).astype(np.uint32) + 128) // 257, strip)
    tops = range(0, image.height, STRIP)
    strips = (image.crop((0, top, image.width, min(top + STRIP, image.height))) for top in tops)
    ranges = [(float(values.min()), float(values.max())) for values in map(_finite, strips)]
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)

    def convert(strip: Image.Image) -> Image.Image:
        values = _finite(strip)
        if image.mode == "F" and low >= 0 and high <= 255:
            scaled = values * (255 if high <= 1 else 1)
        elif image.mode != "F" and low >= 0 and high <= 65535:
            scaled = values / 257
        else:
            scaled = (values - low) * (255 / (high - low)) if high > low else np.zeros_like(values)
        return _levels(np.rint(scaled), strip)

    return convert


def _levels(grey: NDArray[Any], strip: Image.Image) -> Image.Image:
    """Grey levels up to 255 as RGB, white where the strip they come from is transparent."""
    levels, transparent = grey.astype(np.uint8), strip.info.get("transparency")
    if isinstance(transparent, int):
        levels[np.asarray(strip) == transparent] = 255
    return Image.fromarray(levels).convert("RGB")


def _finite(image: Image.Image) -> NDArray[np.float64]:
    values: NDArray[Any] = np.asarray(image)
    found: NDArray[np.float64] = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    return found
