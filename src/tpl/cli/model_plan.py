"""What `tpl learn` decides before it learns: options, epochs, memory; and what it estimates: time and size."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpl.errors import TplError

if TYPE_CHECKING:
    from tpl.engine import Event
    from tpl.learner import Learner
    from tpl.stream import ImageSet, Labelled

PLUS = "tpl-plus"
METHODS = (PLUS, "tpl")  # those whose models can be updated, told from unknown images, and exported
FROM_SCRATCH = "resnet18"  # the encoder that is not pre-trained: nothing for the expert of tpl-plus to stand on
OPTIONS: dict[str, Any] = {"latent": 64, "batch_size": 16}
MEMORY = "2000"
MOST_FEATURES = 2048  # random ones, of tpl-plus: 17 MB in the model directory, and seconds to solve for after a task

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_SAMPLE = 32  # images whose encoded size stands for all
_TIMED = 64  # images of the short timing


@dataclass(frozen=True)
class Budget:
    """A replay memory as asked for: a number of images, or of bytes."""

    images: int | None
    bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """`2000` images, `50MB`, or `none`."""
        plain = text.strip().lower().replace(" ", "")
        if plain == "none":
            return cls(0)
        if plain.isdecimal():
            return cls(int(plain))
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)i?b", plain)
        if found is None:
            raise TplError(f"--memory takes a number of images, a size such as 50MB, or none; got '{text}'.")
        return cls(None, int(float(found[1]) * _FACTORS[found[2]]))

    def in_images(self, encoded: Callable[[], float]) -> int:
        """The budget as a number of images; `encoded` gives an image's average size, if it is needed."""
        if self.images is not None:
            return self.images
        assert self.bytes is not None
        return int(self.bytes / encoded())


def trained_on(given: Labelled, held_out: float, seed: int) -> int:
    """How many images are left to train on once some of each class are held out."""
    from tpl.intake import hold_out

    return len(hold_out(as_task(given, ""), held_out, [seed])[0])


def as_task(given: Labelled, name: str) -> Any:
    """Labelled images as a task."""
    from tpl.stream import Task

    return Task(name, given.class_names, given.images)


def method_for(encoder: str) -> str:
    """The method of a new model, where nobody asks for another."""
    return "tpl" if encoder.partition(":")[0] == FROM_SCRATCH else PLUS


def width_for(train: int) -> int:
    """How many random features the expert of tpl-plus gets, for a first task of so many images."""
    from tpl.methods.parts.ridge import features_for

    return min(features_for(train), MOST_FEATURES)


def encoded_size(images: ImageSet, learner: Learner) -> float:
    """What an image takes in the replay memory, on average over a few."""
    import numpy as np

    from tpl.memory import encode

    chosen = np.unique(np.linspace(0, len(images) - 1, _SAMPLE).astype(int)).tolist()
    return sum(len(encode(learner.method.preprocess.shrink(images.load(i)))) for i in chosen) / len(chosen)


def set_options(learner: Learner, **changes: Any) -> None:
    """Change how the next task is learned. The network stays as it is."""
    learner.method.config = learner.method.config.replace(**changes)
    if "memory" in changes and learner.method.memory is not None:
        learner.method.memory.budget = getattr(learner.method, "memory_budget", changes["memory"])


@dataclass(frozen=True)
class Estimate:
    """How long learning will take, and the size of the model then."""

    seconds: float
    bytes: int


def estimate(learner: Learner, given: Labelled, train: int, epochs: int) -> Estimate:
    """Learn a few of the images for one epoch, with a learner that is thrown away, and scale up.

    What is measured is measured on this machine with this data; other programs beside it make it longer.
    """
    memory = learner.method.memory
    replayed = memory is not None and len(memory) > 0
    few = given.images.select(_some_of_each(given))
    trained: dict[str, float] = {}

    def callback(event: Event) -> None:
        if event.kind == "trained":
            trained.update(event.data)

    old = [len(images) for images in memory.exemplars] if memory is not None else []
    set_options(learner, epochs=1, batch_size=min(learner.method.config.batch_size, max(1, len(few) // 2)))
    started = time.perf_counter()
    learner.learn(as_task(given.with_images(few), "timing"), name="timing", held_out=0, callback=callback)
    around = time.perf_counter() - started - trained["seconds"]  # statistics, and the memory seen by every task
    speed = trained["images"] / trained["seconds"]
    passes = epochs * train * (2 if replayed else 1)
    seconds = passes / speed + around * max(len(given.images) / len(few), 1)
    if memory is None or not memory.budget:  # what stands in for images does not grow with their number
        return Estimate(seconds, _size(learner, memory=False) + _size(learner, memory=True))
    quotas = memory.quotas(len(learner.classes_))
    kept = sum(min(pair) for pair in zip([*old, *given.counts.values()], quotas, strict=True))
    each = encoded_size(given.images, learner) + _size(learner, memory=True) / max(len(memory), 1)
    return Estimate(seconds, int(_size(learner, memory=False) + kept * each))


def _size(learner: Learner, memory: bool) -> int:
    """Bytes of what was learned: of the memory as the tasks see it, or of all the rest."""
    state = learner.method.state()
    tensors = [pair for part in (state.shared, *state.tasks) for pair in part.items()]
    return sum(t.numel() * t.element_size() for name, t in tensors if name.startswith("memory.") == memory)


def _some_of_each(given: Labelled) -> Any:
    """Positions of a few images of every class."""
    import numpy as np

    each = max(1, _TIMED // len(given.class_names))
    labels = given.images.labels
    return np.concatenate([np.flatnonzero(labels == c)[:each] for c in range(len(given.class_names))])
