"""Uploaded files: how much a request may send, checked before memory or time is spent on it, and decoding."""

from __future__ import annotations

import io
import math
import stat
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
from fastapi import Request, UploadFile
from numpy.typing import NDArray
from PIL import Image
from starlette.datastructures import FormData
from starlette.datastructures import UploadFile as Uploaded
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from torch import Tensor

from tpl.learner import Learner
from tpl.serve.errors import Refusal
from tpl.stream import ImageSet, UnreadableImage, decode, is_image_name
from tpl.stream.decoding import FORMATS

MIB = 1 << 20
MAX_FIELDS, MAX_FILE_NAME = 16, 255
CLIENT_LEFT = 499  # a status for the metrics: nobody receives it
# One entry of a zip's directory has 46 bytes and a name; a larger average is an attack.
MAX_ENTRY_BYTES = 1024


@dataclass(frozen=True)
class Limits:
    """Limits of one request; those of zips hold for the images of a new task."""

    upload: int = 256 * MIB  # bytes of a request's body
    image: int = 64 * MIB  # bytes of one image file
    pixels: int = 50_000_000  # of one image
    request_pixels: int = 200_000_000  # of all images in one request
    files: int = 64  # in one request
    zip_bytes: int = 4096 * MIB  # all members together, expanded
    zip_ratio: float = 200.0  # expanded to compressed, the whole archive; images hardly compress at all
    zip_members: int = 100_000
    requests: int = 256  # at the same time
    queue: int = 8  # tasks that wait to be learned
    connections: int = 1000  # at the same time; fewer where the system allows fewer open files
    header_seconds: float = 10.0  # from the connection, or the last answer, to the end of a request's header
    body_seconds: float = 30.0  # for a body to arrive or an answer to be taken, and more by `body_rate`
    body_rate: int = 8 << 10  # bytes of a body that give it another second


def pixels_of(stream: IO[bytes]) -> float:
    """The number of pixels in an image by its header; infinite for one that Pillow refuses, 0 for no image."""
    try:
        with Image.open(stream, formats=_formats()) as image:
            return image.width * image.height
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return math.inf
    except Exception:
        return 0


def check_pixels(stream: IO[bytes], name: str, limits: Limits) -> None:
    """Refuse an image with too many pixels by its header; a file that is no image is left to the decoder."""
    if pixels_of(stream) > limits.pixels:
        raise UnreadableImage(
            f"{name} has more than {limits.pixels / 1e6:g} million pixels, the most this server takes: "
            "make it smaller first."
        )


def check_request(uploads: Sequence[UploadFile], limits: Limits) -> None:
    """Refuse a request whose images have too many pixels together; those refused by themselves do not count."""
    total = 0.0
    for upload in uploads:
        found = pixels_of(upload.file)
        total += found if found <= limits.pixels else 0
        upload.file.seek(0)
    if total > limits.request_pixels:
        raise Refusal(
            413,
            f"The images have more than {limits.request_pixels / 1e6:g} million pixels together; send them in several "
            "requests.",
        )


@cache
def _formats() -> tuple[str, ...]:
    # A Pillow built without some library lacks the decoder, and requesting that format is an error.
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def check_archive(path: Path, limits: Limits) -> None:
    """Refuse a file that is no zip, a zip that is too large once expanded, and one with names outside of it."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(_Bounded(file, limits)) as archive:
            members = archive.infolist()
    except Refusal:
        raise
    except Exception as error:  # zipfile raises many kinds
        raise Refusal(422, f"The upload cannot be opened as a zip archive ({error}).") from error
    if len(members) > limits.zip_members:
        raise _too_many(limits)
    expanded = sum(member.file_size for member in members)
    if expanded > limits.zip_bytes:
        raise Refusal(413, f"The zip expands to more than {limits.zip_bytes // MIB} MiB; send it in parts.")
    if expanded > limits.zip_ratio * max(path.stat().st_size, 1):
        raise Refusal(413, f"The zip expands to more than {limits.zip_ratio:g} times its size; images do not.")
    for member in members:
        _check_member(member, limits)


def check_images(path: Path, limits: Limits) -> None:
    """Refuse images with too many pixels inside a zip, by their headers alone."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if not is_image_name(member.filename) or member.is_dir():
                continue
            try:
                with archive.open(member) as stream:
                    check_pixels(stream, member.filename, limits)
            except UnreadableImage:
                raise
            except Exception:  # reported when the member is read
                continue


