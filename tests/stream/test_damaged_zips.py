"""Zips that were damaged in ways which make zipfile fail: each is refused in words, or read."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tpl import TplError
from tpl.serve.uploads import Limits, check_archive, check_images
from tpl.stream import find_images, labelled_images


def zipped(method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer, picture = io.BytesIO(), io.BytesIO()
    Image.linear_gradient("L").resize((16, 16)).save(picture, format="PNG")
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name in ("cat/1.png", "dog/1.png"):
            archive.writestr(name, picture.getvalue())
    return buffer.getvalue()


def patched(data: bytes, signature: bytes, offset: int, new: bytes) -> bytes:
    """The bytes at an offset in every record of one kind replaced."""
    content, at = bytearray(data), data.find(signature)
    while at >= 0:
        content[at + offset : at + offset + len(new)] = new
        at = data.find(signature, at + 1)
    return bytes(content)


LOCAL, CENTRAL, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"


def both(data: bytes, offset: int, new: bytes) -> bytes:
    return patched(patched(data, LOCAL, offset, new), CENTRAL, offset + 2, new)


def with_zip64_extra(data: bytes) -> bytes:
    """An extra field that announces 64-bit sizes and is too short for them."""
    at = data.find(CENTRAL)
    name = struct.unpack_from("<H", data, at + 28)[0]
    changed = bytearray(data)
    changed[at + 20 : at + 28] = b"\xff" * 8
    changed[at + 30 : at + 32] = struct.pack("<H", 6)
    changed[at + 46 + name : at + 46 + name] = struct.pack("<HHH", 1, 2, 0)
    end = changed.find(END)
    size = struct.unpack_from("<I", changed, end + 12)[0]
    changed[end + 12 : end + 16] = struct.pack("<I", size + 6)
    return bytes(changed)


def after_the_name(data: bytes) -> int:
    """Where the first member's compressed bytes begin."""
    return 30 + struct.unpack_from("<H", data, 26)[0]


def with_content(data: bytes, content: bytes) -> bytes:
    at = after_the_name(data)
    return data[:at] + content + data[at + len(content) :]


ZIPS: dict[str, Callable[[], bytes]] = {
    "cut off": lambda: zipped()[:-30],
    "only its end": lambda: zipped()[zipped().find(END) :],
    "unknown compression": lambda: both(zipped(), 8, struct.pack("<H", 97)),
    "encrypted": lambda: both(zipped(), 6, struct.pack("<H", 1)),
    "no deflate stream": lambda: with_content(zipped(), b"\xff" * 20),
    "no bzip2 stream": lambda: with_content(zipped(zipfile.ZIP_BZIP2), b"\x00" * 20),
    "no lzma stream": lambda: with_content(zipped(zipfile.ZIP_LZMA), b"\xff" * 20),
    "lzma without properties": lambda: with_content(zipped(zipfile.ZIP_LZMA), b"\x09\x04\xff\xff\xff\xff\xff\xff"),
    "another checksum": lambda: both(zipped(), 14, b"\x00\x00\x00\x00"),
    "a huge size": lambda: both(zipped(), 22, struct.pack("<I", 2**32 - 2)),
    "a size of less": lambda: both(zipped(), 18, struct.pack("<I", 3)),
    "another local name": lambda: patched(zipped(), LOCAL, 30, b"x"),
    "no local header": lambda: patched(zipped(), LOCAL, 0, b"xx"),
    "a member beyond the end": lambda: patched(zipped(), CENTRAL, 42, struct.pack("<I", 2**31)),
    "a directory before the beginning": lambda: patched(zipped(), END, 16, struct.pack("<I", 2**32 - 2)),
    "a directory larger than the file": lambda: patched(zipped(), END, 12, struct.pack("<I", 2**31)),
    "sizes of 64 bits that are missing": lambda: with_zip64_extra(zipped()),
    "a name that is no UTF-8": lambda: patched(
        patched(zipped(), CENTRAL, 8, struct.pack("<H", 0x800)), CENTRAL, 46, b"\xff\xfe"
    ),
    "a version from the future": lambda: patched(zipped(), CENTRAL, 6, struct.pack("<H", 250)),
    "a date that does not exist": lambda: both(zipped(), 10, b"\xff\xff\xff\xff"),
    "a name with a NUL": lambda: patched(zipped(), CENTRAL, 46, b"\x00"),
}


def learn(file: Path) -> None:
    images = labelled_images(file).images
    for index in range(len(images)):
        images.load(index)


def predict(file: Path) -> None:
    for found in find_images([str(file)]):
        found.read()


def serve(file: Path) -> None:
    check_archive(file, Limits())
    check_images(file, Limits())


@pytest.mark.parametrize("damage", ZIPS.values(), ids=ZIPS)
def test_a_damaged_zip_is_refused_or_read(damage: Callable[[], bytes], tmp_path: Path) -> None:
    file = tmp_path / "classes.zip"
    file.write_bytes(damage())
    for read in (learn, predict, serve):
        said = ""
        try:
            read(file)
        except TplError as error:
            said = str(error)
        assert not said or "zip" in said or ".png" in said


def test_the_damages_are_such_that_zipfile_fails_in_many_ways(tmp_path: Path) -> None:
    """Otherwise the test above would show nothing."""
    kinds = set()
    for damage in ZIPS.values():
        try:
            with zipfile.ZipFile(io.BytesIO(damage())) as archive:
                for name in archive.namelist():
                    archive.read(name)
        except Exception as error:
            kinds.add(type(error))
    assert {zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error, UnicodeDecodeError} <= kinds
    assert len(kinds) >= 7
