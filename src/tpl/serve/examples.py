"""Stored examples: what the replay memory kept, as small pictures, and which of them are nearest to an image."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from tpl.learner import Learner

SIDE = 112  # pixels of a thumbnail's longer side: sharp at half that size on a phone


@dataclass(frozen=True)
class Example:
    """One stored image: its class, and its distance to the image asked about (0: same direction, 2: opposite)."""

    name: str
    distance: float
    picture: str  # a data: address

    def to_dict(self) -> dict[str, Any]:
        """As the answers have it."""
        return {"class": self.name, "distance": self.distance, "picture": self.picture}


def thumbnail(image: bytes) -> str:
    """A stored image as a data: address, small enough to send along with an answer."""
    with Image.open(io.BytesIO(image)) as opened:
        picture = opened.convert("RGB")
    if max(picture.size) > SIDE:
        picture.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def nearest(learner: Learner, pixels: Tensor, task: int, count: int) -> list[Example]:
    """The stored images nearest to one image, as the model of one task sees them.

    The distance is that of the score's own nearest neighbours: between directions of features. Methods without
    task models have no such view, and give none.
    """
    method = learner.method
    known = method.memory_features(task)
    if known is None or method.memory is None or not len(known):
        return []
    features = method.task_features(pixels.unsqueeze(0), task)
    assert features is not None  # whoever has seen the memory sees this image, too
    features, stored = (F.normalize(z.double(), dim=1) for z in (features, known))
    distances = (2 - 2 * (stored @ features[0])).clamp_min(0).sqrt()
    best = torch.topk(distances, min(count, len(distances)), largest=False)
    labels, classes = method.memory.labels, learner.classes_
    images = [image for images in method.memory.exemplars for image in images]
    return [
        Example(classes[int(labels[row])], float(distance), thumbnail(images[row]))
        for distance, row in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def one_of_each(learner: Learner, most: int) -> dict[str, str]:
    """A thumbnail of the first `most` classes that have a stored image."""
    memory = learner.method.memory
    if memory is None:
        return {}
    pairs = zip(learner.classes_, memory.exemplars, strict=False)
    return {name: thumbnail(images[0]) for name, images in list(pairs)[:most] if images}
