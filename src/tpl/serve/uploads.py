"""Files as they arrive in a request: read, checked, and made ready for the encoder."""

from __future__ import annotations

import io
from typing import BinaryIO

import numpy as np
from fastapi import Request, UploadFile
from numpy.typing import NDArray
from PIL import Image
from starlette.datastructures import FormData
from starlette.datastructures import UploadFile as Uploaded
from starlette.exceptions import HTTPException
from torch import Tensor

from tpl.learner import Learner
from tpl.serve.errors import Refusal
from tpl.serve.limits import MIB, Limits, check_pixels
from tpl.stream import ImageSet, UnreadableImage, decode

FIELDS = 16
LONGEST_NAME = 255


async def read_form(request: Request, files: int) -> FormData:
    """A multipart form with at most so many files."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise Refusal(415, "Send the files as multipart/form-data, e.g. with: curl -F files=@IMAGE")
    try:
        return await request.form(max_files=files, max_fields=FIELDS)
    except HTTPException as error:
        if "Too many files" in str(error.detail):
            raise Refusal(413, f"At most {files} files a request; send them in several.") from error
        raise Refusal(400, f"The form cannot be read ({error.detail})") from error


def files_of(form: FormData) -> list[UploadFile]:
    """All files of a form, whatever its fields are called."""
    return [value for _, value in form.multi_items() if isinstance(value, Uploaded)]  # type: ignore[misc]


def shown_name(upload: Uploaded) -> str:
    """The name a client gave its file, fit for one line."""
    name = "".join(sign for sign in upload.filename or "" if sign.isprintable())
    return name[-LONGEST_NAME:] or "image"


def prepare(learner: Learner, file: BinaryIO, name: str, limits: Limits) -> Tensor:
    """One uploaded file as the encoder takes it; UnreadableImage, with its name, where that fails."""
    return learner.prepare(_OneImage(file, name, limits))[0]


class _OneImage(ImageSet):
    """An uploaded file as a set of one image."""

    def __init__(self, file: BinaryIO, name: str, limits: Limits) -> None:
        self._file, self._name, self._limits = file, name, limits

    @property
    def labels(self) -> NDArray[np.int64]:
        """Unknown: that is what is asked."""
        return np.full(1, -1, dtype=np.int64)

    def __len__(self) -> int:
        return 1

    def load(self, index: int) -> Image.Image:
        """The picture, unless it is too large."""
        data = self._file.read(self._limits.image + 1)
        if len(data) > self._limits.image:
            raise UnreadableImage(
                f"{self._name} is larger than {self._limits.image // MIB} MiB: make it smaller first."
            )
        check_pixels(io.BytesIO(data), self._name, self._limits)
        return decode(data, self._name)

    def name(self, index: int) -> str:
        """As the client calls it."""
        return self._name

    def identity(self, index: int) -> bytes:
        """Its name: nobody compares these."""
        return self._name.encode()