def _check_member(member: zipfile.ZipInfo, limits: Limits) -> None:
    name = member.filename
    parts = member.orig_filename.replace("\\", "/").split("/")
    if parts[0] == "" or ":" in parts[0] or ".." in parts or "\0" in member.orig_filename:
        raise Refusal(422, f"The zip has a member outside of it ({name!r}); use relative names without '..'.")
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
    """A file that limits the size of one read: zipfile reads a zip's whole directory before it can be counted."""

    def __init__(self, file: IO[bytes], limits: Limits) -> None:
        self._file, self._limits = file, limits

    def read(self, size: int = -1) -> bytes:
        if size > max(self._limits.zip_members * MAX_ENTRY_BYTES, MIB):
            raise _too_many(self._limits)
        return self._file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


async def read_form(request: Request, files: int) -> FormData:
    """Read a multipart form with at most `files` files."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise Refusal(415, "Send the files as multipart/form-data, e.g. with: curl -F files=@IMAGE")
    try:
        return await request.form(max_files=files, max_fields=MAX_FIELDS)
    except ClientDisconnect as error:
        raise Refusal(CLIENT_LEFT, "The client left before the end of its request.") from error
    except HTTPException as error:
        if "Too many files" in str(error.detail):
            raise Refusal(413, f"At most {files} files a request; send them in several.") from error
        raise Refusal(400, f"The form cannot be read ({error.detail})") from error


def files_of(form: FormData) -> list[UploadFile]:
    """All files of a form, of whatever field."""
    return [value for _, value in form.multi_items() if isinstance(value, Uploaded)]  # type: ignore[misc]


def text_of(form: FormData, field: str) -> str | None:
    """The text of a form's field; None if it is not there, is empty or is a file."""
    value = form.get(field)
    return value.strip() or None if isinstance(value, str) else None


def shown_name(upload: Uploaded) -> str:
    """The file's name as the client gave it, without unprintable characters and not too long."""
    name = "".join(sign for sign in upload.filename or "" if sign.isprintable())
    return name[-MAX_FILE_NAME:] or "image"


def prepare(learner: Learner, file: BinaryIO, name: str, limits: Limits) -> Tensor:
    """One uploaded image as input of the encoder; raises UnreadableImage with the file's name."""
    return learner.prepare(_OneImage(file, name, limits))[0]


class _OneImage(ImageSet):
    """An uploaded file as a set of one image."""

    def __init__(self, file: BinaryIO, name: str, limits: Limits) -> None:
        self._file, self._name, self._limits = file, name, limits

    @property
    def labels(self) -> NDArray[np.int64]:
        """Unknown."""
        return np.full(1, -1, dtype=np.int64)

    def __len__(self) -> int:
        return 1

    def load(self, index: int) -> Image.Image:
        """The decoded image, unless it is too large."""
        data = self._file.read(self._limits.image + 1)
        if len(data) > self._limits.image:
            raise UnreadableImage(
                f"{self._name} is larger than {self._limits.image // MIB} MiB: make it smaller first."
            )
        check_pixels(io.BytesIO(data), self._name, self._limits)
        return decode(data, self._name)

    def name(self, index: int) -> str:
        """The file's name as the client gave it."""
        return self._name

    def identity(self, index: int) -> bytes:
        """The file's name."""
        return self._name.encode()
