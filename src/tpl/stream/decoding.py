"""Decodes image files of any mode to upright 8-bit RGB images."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from tpl.errors import UnreadableImage

# Twice Pillow's own warning level: half a gigabyte once decoded to RGB.
MAX_PIXELS = 178_956_970
# A thinner strip would grow to hundreds of megabytes when its short side is resized to an encoder's input.
MAX_ASPECT = 200
# Only these decoders may run, whatever a file's name says (Pillow would start Ghostscript for an EPS file).
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")

STRIP = 256  # rows of a deep grey image that are converted at a time, each value in 8 bytes

_ORIENTATION = 0x0112


def decode(data: bytes, name: str) -> Image.Image:
    """The picture in `data` as RGB; of an animation, the first frame. `name` is what error messages call it."""
    if not data:
        raise UnreadableImage(f"{name} is empty (0 bytes): restore or remove the file.")
    try:
        with Image.open(io.BytesIO(data), formats=_formats()) as image:
            _check_size(image, name)
            image.load()
            return to_rgb(_upright(image))
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


def to_rgb(image: Image.Image) -> Image.Image:
    """`image` as 8-bit RGB: transparency laid on white, deep grey levels scaled rather than clipped."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        return _deep_grey(image)
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


def _upright(image: Image.Image) -> Image.Image:
    try:
        if image.getexif().get(_ORIENTATION, 1) == 1:
            return image
        return ImageOps.exif_transpose(image)
    except Exception:
        return image


def _deep_grey(image: Image.Image) -> Image.Image:
    """16-bit, 32-bit and float grey as RGB. 16 bits map 65535 to 255; a wider range is stretched to fit."""
    raw = np.asarray(image)
    levels = np.empty(raw.shape, dtype=np.uint8)
    strips = [slice(start, start + STRIP) for start in range(0, len(raw), STRIP)]
    low, high = min(float(_finite(raw[s]).min()) for s in strips), max(float(_finite(raw[s]).max()) for s in strips)
    transparent = image.info.get("transparency")
    for strip in strips:
        values = _finite(raw[strip])
        if image.mode == "F" and low >= 0 and high <= 255:
            scaled = values * (255 if high <= 1 else 1)
        elif image.mode != "F" and low >= 0 and high <= 65535:
            scaled = values / 257
        else:
            scaled = (values - low) * (255 / (high - low)) if high > low else np.zeros_like(values)
        levels[strip] = np.rint(scaled)
        if isinstance(transparent, int):
            levels[strip][values == transparent] = 255
    return Image.fromarray(levels).convert("RGB")


def _finite(values: NDArray[Any]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    return found
