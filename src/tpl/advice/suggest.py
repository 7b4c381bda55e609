"""Which unlabelled images are most worth a label: those the model is unsure about, as different as possible.

The images with the smallest difference between the two best classes, or that look like no known class, are candidates,
several times as many as wanted, no two of them nearly equal. Of these, images are chosen one by one so that every
candidate that is not sure is as near as possible to a chosen one (facility location): the choice represents what the
model does not know.
On images of CIFAR-100 under ViT-tiny this gained half as much again as images drawn at random (docs/check.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

CANDIDATES = 4  # for every image wanted
EQUAL = 0.95  # cosine of features from which two images are nearly equal
SURE = 0.1  # share of the largest uncertainty from which an image counts as unsure
POWER = 8  # of the unknown score: one that a twentieth of the known images reach counts as two thirds unsure


def uncertainty(probabilities: Tensor, unknown: Tensor | None = None) -> Tensor:
    """How unsure a model is about each image, from 0 to 1, given `[n, classes]` and unknown scores from 0 to 1."""
    best = probabilities.topk(min(2, probabilities.shape[1]), dim=1).values
    unsure = 1 - (best[:, 0] - best[:, 1]) if best.shape[1] > 1 else torch.zeros_like(best[:, 0])
    return unsure if unknown is None else torch.maximum(unsure, unknown.to(unsure) ** POWER)


def most_useful(unsure: Tensor, features: Tensor, count: int) -> list[int]:
    """The rows of `count` images to label, the most useful first; features are `[n, dim]`, of unit length."""
    candidates = _different(unsure, features, CANDIDATES * count)
    near = (features[candidates] @ features[candidates].T).clamp_min(0).square()
    counts = (unsure[candidates] > SURE * unsure.max()).to(near)
    covered = torch.zeros_like(near[0])
    chosen: list[int] = []
    for _ in range(min(count, len(candidates))):
        gain = (near - covered).clamp_min(0) @ counts
        gain[chosen] = -1
        best = int(gain.argmax())
        chosen.append(best)
        covered = torch.maximum(covered, near[best])
    return [candidates[i] for i in chosen]


def _different(unsure: Tensor, features: Tensor, count: int) -> list[int]:
    """The `count` most uncertain images of which no two are nearly equal; equal ones only where there are no others."""
    open_ = torch.ones(len(unsure), dtype=torch.bool)
    found: list[int] = []
    for row in unsure.argsort(descending=True, stable=True).tolist():
        if len(found) == count:
            return found
        if open_[row]:
            found.append(row)
            open_ &= features @ features[row] < EQUAL
    rest = unsure.clone()
    rest[found] = -1
    return found + rest.argsort(descending=True, stable=True)[: min(count, len(unsure)) - len(found)].tolist()
