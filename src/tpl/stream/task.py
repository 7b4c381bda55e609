"""Tasks, the stream that hands them over one after the other, and the order in which their classes arrive."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

import numpy as np

from tpl.errors import DataError, TplError
from tpl.files import at_home
from tpl.stream.images import GuardedImages, ImageSet, TrainingAccess, concatenate, relabelled

ENOUGH_TO_HOLD_OUT = 5  # images of a class; one with fewer needs them all for training
_ORDER_FORMS = '"natural", "random:SEED" or "FILE.json:ID"'


@dataclass(frozen=True)
class Task:
    """A few classes that arrive together. Labels of both sets index `classes`.

    `more` are further images of classes of earlier tasks that arrive with it, in a blurry stream.
    """

    name: str
    classes: tuple[str, ...]
    train: ImageSet
    test: ImageSet | None = None
    more: Task | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(self.classes))
        if not self.classes:
            raise DataError(f"{self.name}: a task needs at least one class.")
        _refuse_repeats(self.classes, self.name)
        for part, images in (("train", self.train), ("test", self.test)):
            if images is None or not len(images):
                continue
            low, high = int(images.labels.min()), int(images.labels.max())
            if low < 0 or high >= len(self.classes):
                raise DataError(
                    f"{self.name}: {part} labels run from {low} to {high}, but there are {len(self.classes)} classes "
                    f"(labels 0 to {len(self.classes) - 1})."
                )


class Stream:
    """An ordered sequence of tasks whose classes do not overlap. A slice of a stream is a stream."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tuple(tasks)
        self.classes: tuple[str, ...] = tuple(name for task in self._tasks for name in task.classes)
        _refuse_repeats(self.classes, "the stream")

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> Stream: ...

    def __getitem__(self, index: int | slice) -> Task | Stream:
        return Stream(self._tasks[index]) if isinstance(index, slice) else self._tasks[index]

    def union(self, upto: int) -> Task:
        """Tasks 0 to `upto`, the latter included, as one task: what joint training and joint tests see."""
        if not 0 <= upto < len(self):
            raise IndexError(f"union of tasks 0..{upto} of a stream of {len(self)}")
        tasks = self._tasks[: upto + 1]
        offsets = np.cumsum([0] + [len(task.classes) for task in tasks]).tolist()
        tests = [(task.test, offset) for task, offset in zip(tasks, offsets, strict=False) if task.test is not None]
        more = [task.more for task in tasks if task.more is not None]
        numbers = [np.array([self.classes.index(c) for c in part.classes])[part.train.labels] for part in more]
        late = [relabelled(p.train, np.arange(len(n)), n) for p, n in zip(more, numbers, strict=True)]
        return Task(
            name=tasks[0].name if upto == 0 else f"{tasks[0].name} to {tasks[-1].name}",
            classes=self.classes[: offsets[-1]],
            train=concatenate([*(task.train for task in tasks), *late], [*offsets[:-1], *(0 for _ in late)]),
            test=concatenate([test for test, _ in tests], [offset for _, offset in tests]) if tests else None,
        )

    def with_validation(self, fraction: float, seed: int) -> Stream:
        """A stream whose test sets are a held-out part of each class's training images.

        Which images are held out depends on the seed, the class's name and its own images only, so neither
        the class order nor the split into tasks changes it. A class with one image keeps it for training.
        """
        if not 0 < fraction < 1:
            raise DataError(f"the validation fraction must lie between 0 and 1, not be {fraction}.")
        if seed < 0:
            raise DataError(f"the validation seed must be 0 or more, not {seed}.")
        tasks = []
        for task in self._tasks:
            train, held = hold_out(task, fraction, [seed], smallest=2)
            tasks.append(replace(task, train=train, test=held if len(held) else None))
        return Stream(tasks)

    def blurred(self, share: float, seed: int) -> Stream:
        """A stream without sharp borders: a share of each class's training images arrives in other tasks.

        The task of each such image is drawn evenly from all others. Images that come before their class's own task wait
        for it, so they are part of it here; those that come after it are `more` of the task they come with. Which
        images these are depends on the seed, the class's name and its own images only.
        """
        if len(self) < 2:
            return self
        tasks, late = [], []
        for number, task in enumerate(self._tasks):
            kept, moved = hold_out(task, share, [seed, len(self)], smallest=2)
            rng = np.random.default_rng([seed, len(self), number])
            drawn = (number + 1 + rng.integers(0, len(self) - 1, len(moved))) % len(self)
            tasks.append(replace(task, train=concatenate([kept, moved.select(drawn < number)], [0, 0])))
            later = np.unique(drawn[drawn >= number])
            late += [(int(when), task.classes, moved.select(drawn == when)) for when in later]
        return Stream([replace(task, more=_joined(late, number)) for number, task in enumerate(tasks)])

    def once(self) -> Iterator[Task]:
        """The tasks one by one; taking the next closes the training set of the one before for good.

        The end of the iteration closes the last. Test sets stay open, and so do the stream's own tasks: the
        evaluator reads those by index.
        """
        for task in self._tasks:
            access = TrainingAccess(task.name)
            more = task.more and replace(task.more, train=GuardedImages(task.more.train, [access]))
            yield replace(task, train=GuardedImages(task.train, [access]), more=more)
            # Not in a `finally`: dropping the iterator must not close the current task.
            access.closed = True


