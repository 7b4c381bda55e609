"""Images with a few bytes changed, of every format and mode."""

from __future__ import annotations

import io
import random
import struct
import zlib
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from torture.fuzz import Case, run_attempts
from torture.mutations import NUMBERS, mutated_bytes
from torture.tally import Tally
from tpl.stream import decode

KINDS = (
    ("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "LA"), ("PNG", "P"),
    ("PNG", "1"), ("PNG", "I;16"), ("WEBP", "RGB"), ("WEBP", "RGBA"), ("BMP", "RGB"), ("BMP", "P"), ("GIF", "P"),
    ("TIFF", "RGB"), ("TIFF", "F"), ("TIFF", "I;16"), ("TIFF", "CMYK"),
)  # fmt: skip
STOCK = 20  # images of each kind that are changed


def valid(draw: random.Random, kind: tuple[str, str]) -> bytes:
    """A small image of one kind."""
    pixels = np.random.default_rng(draw.randrange(2**32)).integers(0, 255, (24, 20, 3), dtype=np.uint8)
    form, mode = kind
    picture = Image.fromarray(pixels)
    picture = Image.fromarray(pixels[..., 0].astype(np.uint16) * 200) if mode == "I;16" else picture.convert(mode)
    buffer = io.BytesIO()
    more = {"compression": draw.choice(("raw", "tiff_lzw", "tiff_deflate"))} if form == "TIFF" else {}
    picture.save(buffer, format=form, **more)
    return buffer.getvalue()


@cache
def _stock(kind: tuple[str, str]) -> list[bytes]:
    draw = random.Random(str(kind))
    return [valid(draw, kind) for _ in range(STOCK)]


def some(draw: random.Random, kind: tuple[str, str]) -> bytes:
    """One of a few small images of one kind."""
    return draw.choice(_stock(kind))


def run(seed: int, cases: int, place: Path) -> Tally:
    """Decode changed images."""

    def attempt(draw: random.Random) -> str:
        kind = draw.choice(KINDS)
        data = some(draw, kind)
        data = _other_size(data, draw) if kind[0] == "PNG" and draw.random() < 0.3 else mutated_bytes(data, draw)
        Case.text = f"{kind}, {len(data)} bytes"
        decode(data, "image")
        return "decoded"

    return run_attempts(Tally("images", seed), cases, attempt)


def _other_size(data: bytes, draw: random.Random) -> bytes:
    """A PNG that claims another size, with the right checksum."""
    head = bytearray(data[12:29])
    struct.pack_into(">II", head, 4, draw.choice(NUMBERS), draw.choice(NUMBERS))
    return data[:12] + bytes(head) + struct.pack(">I", zlib.crc32(head)) + data[33:]
