"""Who answers on a machine of a cluster: an actor of Ray that gets the model once, and images batch by batch."""

from __future__ import annotations

import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpl._version import __version__
from tpl.bulk.answered import Answered, answer
from tpl.cluster import load_ray, unpack, use_threads
from tpl.errors import TplError
from tpl.learner import Learner
from tpl.stream import UnreadableImage, batches


@dataclass(frozen=True)
class Sent:
    """An image file on its way; without content, the reason why it cannot be read."""

    name: str
    content: bytes | None
    error: str = ""

    def read(self) -> bytes:
        """The content; or why there is none, in the words of a file that is read where it lies."""
        if self.content is None:
            raise UnreadableImage(self.error)
        return self.content


@dataclass(frozen=True)
class Model:
    """What a reader has to know."""

    directory: tuple[Any]  # where Ray keeps the Parcel
    weights: str | None
    device: str
    threads: int
    version: str = __version__


class Reader:
    """Answers for images that are sent to it."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.learner: Learner | None = None

    def answer(self, images: list[Sent], top: int) -> Answered:
        """The model is loaded the first time: what is wrong with it is told as the answer, not as a death."""
        if self.learner is None:
            try:
                self.learner = self._load()
            except TplError as error:
                raise TplError(f"On {socket.gethostname()}: {error}") from error
        use_threads(self.model.threads)
        (batch,) = batches(images, self.learner.method.preprocess, len(images))
        return answer(self.learner, batch, top)

    def _load(self) -> Learner:
        if self.model.version != __version__:
            raise TplError(f"tpl is {__version__}, not {self.model.version}: install the same on all machines.")
        use_threads(self.model.threads)
        with tempfile.TemporaryDirectory(prefix="tpl-model-") as place:
            unpack(load_ray().get(self.model.directory[0]), Path(place))
            return Learner.load(place, self.model.weights, self.model.device)