def _joined(late: Sequence[tuple[int, tuple[str, ...], ImageSet]], number: int) -> Task | None:
    """The images that arrive late with task `number`, of all earlier tasks; None if there are none."""
    parts = [(classes, images) for when, classes, images in late if when == number]
    if not parts:
        return None
    offsets = np.cumsum([0] + [len(classes) for classes, _ in parts]).tolist()
    names = tuple(name for classes, _ in parts for name in classes)
    return Task(f"more with task {number + 1}", names, concatenate([images for _, images in parts], offsets[:-1]))


def split(
    train: ImageSet,
    test: ImageSet | None,
    class_names: Sequence[str],
    per_task: int | Sequence[int],
    order: Sequence[int] | None = None,
) -> Stream:
    """A data set cut into tasks: class_names[order[0]], class_names[order[1]], ... arrive in that order.

    `per_task` is the number of classes in each task (the last may be smaller) or one number for each task;
    classes beyond the sum of these are left out. `order` defaults to the classes' own order.
    """
    count = len(class_names)
    whole = Task("data set", tuple(class_names), train, test)  # checks names and labels
    arrival = list(range(count)) if order is None else [int(number) for number in order]
    if sorted(arrival) != list(range(count)):
        raise DataError(f"the class order must hold each of the numbers 0 to {count - 1} once.")
    tasks, start = [], 0
    for number, size in enumerate(_sizes(per_task, count), start=1):
        chosen = arrival[start : start + size]
        start += size
        part = _classes_of(train, chosen, count)
        present = np.bincount(part.labels, minlength=size)
        missing = [class_names[original] for original, seen in zip(chosen, present, strict=True) if not seen]
        if missing:
            raise DataError(f"no training images for: {', '.join(missing)}.")
        held = _classes_of(test, chosen, count) if test is not None else None
        names = tuple(whole.classes[original] for original in chosen)
        tasks.append(Task(f"task {number}", names, part, held if held is not None and len(held) else None))
    return Stream(tasks)


def _classes_of(images: ImageSet, chosen: Sequence[int], count: int) -> ImageSet:
    labels = images.labels
    arrival = np.full(count, -1, dtype=np.int64)
    arrival[list(chosen)] = np.arange(len(chosen))
    indices = np.flatnonzero(arrival[labels] >= 0)
    return relabelled(images, indices, arrival[labels[indices]])


def _sizes(per_task: int | Sequence[int], count: int) -> list[int]:
    if isinstance(per_task, int):
        if per_task < 1:
            raise DataError(f"classes per task must be 1 or more, not {per_task}.")
        return [min(per_task, count - start) for start in range(0, count, per_task)]
    sizes = [int(size) for size in per_task]
    if not sizes or min(sizes) < 1:
        raise DataError(f"classes per task must be 1 or more for each task, not {sizes}.")
    if sum(sizes) > count:
        raise DataError(f"classes per task {sizes} sum to {sum(sizes)}, but the data set has {count} classes.")
    return sizes


