"""All that can be said about labelled images before they are learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.advice.curve import Outlook, outlook
from tpl.advice.features import FeatureReader, Looked, centred
from tpl.advice.files import LeftOut, equal_pictures, files_left_out, names_alike
from tpl.advice.labels import BLOCK, LeaveOneOut, leave_one_out
from tpl.answers import Measured
from tpl.methods import Method
from tpl.stream import Labelled, batches_of

SAME = 0.9999  # cosine of the features of an image and its stored copy
# Of `same_classes`; digits, 10 images or more of both: .29 to .7 for one class in two parts, at most .15 for two.
ONE_CLASS, FEWEST = 0.3, 5  # the smallest share, and images of both


@dataclass(frozen=True)
class Reference:
    """What a model stores of its classes, to compare with: features of images, their classes, and all class names."""

    features: Tensor
    labels: Tensor
    names: list[str]

    @classmethod
    def of(cls, method: Method, reader: FeatureReader) -> Reference:
        """The images that a model stores, or else the feature vectors; without any, it is compared by name alone."""
        if method.memory is not None and len(method.memory):
            stored = reader.features(method.memory.pixels(method.preprocess)).double().cpu()
            return cls(stored, method.memory.labels, method.classes_)
        vectors = method.stored_vectors() or (torch.zeros(0, method.encoder.dim), torch.zeros(0).long())
        return cls(vectors[0].double().cpu(), vectors[1].cpu(), method.classes_)


def learned_and_known(method: Method, known: int) -> tuple[Looked, Reference] | None:
    """The feature vectors that a model stores of its newest classes, and of the first `known`; None if it stores none.

    So nothing has to be computed again to compare classes that were just learned with older ones.
    """
    vectors = method.stored_vectors()
    if vectors is None:
        return None
    features, labels = vectors[0].double().cpu(), vectors[1].cpu()
    new = labels >= known
    found = Looked([""] * int(new.sum()), labels[new] - known, features[new], torch.zeros(0), [])
    return found, Reference(features[~new], labels[~new], method.classes_[:known])


@dataclass(frozen=True)
class Checked:
    """What was found in labelled images."""

    classes: dict[str, int]  # readable images of each class
    left_out: list[LeftOut]
    skipped: list[str]
    unreadable: list[str]
    equal: list[dict[str, Any]]
    suspects: list[dict[str, Any]]
    alike: list[dict[str, Any]]
    names: list[tuple[str, ...]]
    recognised: dict[str, dict[str, int]]  # of each class, leave-one-out
    right: int
    images: int
    outlook: Outlook | None

    @property
    def problems(self) -> int:
        """The number of findings that somebody should look at."""
        files = len(self.left_out) + len(self.skipped) + len(self.unreadable) + len(self.equal)
        return files + len(self.suspects) + len(self.alike) + len(self.names)

    def to_dict(self) -> dict[str, Any]:
        """The findings as JSON."""
        low, high = interval(self.right, self.images)
        measured = {"images": self.images, "right": self.right, "low": low, "high": high}
        return {
            "classes": self.classes,
            "left_out": [vars(kind) for kind in self.left_out],
            "skipped": self.skipped,
            "unreadable": self.unreadable,
            "equal_pictures": self.equal,
            "likely_wrong_labels": self.suspects,
            "classes_that_look_alike": self.alike,
            "names_alike": [list(group) for group in self.names],
            "recognised": self.recognised,
            "leave_one_out": measured | {"accuracy": self.right / self.images if self.images else None},
            "twice_the_images": None if self.outlook is None else self.outlook.to_dict(),
            "problems": self.problems,
        }


def check(
    given: Labelled,
    place: Path | None,
    reader: FeatureReader,
    reference: Reference | None = None,
    batch: int = 256,
    advance: Callable[[int], None] = lambda count: None,
) -> Checked:
    """Look at labelled images; `place` is where they are, for files that are not read."""
    found = reader.look(batches_of(given.images, reader.preprocess, batch), advance)
    names = list(given.class_names)
    predicted = _predictions(found, names, reference)
    counts = found.labels.bincount(minlength=len(names)).tolist()
    right = recognised_of(predicted, found, names) if predicted else {}
    total = sum(row["right"] for row in right.values())
    images = sum(row["images"] for row in right.values())
    known = [] if reference is None else reference.names
    return Checked(
        classes=dict(zip(names, counts, strict=True)),
        left_out=files_left_out(place) if place is not None else [],
        skipped=[*given.skipped, *(f"{n}: no readable images" for n, c in zip(names, counts, strict=True) if not c)],
        unreadable=found.errors,
        equal=_equal(found, names),
        suspects=_suspects(predicted, found, names, known) if predicted else [],
        alike=_alike(predicted, [*names, *(n for n in known if n not in names)], set(names)) if predicted else [],
        names=names_alike(names, known),
        recognised=right,
        right=total,
        images=images,
        outlook=_outlook(found, len(names), total / images) if images else None,
    )


def _predictions(found: Looked, names: list[str], reference: Reference | None) -> LeaveOneOut | None:
    """Leave-one-out predictions of all images, those of a model's classes among them; None with a single class."""
    features, labels, classes = found.features, found.labels, len(names)
    if reference is not None:
        numbers = {name: i for i, name in enumerate(dict.fromkeys([*names, *reference.names]))}
        own = torch.tensor([numbers[name] for name in reference.names], dtype=torch.long)
        other = ~_copies(reference.features, features)
        features, classes = torch.cat([features, reference.features[other]]), len(numbers)
        labels = torch.cat([labels, own[reference.labels[other]]])
    if len(labels.unique()) < 2:
        return None
    return leave_one_out(centred(features), labels, classes)


