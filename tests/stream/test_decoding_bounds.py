"""Decoding takes a bounded amount of memory, whatever an image claims to be and however many come at once."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tpl.errors import UnreadableImage
from tpl.stream import decoding
from tpl.stream.decoding import Budget, decode, to_rgb
from tpl.stream.folders import read_bytes

MEBIBYTES = """
import sys
from pathlib import Path
from tpl.stream.decoding import decode

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) >> 10

data = Path(sys.argv[1]).read_bytes()
Path("/proc/self/clear_refs").write_text("5")
before = peak()
image = decode(data, "image")
print(peak() - before, image.width)
"""


def png(width: int, height: int, depth: int, colour: int, data: bytes = b"") -> bytes:
    """A PNG file that claims a size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to reset the peak of memory")
@pytest.mark.parametrize(("side", "depth", "reduced", "most"), [(6000, 16, 3000, 250), (13_000, 8, 4333, 512)])
def test_a_large_image_takes_little_more_than_its_pixels(
    side: int, depth: int, reduced: int, most: int, tmp_path: Path
) -> None:
    """Of the deep one: 72 MB of pixels; a float64 copy of them alone has 288 MB."""
    rows = zlib.compress(bytes(1 + depth // 8 * side) * side, 1)
    (tmp_path / "deep.png").write_bytes(png(side, side, depth, 0, rows))
    command = [sys.executable, "-c", MEBIBYTES, str(tmp_path / "deep.png")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    taken, width = map(int, done.stdout.split())
    assert abs(width - reduced) <= 1 and taken < most


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_that_needs_too_much_is_refused_by_name() -> None:
    with pytest.raises(UnreadableImage, match=r"huge\.png is too large \(13000 x 13000, 644 MiB once decoded"):
        decode(png(13_000, 13_000, 8, 2), "huge.png")


def test_a_large_jpeg_is_reduced_while_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = Image.linear_gradient("L").resize((400, 300)).convert("RGB")
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=95)
    monkeypatch.setattr(decoding, "LARGE_PIXELS", 40_000)
    found = decode(buffer.getvalue(), "photo")
    assert found.size == (200, 150)
    assert np.abs(np.asarray(found, float) - np.asarray(picture.reduce(2), float)).max() < 12


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "CMYK", "I;16", "I", "F"])
def test_strips_have_the_pixels_of_the_whole(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = Image.linear_gradient("L").resize((50, 201))
    picture = picture.convert(mode) if mode != "I;16" else Image.fromarray(np.asarray(picture).astype(np.uint16) * 200)
    whole = to_rgb(picture)
    monkeypatch.setattr(decoding, "STRIP", 8)
    assert np.array_equal(np.asarray(whole), np.asarray(to_rgb(picture)))
    assert to_rgb(picture, 2).size == (25, 101)


def test_images_wait_for_room_but_never_for_ever() -> None:
    budget, entered, free = Budget(100), threading.Event(), threading.Event()

    def hold() -> None:
        with budget.decoding(60):
            entered.set()
            free.wait(10)

    def follow() -> None:
        with budget.decoding(60):
            order.append("second")

    order: list[str] = []
    first, second = threading.Thread(target=hold), threading.Thread(target=follow)
    first.start()
    assert entered.wait(10)
    second.start()
    second.join(0.1)
    assert order == []  # there is no room for both
    free.set()
    second.join(10)
    first.join(10)
    assert order == ["second"]
    kept = budget.counted(Image.new("RGB", (10, 10)))
    with budget.decoding(60):  # somebody keeps a result of 400 bytes: one image is decoded all the same
        assert budget.kept == 400
    del kept
    assert budget.kept == budget.decoded == 0


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_devices_and_pipes_are_no_images(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(UnreadableImage, match="it is no ordinary file"):
            read_bytes(path)
