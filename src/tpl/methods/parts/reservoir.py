"""A reservoir: a uniform sample of all images seen, whatever their classes.

Reservoir sampling lets a stream pass by and keeps every image with the same probability, budget / seen. Here each image
draws a key by lot, and those with the smallest keys stay. That is the same sample (the n smallest of random keys are n
images at random), but who stays depends on no count of the past and on nothing that is learned: it is known before a
task is trained, and a smaller budget keeps a part of what a larger one would.

The images are stored, saved and counted as any `Memory` does it. The keys, and whatever else travels along with an
image, belong into the method's state: one row an image, in the order of `labels`. Names there start with `memory.`, so
that they do not count as parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tpl.memory import Memory, encode
from tpl.stream import ImageSet, Preprocess


@dataclass(frozen=True)
class Admission:
    """Who stays and who comes: rows of the memory, and of the new images, in the order they will have there."""

    kept: Tensor
    entering: Tensor
    keys: Tensor  # of both, the kept ones first


@dataclass
class Reservoir(Memory):
    """The `budget` images that drew the smallest keys of all that were offered.

    They come in through `admit` and `take`; `add` and `redraw` are for memories with equal shares, and know no keys.
    """

    keys: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    def admit(self, labels: Tensor, generator: torch.Generator) -> Admission:
        """Decide on new images, labelled within their task; nothing is stored yet."""
        labels = labels.cpu()
        drawn = torch.rand(len(labels), dtype=torch.float64, generator=generator)
        keys = torch.cat([self.keys, drawn])
        stays = torch.zeros(len(keys), dtype=torch.bool)
        stays[keys.argsort()[: self.budget]] = True
        kept, entering = (torch.nonzero(part).squeeze(1) for part in stays.split([len(self.keys), len(labels)]))
        entering = entering[labels[entering].argsort(stable=True)]  # class by class, as the memory lies
        return Admission(kept, entering, torch.cat([self.keys[kept], drawn[entering]]))

    def take(self, admission: Admission, images: ImageSet, classes: int, preprocess: Preprocess) -> None:
        """Do what was decided on the images of a task that brought so many classes."""
        labels = np.asarray(images.labels)
        fresh: list[list[bytes]] = [[] for _ in range(classes)]
        for i in admission.entering.tolist():
            fresh[labels[i]].append(encode(preprocess.shrink(images.load(i))))
        stayed: list[list[bytes]] = [[] for _ in self.exemplars]
        flat = [image for images_ in self.exemplars for image in images_]
        owners = self.labels.tolist()
        for row in admission.kept.tolist():
            stayed[owners[row]].append(flat[row])
        self.restore([*stayed, *fresh])
        self.keys = admission.keys

    def remove(self, c: int) -> Tensor:
        """Drop a class and its images; later classes move up. Returns which rows stayed."""
        stayed = super().remove(c)
        self.keys = self.keys[stayed]
        return stayed