def hold_out(
    task: Task, share: float, seed: Sequence[int], smallest: int = ENOUGH_TO_HOLD_OUT
) -> tuple[ImageSet, ImageSet]:
    """The training images of a task without a share of every class, and that share.

    Classes with fewer than `smallest` images are not split. Which images are held out depends on the seed, the class's
    name and its own images only.
    """
    if not 0 <= share < 1:
        raise TplError(f"The share to hold out must be at least 0 and below 1; got {share}.")
    labels = task.train.labels
    held = np.zeros(len(labels), dtype=bool)
    for label, name in enumerate(task.classes):
        members = np.flatnonzero(labels == label)
        if share > 0 and len(members) >= smallest:
            rng = np.random.default_rng([*seed, zlib.crc32(name.encode())])
            take = min(max(round(share * len(members)), 1), len(members) - 1)
            held[rng.choice(members, size=take, replace=False)] = True
    return task.train.select(~held), task.train.select(held)


def class_counts(images: ImageSet, classes: int) -> tuple[int, ...]:
    """How many images each of `classes` classes has."""
    return tuple(np.bincount(images.labels, minlength=classes).tolist())


def _refuse_repeats(names: Sequence[str], where: str) -> None:
    repeats = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeats:
        raise DataError(f"{where}: class names must be unique, but these repeat: {', '.join(repeats)}.")


def class_order(spec: str | int, dataset: str, n: int) -> list[int]:
    """The original class numbers of `dataset`, which has `n` classes, in order of arrival.

    `spec` is "natural", "random:SEED" (a bare whole number is such a seed too), or "FILE.json:ID", where the
    file looks like {"cifar100": {"1": [49, 98, ...]}}.
    """
    text = f"random:{spec}" if isinstance(spec, int) else spec.strip()
    if text == "natural":
        return list(range(n))
    kind, colon, key = text.rpartition(":")
    if not colon or not key:
        raise DataError(f"class order {text!r} is not understood: give {_ORDER_FORMS}.")
    if kind == "random":
        return [int(number) for number in np.random.default_rng(_seed(key)).permutation(n)]
    if not kind.lower().endswith(".json"):
        raise DataError(f"class order {text!r} is not understood: give {_ORDER_FORMS}.")
    return _from_file(at_home(kind), key, dataset, n)


def check_order(spec: str) -> None:
    """Raise an error for a malformed class order or a missing file; needs no data set."""
    kind, _, key = spec.strip().rpartition(":")
    if kind == "random":
        _seed(key)
    elif not kind.lower().endswith(".json"):
        class_order(spec, "", 1)
    elif not at_home(kind).is_file():
        raise DataError(f"there is no class-order file {kind}: check the path.")


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise DataError(f"the seed of a random class order must be a whole number, 0 or more, not {text!r}.")
    return int(text)


def _from_file(path: Path, key: str, dataset: str, n: int) -> list[int]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"there is no class-order file {path}: check the path.") from error
    except (OSError, ValueError) as error:
        raise DataError(f"the class-order file {path} cannot be read as JSON: {error}") from error
    orders = _entry(content, dataset, f"{path} has no class orders for the data set")
    order = _entry(orders, key, f"{path} has, for {dataset}, no class order")
    if not isinstance(order, list) or not all(type(number) is int for number in order):
        raise DataError(f"{path}: class order {key!r} of {dataset} must be a list of whole numbers.")
    if len(order) != n:
        raise DataError(f"{path}: class order {key!r} of {dataset} has {len(order)} entries for {n} classes.")
    if sorted(order) != list(range(n)):
        raise DataError(f"{path}: class order {key!r} of {dataset} must hold each of 0 to {n - 1} exactly once.")
    return order


def _entry(table: object, key: str, complaint: str) -> object:
    known = table if isinstance(table, dict) else {}
    if key not in known:
        raise DataError(f"{complaint} {key!r}; it has: {', '.join(sorted(known)) or 'none'}.")
    return known[key]
