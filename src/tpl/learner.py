"""The learner: what a program writes against. Learn tasks, predict classes, save, load.

from tpl import Learner

learner = Learner(method="tpl", encoder="compact")
learner.learn(task)
learner.predict(images)      # class names
learner.save("model")
Learner.load("model")
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tpl._version import __version__
from tpl.engine import Listener, choose_compute, silent
from tpl.errors import TplError
from tpl.methods import Method, find_method
from tpl.nets import EncoderError, create_encoder
from tpl.nets.compact import NAME as COMPACT
from tpl.store import ModelStore
from tpl.stream import FileImages, ImageSet, Task, UnreadableImage, to_rgb

Images = ImageSet | Iterable[Image.Image | Path | str | NDArray[np.uint8]]


class Learner:
    """A classifier that keeps learning.

    `options` are the method's own, e.g. `epochs=10, memory=500`; `tpl describe METHOD` lists them.
    """

    def __init__(
        self,
        method: str = "tpl",
        encoder: str = COMPACT,
        weights: Path | str | None = None,
        device: str = "auto",
        precision: str = "auto",
        seed: int = 0,
        compile: str = "auto",
        **options: Any,
    ) -> None:
        found = find_method(method)
        config = found.config_class.parse(options)
        compute = choose_compute(device, precision, compile)
        self.method: Method = found(create_encoder(encoder, weights), config, compute, seed)

    @property
    def classes_(self) -> list[str]:
        """All classes learned, in the order of arrival."""
        return self.method.classes_

    def learn(self, task: Task, listen: Listener = silent) -> Self:
        """Learn one more task; its classes must be new."""
        self.method.learn(task, listen)
        return self

    def log_probabilities(self, images: Images) -> Tensor:
        """log P(class | image), one row an image, one column a class learned."""
        if not self.classes_:
            raise TplError("Nothing was learned yet: call learn(task) first.")
        return self.method.log_probabilities(self.prepare(images)).cpu()

    def predict_proba(self, images: Images) -> NDArray[np.float64]:
        """P(class | image), one row an image, columns as in `classes_`."""
        probabilities: NDArray[np.float64] = self.log_probabilities(images).exp().numpy()
        return probabilities

    def predict(self, images: Images) -> list[str]:
        """The most probable class of every image."""
        best = self.log_probabilities(images).argmax(dim=1)
        return [self.classes_[i] for i in best.tolist()]

    def prepare(self, images: Images) -> Tensor:
        """Images as the encoder takes them: uint8 `[n, 3, size, size]`."""
        if not isinstance(images, ImageSet):
            images = _Loose(list(images))
        return self.method.preprocess.batch(images)

    def save(self, path: Path | str) -> None:
        """Write the model directory, or bring it up to date, in one step that cannot half-happen."""
        store = ModelStore(path)
        with store.writing():
            memory = self.method.memory.state() if self.method.memory is not None else {}
            store.commit(self._header(), self.method.state(), memory)

    @classmethod
    def load(
        cls,
        path: Path | str,
        weights: Path | str | None = None,
        device: str = "auto",
        precision: str = "auto",
        compile: str = "auto",
    ) -> Self:
        """The learner that `save` wrote. `weights` names the encoder's file if it has moved."""
        header, state, memory = ModelStore(path).read()
        encoder = header["encoder"]
        learner = cls(
            header["method"],
            encoder["name"],
            weights or encoder["weights"],
            device,
            precision,
            header["seed"],
            compile,
            **header["options"],
        )
        if learner.method.encoder.fingerprint != encoder["fingerprint"]:
            raise EncoderError(
                f"{path} was learned on other weights of '{encoder['name']}' (sha256 of their file "
                f"{encoder['sha256'][:12]}..., found {learner.method.encoder.sha256[:12]}...). "
                f"Pass the right file with --weights."
            )
        learner.method.task_classes_ = [tuple(task["classes"]) for task in header["tasks"]]
        if learner.method.memory is not None and memory:
            learner.method.memory.load_state(memory)
        learner.method.load_state(state)
        return learner

    def _header(self) -> dict[str, Any]:
        method = self.method
        file = method.encoder.weights
        return {
            "tpl": __version__,
            "method": method.name,
            "options": method.config.to_dict(),
            "seed": method.seed,
            "encoder": {
                "name": method.encoder.name,
                "sha256": method.encoder.sha256,
                "fingerprint": method.encoder.fingerprint,
                "weights": str(file.resolve()) if file else None,
            },
            "tasks": [{"classes": list(classes)} for classes in method.task_classes_],
        }


class _Loose(ImageSet):
    """Images as a program holds them: paths, Pillow images or arrays, without labels."""

    def __init__(self, images: list[Any]) -> None:
        self.images = images

    @property
    def labels(self) -> NDArray[np.int64]:
        return np.zeros(len(self.images), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.images)

    def load(self, index: int) -> Image.Image:
        image = self.images[index]
        if isinstance(image, (str, Path)):
            return FileImages([Path(image)]).load(0)
        if isinstance(image, Image.Image):
            return to_rgb(image)
        array = np.asarray(image)
        try:
            return to_rgb(Image.fromarray(array))
        except (TypeError, ValueError) as error:
            raise UnreadableImage(
                f"{self.name(index)} is no picture ({array.dtype} of shape {list(array.shape)}); "
                "give a path, a Pillow image, or a uint8 array of shape [h, w], [h, w, 3] or [h, w, 4]."
            ) from error

    def name(self, index: int) -> str:
        image = self.images[index]
        return str(image) if isinstance(image, (str, Path)) else f"image {index}"

    def identity(self, index: int) -> bytes:
        return self.load(index).tobytes()