def same_classes(found: Looked, names: list[str], reference: Reference) -> list[dict[str, Any]]:
    """New classes that are likely a known one under another name: their images cannot be told apart.

    The share of a class's images that is taken for the other is averaged over both classes, of which one may have many
    more images. It is about a half for one class in two parts.
    """
    predicted = _predictions(found, names, reference)
    if predicted is None:
        return []
    every = list(dict.fromkeys([*names, *reference.names]))
    table = predicted.confusion()
    rates = table.double() / table.sum(dim=1, keepdim=True).clamp_min(1)
    shares = (rates + rates.T) / 2
    return [
        {"class": name, "known": every[j], "share": round(float(shares[i, j]), 3)}
        for i, name in enumerate(names)
        for j in torch.nonzero(shares[i] >= ONE_CLASS).squeeze(1).tolist()
        if j >= len(names) and min(int(table[i].sum()), int(table[j].sum())) >= FEWEST
    ]


def _copies(stored: Tensor, features: Tensor) -> Tensor:
    """Which stored images are among the given ones: a copy would answer for its original."""
    found = torch.zeros(len(stored), dtype=torch.bool)
    known = F.normalize(stored, dim=1)
    for part in F.normalize(features, dim=1).split(BLOCK):
        if len(stored):
            found |= (known @ part.T > SAME).any(dim=1)
    return found


def recognised_of(predicted: LeaveOneOut, found: Looked, names: list[str]) -> dict[str, dict[str, int]]:
    """How many images of every class are predicted as labelled."""
    right = predicted.right[: len(found.labels)]
    rows = {name: found.labels == c for c, name in enumerate(names)}
    return {n: {"images": int(own.sum()), "right": int(right[own].sum())} for n, own in rows.items() if bool(own.any())}


def _equal(found: Looked, names: list[str]) -> list[dict[str, Any]]:
    groups = []
    for rows in equal_pictures(found.thumbnails):
        classes = list(dict.fromkeys(names[int(found.labels[i])] for i in rows))
        groups.append({"files": [found.names[i] for i in rows], "classes": classes})
    return sorted(groups, key=lambda group: -len(group["classes"]))  # one picture in two classes first


def _suspects(predicted: LeaveOneOut, found: Looked, names: list[str], known: list[str]) -> list[dict[str, Any]]:
    every = list(dict.fromkeys([*names, *known]))
    return [
        {"file": found.names[i], "label": names[int(found.labels[i])], "likely": every[c], "probability": round(p, 3)}
        for i, c, p in predicted.suspects()
        if i < len(found.names)
    ]


def _alike(predicted: LeaveOneOut, names: list[str], own: set[str]) -> list[dict[str, Any]]:
    return [
        {"classes": [names[i], names[j]], "confused": count, "images": images}
        for i, j, count, images in predicted.alike()
        if {names[i], names[j]} & own
    ]


def _outlook(found: Looked, classes: int, now: float) -> Outlook | None:
    present = found.labels.unique(return_inverse=True)[1]
    return outlook(centred(found.features), present, int(present.max()) + 1, now)


def interval(right: int, images: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson, 1927)."""
    return Measured(right, images).interval
