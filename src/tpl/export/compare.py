"""Does the file say what the model says? Both are asked about the same images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpl.errors import TplError
from tpl.learner import Learner

FEW = 16  # images that every new file is tried on
AT_ONCE = 64


@dataclass(frozen=True)
class Comparison:
    """How a file's answers compare with its model's. `right` counts only images whose class the model knows."""

    images: int = 0
    same: int = 0  # images with the same most probable class
    probability: float = 0.0  # the largest difference of a P(class)
    log_probability: float = 0.0
    known: int = 0  # images of classes that the model knows
    right: int = 0  # of those, by the file
    right_model: int = 0  # of those, by the model

    def to_dict(self) -> dict[str, Any]:
        """For `--json`; accuracies where there are images of known classes."""
        numbers: dict[str, Any] = {
            "images": self.images,
            "same_class": self.same,
            "largest_difference": {"probability": self.probability, "log_probability": self.log_probability},
        }
        if self.known:
            accuracy = {"accuracy": self.right / self.known, "accuracy_pytorch": self.right_model / self.known}
            numbers |= {"known": self.known, **accuracy}
        return numbers


def open_session(file: Path) -> Any:
    """The file in onnxruntime, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors alone
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def compare(learner: Learner, file: Path, batches: Iterable[tuple[Tensor, Sequence[str] | None]]) -> Comparison:
    """Ask both about images as the encoder takes them, with the names of their classes where these are known."""
    session = open_session(file)
    place = {name: i for i, name in enumerate(learner.classes_)}
    total = Comparison()
    for pixels, names in batches:
        for start in range(0, len(pixels), AT_ONCE):
            part = pixels[start : start + AT_ONCE]
            truth = None if names is None else [place.get(name, -1) for name in names[start : start + AT_ONCE]]
            total = _added(total, _answers(session, part), learner.method.log_probabilities(part).numpy(), truth)
    return total


def on_stored_images(learner: Learner, file: Path) -> Comparison:
    """Compare on a few images of the replay memory, or on noise where there are none."""
    memory, preprocess = learner.method.memory, learner.method.preprocess
    if memory is not None and len(memory):
        pixels = memory.pixels(preprocess, torch.device("cpu"))
        pixels = pixels[torch.linspace(0, len(pixels) - 1, min(FEW, len(pixels))).long()]
    else:
        shape = FEW, 3, preprocess.height, preprocess.width
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return compare(learner, file, [(pixels, None)])


def _answers(session: Any, pixels: Tensor) -> NDArray[np.float64]:
    """The file's log-probabilities of classes."""
    (log_p,) = session.run([session.get_outputs()[0].name], {session.get_inputs()[0].name: pixels.numpy()})
    if not np.isfinite(log_p).all():
        raise TplError(
            "The graph's answers are not all numbers: the trunk's values are too large for this precision. "
            "Use --precision fp32."
        )
    answers: NDArray[np.float64] = log_p.astype(np.float64)
    return answers


def _added(
    total: Comparison, file: NDArray[np.float64], model: NDArray[np.float64], truth: list[int] | None
) -> Comparison:
    best, expected = file.argmax(axis=1), model.argmax(axis=1)
    labels = np.array(truth if truth is not None else [-1] * len(file))
    return Comparison(
        total.images + len(file),
        total.same + int((best == expected).sum()),
        max(total.probability, float(np.abs(np.exp(file) - np.exp(model)).max(initial=0))),
        max(total.log_probability, float(np.abs(file - model).max(initial=0))),
        total.known + int((labels >= 0).sum()),
        total.right + int((best == labels).sum()),
        total.right_model + int((expected == labels).sum()),
    )
