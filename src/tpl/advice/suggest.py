"""Which unlabelled images are most worth a label: those the model is unsure about, as different as possible.

The images with the smallest difference between the two best classes, or that look like no known class, are candidates,
several times as many as wanted, no two of them nearly equal. Of these, images are chosen one by one so that every
candidate that is not sure is as near as possible to a chosen one (facility location): the choice represents what the
model does not know.
On images of CIFAR-100 under ViT-tiny this gained half as much again as images drawn at random (docs/check.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpl.advice.features import centred
from tpl.answers import DIGITS
from tpl.methods import Method
from tpl.methods.base import UNKNOWN
from tpl.stream import Found, batches

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


@dataclass(frozen=True)
class Suggestion:
    """An image worth a label: the two best classes, the unknown score if there is one, and how unsure the model is."""

    path: str
    top: tuple[tuple[str, float], ...]
    unknown: float | None
    unsure: float

    def reason(self) -> str:
        """Why it is worth a label, in words."""
        (name, best), *rest = self.top
        if rest and self.unsure <= 1 - (best - rest[0][1]) + 1e-6:
            return f"{name} {100 * best:.1f} % or {rest[0][0]} {100 * rest[0][1]:.1f} %"
        if self.unknown is None:
            return f"{name} {100 * best:.1f} %"
        return f"{name} {100 * best:.1f} %, but it looks like none of the classes (unknown {self.unknown:.2f})"

    def to_dict(self) -> dict[str, Any]:
        """The suggestion as JSON."""
        top = [{"class": name, "probability": round(p, DIGITS)} for name, p in self.top]
        unknown = None if self.unknown is None else round(self.unknown, DIGITS)
        scores = {"unknown": unknown, "unsure": round(self.unsure, DIGITS)}
        return {"path": self.path, "top": top} | scores


@dataclass(frozen=True)
class Suggested:
    """The images to label, the most useful first; how many were seen, and why others could not be read."""

    rows: list[Suggestion]
    images: int
    unreadable: list[str]

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON."""
        rows = [row.to_dict() for row in self.rows]
        return {"images": self.images, "suggested": rows, "unreadable": self.unreadable}


Seen = tuple[Tensor, Tensor | None, Tensor]  # P(class), unknown score and features of a batch


def suggested(
    method: Method,
    found: Iterable[Found],
    count: int,
    batch: int = 256,
    advance: Callable[[int], None] = lambda images: None,
    compute: Callable[[Callable[[], Seen]], Seen] = lambda look: look(),
) -> Suggested:
    """The `count` images most worth a label; `compute` runs each batch, e.g. in another thread."""
    names = method.classes_
    paths: list[str] = []
    errors: list[str] = []
    probabilities, features = [], []
    unknown: list[Tensor] = []
    with closing(batches(found, method.preprocess, batch)) as ready:
        for part in ready:
            paths += [name for name, error in zip(part.names, part.errors, strict=True) if error is None]
            errors += [error for error in part.errors if error is not None]
            if len(part.pixels):
                p, u, z = compute(lambda pixels=part.pixels: _look(method, pixels))  # type: ignore[misc]
                probabilities.append(p.cpu())
                unknown += [] if u is None else [u.cpu()]
                features.append(z.double().cpu())
            advance(len(part.names))
    if not paths:
        return Suggested([], 0, errors)
    p, u = torch.cat(probabilities), torch.cat(unknown) if unknown else None
    unsure = uncertainty(p, u)
    top = p.topk(min(2, len(names)), dim=1)
    best = [
        tuple((names[c], q) for c, q in zip(*row, strict=True))
        for row in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    rows = most_useful(unsure, centred(torch.cat(features)), count)
    known = [None] * len(p) if u is None else u.tolist()
    return Suggested([Suggestion(paths[i], best[i], known[i], float(unsure[i])) for i in rows], len(paths), errors)


def _look(method: Method, pixels: Tensor) -> Seen:
    answer = method.answer(pixels, {UNKNOWN})
    p = answer.log_p.exp()
    return p, answer.unknown, method.encoder_features(pixels) if method.encoder.pretrained else p
