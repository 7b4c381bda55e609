"""What a learner returns: the answer for an image, and the record of a task."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

ROUNDING = 1e-9  # 1 - 0.05 and 1 - 1/20 are the same share
DIGITS = 6  # of a probability in output; further digits depend on the machine


@dataclass(frozen=True)
class Answer:
    """The prediction for one image: its class, with probability and task, and the `top` most probable classes.

    `unknown` is between 0 and 1: of images of known classes, at most a share `a` reach 1 - a. It is 0 where there are
    too few images to compare with, and None for methods without an unknown score.
    """

    name: str
    probability: float
    task: str
    unknown: float | None
    top: tuple[tuple[str, float], ...]
    passes: int | None = None  # task models that were run; None for methods without

    def to_dict(self, top: int | None = None) -> dict[str, Any]:
        """The answer as JSON for the command line and the server, with at most `top` of its most probable classes."""
        return {
            "class": self.name,
            "probability": round(self.probability, DIGITS),
            "task": self.task,
            "unknown": None if self.unknown is None else round(self.unknown, DIGITS),
            "passes": self.passes,
            "top": [{"class": name, "probability": round(p, DIGITS)} for name, p in self.top[:top]],
        }

    def rejected(self, share: float) -> bool:
        """Whether to call the image unknown, if at most a `share` of the known ones may be called so, too."""
        return self.unknown is not None and self.unknown >= 1 - share - ROUNDING


@dataclass(frozen=True)
class Measured:
    """How many of some images were classified rightly."""

    right: int
    images: int

    @property
    def interval(self) -> tuple[float, float]:
        """Where the accuracy lies with 95 % confidence (Wilson, 1927)."""
        n, z = max(self.images, 1), 1.96
        middle, half = (
            self.right / n + z * z / (2 * n),
            z * math.sqrt(self.right * (n - self.right) / n + z * z / 4) / n,
        )
        low, high = ((middle + side * half) / (1 + z * z / n) for side in (-1, 1))
        return (max(low, 0.0), min(high, 1.0)) if self.images else (0.0, 1.0)

    def to_dict(self) -> dict[str, Any]:
        """The counts as JSON, with accuracy and interval."""
        accuracy = round(self.right / self.images, DIGITS) if self.images else None
        interval = [round(side, DIGITS) for side in self.interval]
        return {"right": self.right, "images": self.images, "accuracy": accuracy, "interval": interval}


@dataclass(frozen=True)
class Effect:
    """What a new task or an update did to the classes known before, by leave-one-out on what is stored of them.

    `before` and `after` count the same images, but for an update's own, which `after` counts, too. `confused` are old
    classes that are taken for new ones: true, predicted, count; the most frequent first. (New classes taken for old
    ones are among the errors of the new task.)
    """

    before: Measured
    after: Measured
    confused: tuple[tuple[str, str, int], ...]
    by: str  # what was measured: the model's own answers, or those of its classifier over all classes

    def to_dict(self) -> dict[str, Any]:
        """The effect as JSON."""
        confused = [{"true": t, "predicted": p, "count": n} for t, p, n in self.confused]
        return {"before": self.before.to_dict(), "after": self.after.to_dict(), "confused": confused, "by": self.by}


@dataclass(frozen=True)
class TaskRecord:
    """How a task was learned."""

    name: str
    classes: tuple[str, ...]
    images: int  # trained on; 0 if not counted
    held_out: int
    accuracy: float | None  # on images held out or left out in turn, among all classes known then
    learned: str  # date and time, ISO
    source: str
    measured_on: int  # images behind the accuracy

    @property
    def measured(self) -> Measured | None:
        """The counts behind the accuracy."""
        if self.accuracy is None:
            return None
        return Measured(round(self.accuracy * self.measured_on), self.measured_on)


@dataclass(frozen=True)
class TaskEntry:
    """A task in a model's header: with counts per class, so that classes can be removed or updated."""

    name: str
    classes: tuple[str, ...]
    images: tuple[int, ...] = ()
    held_out: tuple[int, ...] = ()
    accuracy: float | None = None
    learned: str = ""
    source: str = ""
    confusions: tuple[tuple[str, str, int], ...] = ()  # true, predicted, count
    measured_on: int = 0  # images behind the accuracy; 0: not stored, by earlier versions

    @property
    def record(self) -> TaskRecord:
        """The entry with totals instead of counts per class."""
        images, held_out = sum(self.images), sum(self.held_out)
        measured_on = self.measured_on or held_out or images
        return TaskRecord(
            self.name, self.classes, images, held_out, self.accuracy, self.learned, self.source, measured_on
        )

    def without(self, name: str) -> Self:
        """The entry without one class; the accuracy stays what was measured when the task was learned."""
        others = [i for i, c in enumerate(self.classes) if c != name]
        return replace(
            self,
            classes=tuple(self.classes[i] for i in others),
            images=tuple(self.images[i] for i in others if self.images),
            held_out=tuple(self.held_out[i] for i in others if self.held_out),
            confusions=tuple(c for c in self.confusions if name not in c[:2]),
        )

    def renamed(self, old: str, new: str) -> Self:
        """The entry with another name for a class."""

        def name(c: str) -> str:
            return new if c == old else c

        return replace(
            self,
            classes=tuple(map(name, self.classes)),
            confusions=tuple((name(true), name(predicted), n) for true, predicted, n in self.confusions),
        )

    def updated(self, images: dict[str, int], held_out: dict[str, int]) -> Self:
        """The entry with more images of some classes."""

        def sums(numbers: tuple[int, ...], more: dict[str, int]) -> tuple[int, ...]:
            numbers = numbers or (0,) * len(self.classes)
            return tuple(n + more.get(c, 0) for n, c in zip(numbers, self.classes, strict=True))

        return replace(self, images=sums(self.images, images), held_out=sums(self.held_out, held_out))

    def to_dict(self) -> dict[str, Any]:
        """The entry as JSON, for the header of a model."""
        return {
            "name": self.name,
            "classes": list(self.classes),
            "images": list(self.images),
            "held_out": list(self.held_out),
            "accuracy": self.accuracy,
            "learned": self.learned,
            "source": self.source,
            "confusions": [list(c) for c in self.confusions],
            "measured_on": self.measured_on,
        }

    @classmethod
    def from_dict(cls, entry: dict[str, Any], number: int) -> Self:
        """An entry from the header of a model; early versions stored the classes alone."""
        return cls(
            entry.get("name", f"task {number}"),
            tuple(entry["classes"]),
            tuple(entry.get("images", ())),
            tuple(entry.get("held_out", ())),
            entry.get("accuracy"),
            entry.get("learned", ""),
            entry.get("source", ""),
            tuple((true, predicted, n) for true, predicted, n in entry.get("confusions", ())),
            entry.get("measured_on", 0),
        )
