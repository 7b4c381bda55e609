"""Images of a stream without task boundaries that wait until a task is worth learning.

They are encoded like those of the replay memory. Meanwhile classes that are not learned yet are answered by the nearest
class mean of the encoder's own features, which needs no training.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.memory import StoredImages, encode
from tpl.methods.base import Method
from tpl.stream import ImageSet, Task, relabelled

TASK_CLASSES, TASK_IMAGES = 2, 20  # new classes, and images of each, that are worth a task
MAX_NAMES = 1 << 20  # bytes of the stored class names


class Waiting:
    """Images by the name of their class."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.images: dict[str, list[bytes]] = {}
        self._means: dict[str, tuple[int, Tensor]] = {}  # of waiting classes: the number of images, and their mean
        self._known: tuple[tuple[list[str], int], Tensor] | None = None  # of learned classes, from the memory

    @property
    def new(self) -> list[str]:
        """The waiting classes that are not learned yet."""
        known = set(self.method.classes_)
        return [name for name in self.images if name not in known]

    @property
    def more(self) -> list[str]:
        """The classes that are learned, of which more images wait."""
        known = set(self.method.classes_)
        return [name for name in self.images if name in known]

    def add(self, task: Task) -> None:
        """Add labelled images; all of them, or none if one cannot be read."""
        shrink = self.method.preprocess.shrink
        encoded = [encode(shrink(task.train.load(i))) for i in range(len(task.train))]
        for image, label in zip(encoded, task.train.labels.tolist(), strict=True):
            self.images.setdefault(task.classes[label], []).append(image)

    def ripe(self, task_classes: int, task_images: int) -> list[str]:
        """The classes to learn or to update now: see `Learner.observe`."""
        new = [name for name in self.new if len(self.images[name]) >= task_images]
        more = self.more if sum(len(self.images[name]) for name in self.more) >= task_images else []
        return [*(new if len(new) >= task_classes else []), *more]

    def task(self, names: list[str]) -> Task:
        """The images of some classes as a task."""
        flat = [image for name in names for image in self.images[name]]
        labels = np.repeat(np.arange(len(names)), [len(self.images[name]) for name in names])
        return Task("observed", tuple(names), relabelled(StoredImages(flat), np.arange(len(flat)), labels))

    def drop(self, names: Iterable[str]) -> None:
        """Remove some classes' images: they are learned, or to be forgotten."""
        for name in names:
            self.images.pop(name, None)
            self._means.pop(name, None)

    # Answers without training

    def claims(self, pixels: Tensor) -> list[str | None]:
        """For every image the waiting class whose mean is nearest; None where a learned class's is nearer.

        A learned class has the mean that the method keeps, or else that of its images in the memory. Without either
        nothing is claimed, unless no class is learned at all.
        """
        names, learned = self.new, self._learned_means()
        if not names or (self.method.classes_ and learned is None):
            return [None] * len(pixels)
        means = torch.stack([self._mean(name) for name in names])
        if learned is not None:
            means = torch.cat([means, learned])
        features = F.normalize(self.method.encoder_features(pixels).double(), dim=1)
        best = (features @ F.normalize(means, dim=1).T).argmax(dim=1).tolist()
        return [names[i] if i < len(names) else None for i in best]

    def _mean(self, name: str) -> Tensor:
        images, (count, mean) = self.images[name], self._means.get(name, (0, torch.zeros(())))
        if count < len(images):
            fresh = self._unit_features(StoredImages(images[count:])).sum(dim=0)
            mean = (mean * count).to(fresh) + fresh
            self._means[name] = len(images), mean / len(images)
        return self._means[name][1]

    def _learned_means(self) -> Tensor | None:
        kept, memory = self.method.class_directions(), self.method.memory
        if kept is not None or memory is None or not len(memory):
            return kept
        key = self.method.classes_, memory.bytes_used
        if self._known is None or self._known[0] != key:
            pixels = memory.pixels(self.method.preprocess, self.method.compute.device)
            features = F.normalize(self.method.encoder_features(pixels).double(), dim=1)
            own = F.one_hot(memory.labels, len(memory.exemplars)).to(features)
            self._known = key, own.T @ features  # a class without an image has mean 0, which is never nearest
        return self._known[1]

    def _unit_features(self, images: ImageSet) -> Tensor:
        pixels = self.method.preprocess.batch(images)
        return F.normalize(self.method.encoder_features(pixels).double(), dim=1)

    # Storage

    def state(self, learning: Mapping[str, int] | None = None) -> dict[str, Tensor]:
        """All images as tensors; {} for none.

        `learning` names classes that are about to be learned, with the number of images that the model had of them
        before: so `load_state` finds out whether they were.
        """
        if not self.images:
            return {}
        flat = [image for images in self.images.values() for image in images]
        about = {"classes": list(self.images), "learning": dict(learning or {})}
        return {
            "bytes": torch.frombuffer(bytearray(b"".join(flat)), dtype=torch.uint8),
            "lengths": torch.tensor([len(image) for image in flat]),
            "counts": torch.tensor([len(images) for images in self.images.values()]),
            "names": torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8),
        }

    def load_state(self, state: dict[str, Tensor], learned: Mapping[str, int]) -> None:
        """Restore what `state` returned; ValueError if its parts do not fit each other.

        `learned` is the number of images that the model has of each class: what was about to be learned, and was, does
        not wait any more.
        """
        raw, lengths, counts = state["bytes"].numpy().tobytes(), state["lengths"].tolist(), state["counts"].tolist()
        if state["names"].numel() > MAX_NAMES:
            raise ValueError("the names of the waiting classes are too long")
        about = json.loads(state["names"].numpy().tobytes())
        names, learning = about["classes"], about["learning"]
        sound = all(isinstance(name, str) for name in names) and len(set(names)) == len(names) == len(counts)
        if not sound or min([*lengths, *counts], default=0) < 0:
            raise ValueError("the names and counts of the waiting images do not fit")
        if sum(lengths) != len(raw) or sum(counts) != len(lengths):
            raise ValueError("the lengths and counts of the waiting images do not add up")
        ends = np.cumsum([0, *lengths]).tolist()
        flat = [raw[a:b] for a, b in itertools.pairwise(ends)]
        bounds = itertools.pairwise(np.cumsum([0, *counts]).tolist())
        self.images = {name: flat[a:b] for name, (a, b) in zip(names, bounds, strict=True)}
        self.drop(name for name, before in learning.items() if learned.get(name, 0) > int(before))
