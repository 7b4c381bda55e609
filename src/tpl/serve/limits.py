"""How much a request may ask for. Everything here is checked before memory or time is spent on it."""

from __future__ import annotations

import stat
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from PIL import Image

from tpl.serve.errors import Refusal
from tpl.stream import UnreadableImage, is_image_name
from tpl.stream.decoding import FORMATS

MIB = 1 << 20
# One entry in a zip's directory: 46 bytes and a name. Whoever writes more than this on average hides something.
DIRECTORY_BYTES_A_MEMBER = 1024


@dataclass(frozen=True)
class Limits:
    """What one request may bring; the zip limits hold for the images of a new task."""

    upload: int = 256 * MIB  # bytes of a request's body
    image: int = 64 * MIB  # bytes of one image file
    pixels: int = 50_000_000  # of one image
    files: int = 64  # a request
    zip_bytes: int = 4096 * MIB  # all members together, expanded
    zip_ratio: float = 200.0  # expanded to compressed, the whole archive; images hardly compress at all
    zip_members: int = 100_000
    requests: int = 256  # answered at the same time
    queue: int = 8  # tasks that wait to be learned
    body_seconds: float = 60.0  # without a byte of the body


def check_pixels(stream: IO[bytes], name: str, limits: Limits) -> None:
    """Refuse an image whose header promises too many pixels; what is no image at all is left to the decoder."""
    try:
        with Image.open(stream, formats=_formats()) as image:
            width, height = image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        width = height = limits.pixels
    except Exception:
        return
    if width * height > limits.pixels:
        raise UnreadableImage(
            f"{name} has more than {limits.pixels / 1e6:g} million pixels, the most this server takes: "
            "make it smaller first."
        )


@cache
def _formats() -> tuple[str, ...]:
    # A Pillow built without one of the libraries has no such decoder, and asking for it is an error.
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def check_archive(path: Path, limits: Limits) -> None:
    """Refuse a zip that is none, is too large once expanded, or has names that lead elsewhere."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(_Bounded(file, limits)) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, NotImplementedError, UnicodeDecodeError, ValueError) as error:
        raise Refusal(422, f"The upload cannot be opened as a zip archive ({error}).") from error
    if len(members) > limits.zip_members:
        raise _too_many(limits)
    expanded = sum(member.file_size for member in members)
    if expanded > limits.zip_bytes:
        raise Refusal(413, f"The zip expands to more than {limits.zip_bytes // MIB} MiB; send it in parts.")
    if expanded > limits.zip_ratio * max(path.stat().st_size, 1):
        raise Refusal(413, f"The zip expands to more than {limits.zip_ratio:g} times its size: images never do.")
    for member in members:
        _check_member(member, limits)


def check_images(path: Path, limits: Limits) -> None:
    """Refuse images with too many pixels inside a zip, by their headers alone."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if not is_image_name(member.filename) or member.is_dir():
                continue
            with suppress(zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError):  # reading will name these
                stream = archive.open(member)
                check_pixels(stream, member.filename, limits)


def _check_member(member: zipfile.ZipInfo, limits: Limits) -> None:
    name = member.filename
    parts = member.orig_filename.replace("\\", "/").split("/")
    if parts[0] == "" or ":" in parts[0] or ".." in parts or "\0" in member.orig_filename:
        raise Refusal(422, f"The zip has a member outside of it ({name!r}); only names below its top are taken.")
    mode = member.external_attr >> 16
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise Refusal(422, f"The zip has a link or device in it ({name!r}); send the image files themselves.")
    if member.flag_bits & 1:
        raise Refusal(422, f"The zip is encrypted ({name!r}); send it without a password.")
    if is_image_name(name) and member.file_size > limits.image:
        raise Refusal(413, f"{name} in the zip is larger than {limits.image // MIB} MiB.")


def _too_many(limits: Limits) -> Refusal:
    return Refusal(413, f"The zip has more than {limits.zip_members} members; send it in parts.")


class _Bounded:
    """A file whose reads are bounded: a zip's directory is read in one piece, before anyone can count it."""

    def __init__(self, file: IO[bytes], limits: Limits) -> None:
        self._file, self._limits = file, limits

    def read(self, size: int = -1) -> bytes:
        if size > max(self._limits.zip_members * DIRECTORY_BYTES_A_MEMBER, MIB):
            raise _too_many(self._limits)
        return self._file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
