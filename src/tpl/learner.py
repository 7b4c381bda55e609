"""The learner: the public class of the package. Learn tasks, predict classes, save, load.

from tpl import Learner

learner = Learner(method="tpl", encoder="compact")
learner.learn("photos/")     # class folders
learner.predict(images)      # class names
learner.save("model")
Learner.load("model")
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tpl._version import __version__
from tpl.answers import Answer, Effect, Measured, TaskEntry, TaskRecord
from tpl.engine import Callback, Event, Samples, choose_compute, no_callback
from tpl.errors import TplError
from tpl.files import sha256_of
from tpl.methods import Method, find_method, learn_together
from tpl.methods.base import UNKNOWN, LeftOut, task_of_class
from tpl.methods.merge import merge
from tpl.migrate import current_options
from tpl.nets import Encoder, EncoderError, create_encoder
from tpl.nets.compact import NAME as COMPACT
from tpl.nets.weights import encoder_from_row, weights_in_a_row
from tpl.store import WAITING, ModelStore, State, StoreError
from tpl.stream import ImageSet, MixedImages, Task, class_counts, hold_out, image_folder, relabelled
from tpl.versions import about_version, kept_by
from tpl.waiting import TASK_CLASSES, TASK_IMAGES, Waiting

__all__ = ["Answer", "Images", "Learner", "TaskRecord", "load"]

CHUNK = 1024  # images decoded at a time: any number of them needs the same memory
ENCODER = "encoder.weights"  # a stored tensor: the weights of an encoder that was downloaded
DOWNLOAD = "TPL_DOWNLOAD"  # environment variable: with 1, loading a model may fetch its encoder's weights
MAX_SOURCE = 5000  # characters that are kept of where a task's images came from
MAX_NAME = 1000  # characters of a class or a task
HELD_OUT = 0.1  # share of every class that is not trained on
LEARNED, UPDATED = "learned", "updated"  # what became of a class

Images = ImageSet | Iterable[Image.Image | Path | str | NDArray[np.uint8]]
Given = Task | Path | str | Images


class Learner:
    """A classifier that learns new classes task by task.

    `options` are the method's own, e.g. `epochs=10, memory=500`; `tpl describe METHOD` lists them. Without `download`
    the encoder's weights must be on this machine already.
    """

    def __init__(
        self,
        method: str = "tpl",
        encoder: str | Encoder = COMPACT,
        weights: Path | str | None = None,
        device: str = "auto",
        precision: str = "auto",
        seed: int = 0,
        compile: str = "auto",
        download: bool = True,
        **options: Any,
    ) -> None:
        found = find_method(method)
        config = found.config_class.parse(options)
        compute = choose_compute(device, precision, compile)
        network = create_encoder(encoder, weights, download) if isinstance(encoder, str) else encoder
        self.method: Method = found(network, config, compute, seed)
        self.keeps_encoder = True  # whether `save` stores the weights of an encoder that was downloaded
        self.outcome_: dict[str, str] = {}  # what the last `learn` or `update` did to each of its classes
        self.waiting_ = Waiting(self.method)  # images that `observe` has taken, and that are not learned yet
        self.effect_: Effect | None = None  # what was learned last did to older classes; None if not measured
        self._entries: list[TaskEntry] = []  # how each task was learned
        self.preset = ""  # of the command that made the model: how it goes on
        self._origin: tuple[Path, int] | None = None  # the directory this model is in, and its number of commits
        self._erases = False  # whether a class was removed, so that the next commit deletes older versions
        self._loaded: Path | None = None  # the directory this model was read from, whoever wrote it

    def instead(self, method: str, **options: Any) -> Self:
        """A learner without tasks: another method on the same encoder, device and seed."""
        other, own, found = copy.copy(self), self.method, find_method(method)
        other.method = found(own.encoder, found.config_class.parse(options), own.compute, own.seed)
        other.waiting_, other.outcome_ = Waiting(other.method), {}
        other._entries, other.effect_, other._origin, other._loaded = [], None, None, None
        return other

    # What was learned

    @property
    def classes_(self) -> list[str]:
        """All classes learned, in the order of arrival."""
        return self.method.classes_

    @property
    def tasks_(self) -> list[TaskRecord]:
        """How each task was learned, in the order of arrival."""
        return [entry.record for entry in self._task_entries()]

    def held_out_confusions(self) -> list[tuple[str, str, int]]:
        """Errors on the newest task's held-out images: true class, predicted class, count; most frequent first."""
        entries = self._task_entries()
        return list(entries[-1].confusions) if entries else []

    def capacity(self) -> dict[str, float] | None:
        """How full the network is: shares of units in use and of adapter weights frozen; None if it has no limit."""
        return self.method.capacity()

    def facts(self) -> dict[str, Any]:
        """What `tpl show` tells beside tasks and encoder; `save` stores it, so that no model must be loaded for it.

        `smallest_reject` is `rejection_floor`; None for a method without an unknown score.
        """
        method, memory = self.method, self.method.memory
        images, budget = (len(memory), memory.budget) if memory is not None else (0, 0)
        kind = getattr(method.config, "memory_kind", "images")
        return {
            "memory": {"kind": kind, "images": images, "budget": budget, "bytes": method.memory_bytes},
            "capacity": self.capacity(),
            "weighting": method.weighting(),
            "covariance_estimators": method.covariance_estimators(),
            "smallest_reject": self._smallest_reject(),
        }

    def _smallest_reject(self) -> float | None:
        if not self.method.has_unknown_score:
            return None
        return self.method.rejection_floor() if self.classes_ else 1.0

    def _task_entries(self) -> list[TaskEntry]:
        """One entry per task; with classes only, if the method was trained without the learner."""
        known = {entry.classes: entry for entry in self._entries}
        tasks = self.method.task_classes_
        return [known.get(classes, TaskEntry(f"task {t}", classes)) for t, classes in enumerate(tasks, start=1)]

    # Answers

    def log_probabilities(self, images: Images) -> Tensor:
        """log P(class | image), one row per image, columns as in `classes_`."""
        return self._chunked(images, lambda pixels: self.method.answer(pixels).log_p)

    def predict_proba(self, images: Images) -> NDArray[np.float64]:
        """P(class | image), one row per image, columns as in `classes_`."""
        probabilities: NDArray[np.float64] = self.log_probabilities(images).exp().numpy()
        return probabilities

    def predict(self, images: Images) -> list[str]:
        """The most probable class of every image; or the nearest of those that wait to be learned (`observe`)."""
        if not self.waiting_.images:
            best = self.log_probabilities(images).argmax(dim=1)
            return [self.classes_[i] for i in best.tolist()]
        found: list[str] = []
        for pixels in self._pixels(images):
            learned = self.method.answer(pixels).log_p.argmax(dim=1).tolist() if self.classes_ else [0] * len(pixels)
            claims = self.waiting_.claims(pixels)
            found += [self.classes_[i] if c is None else c for i, c in zip(learned, claims, strict=True)]
        return found

    def task_proba(self, images: Images) -> NDArray[np.float64]:
        """P(task | image), one row per image, columns as in `tasks_`."""
        of_class = self.log_probabilities(images).exp()
        owner = task_of_class(self.method.task_classes_)
        of_task = torch.zeros(len(of_class), len(self.method.task_classes_), dtype=of_class.dtype)
        probabilities: NDArray[np.float64] = of_task.index_add(1, owner, of_class).numpy()
        return probabilities

    def unknown_score(self, images: Images) -> NDArray[np.float64]:
        """How unlikely every image is to show any class learned, between 0 and 1.

        Of images of known classes, at most a share `a` reach 1 - a: to reject from 0.95 on loses at most one in twenty
        of them. `rejection_floor` is the smallest possible share.
        """
        scores: NDArray[np.float64] = self._chunked(images, self._unknown).numpy()
        return scores

    def _unknown(self, pixels: Tensor) -> Tensor:
        self.method.check_unknown_score()
        found = self.method.answer(pixels, {UNKNOWN}).unknown
        assert found is not None  # the method has such a score
        return found

    def rejection_floor(self) -> float:
        """The smallest share of known images that must be rejected to reject unknown ones; 1 if that is not possible.

        A share needs 1 / share - 1 held-out images in every task: 19 for 5 %.
        """
        self._refuse_empty()
        return self.method.rejection_floor()

    def answers(self, images: Images, top: int = 5) -> list[Answer]:
        """Every image's class with its probability, task, unknown score and the `top` most probable classes."""
        return [answer for pixels in self._pixels(images) for answer in self.answers_of(pixels, top)]

    def answers_of(self, pixels: Tensor, top: int = 5) -> list[Answer]:
        """`answers` for pixels that `prepare` returned, uint8 `[n, 3, size, size]`."""
        self._refuse_empty()
        found = self.method.answer(pixels, {UNKNOWN})
        count, names = len(found.log_p), self.classes_
        unknown = [None] * count if found.unknown is None else found.unknown.tolist()
        passes = [None] * count if found.passes is None else found.passes.tolist()
        tasks = [entry.name for entry in self._task_entries() for _ in entry.classes]
        best = found.log_p.exp().cpu().topk(min(max(top, 1), len(names)), dim=1)
        rows = zip(best.indices.tolist(), best.values.tolist(), unknown, passes, strict=True)
        return [
            Answer(names[i[0]], p[0], tasks[i[0]], u, tuple((names[j], q) for j, q in zip(i, p, strict=True)), n)
            for i, p, u, n in rows
        ]

    def prepare(self, images: Images) -> Tensor:
        """Images in the encoder's size: uint8 `[n, 3, size, size]`."""
        return self.method.preprocess.batch(_as_image_set(images))

    def _pixels(self, images: Images) -> Iterator[Tensor]:
        """Images in the encoder's size, a bounded number at a time; an empty set is one empty batch."""
        given = _as_image_set(images)
        for start in range(0, max(len(given), 1), CHUNK):
            yield self.prepare(given.select(np.arange(start, min(start + CHUNK, len(given)))))

    def _chunked(self, images: Images, compute: Callable[[Tensor], Tensor]) -> Tensor:
        self._refuse_empty()
        return torch.cat([compute(pixels).cpu() for pixels in self._pixels(images)])

    def _refuse_empty(self) -> None:
        if not self.classes_:
            raise TplError("Nothing was learned yet: call learn(task) first.")

    # Learning

    def learn(
        self,
        images: Given,
        labels: Sequence[str] | None = None,
        *,
        name: str | None = None,
        held_out: float = HELD_OUT,
        callback: Callback = no_callback,
        source: str = "",
    ) -> Self:
        """Learn one more task of new classes; images of known classes among them `update` these, if both are given.

        `images` is a Task, the path of class folders or of a zip of them, or a list of images with a class name each
        in `labels`. A share `held_out` of every class with at least five images is not trained on: it measures the
        accuracy, and calibrates the unknown score. `outcome_` says what became of every class. If anything fails, all
        stays as it was.
        """
        task, known = self._by_novelty(self._as_task(images, labels, name))
        check_stored_names("class", task.classes)
        check_stored_names("task", [task.name])
        with _damage_reported(self):
            return self._learn(task, known, images, held_out, callback, source)

    def _learn(
        self, task: Task, known: Task | None, images: Given, held_out: float, callback: Callback, source: str
    ) -> Self:
        """Learn a task of new classes, and update the `known` ones if there are any."""
        source = source or (str(images) if isinstance(images, (str, Path)) else "")
        source = source.encode(errors="replace").decode()[-MAX_SOURCE:]  # a path may hold bytes that are no text
        if known is None:
            self._learn_task(task, held_out, callback, source)
            return self
        entries, before, old = self._entries, self.method.left_out(), len(self.classes_)
        try:
            with self.method.attempt():
                self._learn_task(task, held_out, callback, source)
                self.update(known, callback=callback, held_out=held_out)
                self.effect_ = self._effect(before, old)
        except BaseException:
            self._entries = entries
            raise
        self.outcome_ = dict.fromkeys(task.classes, LEARNED) | self.outcome_
        return self

    def _learn_task(self, task: Task, held_out: float, callback: Callback, source: str) -> None:
        learn_side_by_side([self], [task], [held_out], [callback], source)
        entry = self._entries[-1]
        self.outcome_ = dict.fromkeys(task.classes, LEARNED)
        callback(Event("learned", {"task": task.name, "accuracy": entry.accuracy, "held_out": sum(entry.held_out)}))

    def _record(
        self, task: Task, train: ImageSet, rest: ImageSet, held: Samples, source: str, before: LeftOut | None
    ) -> None:
        """Add an entry for the newest task, with the errors on its held-out images."""
        entry = TaskEntry(
            task.name,
            task.classes,
            class_counts(train, len(task.classes)),
            class_counts(rest, len(task.classes)),
            learned=datetime.now().astimezone().isoformat(timespec="seconds"),
            source=source,
        )
        others = [] if self.method.cumulative else self._task_entries()[:-1]
        self._entries = [*others, entry]
        names, after = self.classes_, self.method.left_out()
        old = len(names) - len(entry.classes)
        self.effect_ = self._effect(before, old)
        if after is not None and self.method.leaves_one_out:
            own = after.labels >= old
            truth, guess = after.labels[own].tolist(), after.log_p[own].argmax(dim=1).tolist()
        else:
            truth = (held.labels.cpu() + old).tolist()
            guess = self.method.measure(held).argmax(dim=1).tolist() if truth else []
        if not truth:
            return
        wrong = Counter((names[t], names[g]) for t, g in zip(truth, guess, strict=True) if t != g)
        confusions = tuple((t, g, n) for (t, g), n in wrong.most_common())
        accuracy = (len(truth) - wrong.total()) / len(truth)
        self._entries[-1] = replace(entry, accuracy=accuracy, confusions=confusions, measured_on=len(truth))

    def _effect(self, before: LeftOut | None, old: int) -> Effect | None:
        """What happened to the first `old` classes, given what leave-one-out said before; None without that."""
        after = self.method.left_out()
        if before is None or after is None or not old:
            return None
        names, guess = self.classes_, after.log_p.argmax(dim=1)
        counted = []
        for found in (before, after):
            rows = found.labels < old
            right = found.log_p[rows].argmax(dim=1) == found.labels[rows]
            counted.append(Measured(int(right.sum()), len(right)))
        lost = (after.labels < old) & (guess >= old)
        pairs = zip(after.labels[lost].tolist(), guess[lost].tolist(), strict=True)
        confused = Counter((names[t], names[g]) for t, g in pairs).most_common()
        by = "model" if self.method.leaves_one_out else "classifier over all classes"
        return Effect(counted[0], counted[1], tuple((t, g, n) for (t, g), n in confused), by)

    def update(
        self,
        images: Given,
        labels: Sequence[str] | None = None,
        callback: Callback = no_callback,
        *,
        held_out: float = HELD_OUT,
    ) -> Self:
        """Add images of known classes.

        The classes' statistics and exemplars are updated; nothing is trained, and other tasks do not change.
        """
        task = self._as_task(images, labels, "update")
        new = [c for c in task.classes if c not in self.classes_]
        if new:
            raise TplError(
                f"Not known yet: {', '.join(new)}. Only images of known classes update a model; learn new classes "
                "as a task of their own."
            )
        task = _without_empty_classes(task)
        entries = self._task_entries()
        count = sum(sum(entry.images) + sum(entry.held_out) for entry in entries)  # another seed at each update
        train, rest = hold_out(task, 0.0 if self.method.leaves_one_out else held_out, [self.method.seed, count])
        held, before = self.method.samples_of(rest, no_callback), self.method.left_out()
        with _damage_reported(self):
            self.method.update(replace(task, train=train, test=None), held, callback)
        self.effect_ = self._effect(before, len(self.classes_))
        counts = [class_counts(part, len(task.classes)) for part in (train, rest)]
        trained, apart = (dict(zip(task.classes, numbers, strict=True)) for numbers in counts)
        self._entries = [
            entry.updated(trained, apart) if set(entry.classes) & set(task.classes) else entry for entry in entries
        ]
        self.outcome_ = dict.fromkeys(task.classes, UPDATED)
        callback(Event("learned", {"task": task.name, "accuracy": None, "held_out": len(held)}))
        return self

    def observe(
        self,
        images: Images,
        labels: Sequence[str],
        *,
        task_classes: int = TASK_CLASSES,
        task_images: int = TASK_IMAGES,
        held_out: float = HELD_OUT,
        callback: Callback = no_callback,
    ) -> Self:
        """Take a small chunk of a stream without task boundaries; `outcome_` says what was learned now, if anything.

        Images wait until a task is worth learning: `task_classes` new classes with `task_images` images each, which are
        then learned together. Images of known classes wait until there are `task_images` of them, and `update` the
        model. Meanwhile `predict` gives an image to a waiting class if it is nearer to that class's mean, in the
        encoder's features, than to the mean of any learned class in the memory.

        If the model has a directory, it is saved whenever something is learned, and what waits is written there at
        once: when the call has returned, a crash loses nothing.
        """
        if not self.method.encoder.pretrained:
            raise TplError(
                f"observe answers by features of a pre-trained encoder; '{self.method.encoder.name}' is none."
            )
        task = self._as_task(images, labels, None) if len(labels) else None
        if task is not None:
            check_stored_names("class", task.classes)
            if not self.method.can_update and (known := [c for c in task.classes if c in self.classes_]):
                raise TplError(
                    f"Already learned: {', '.join(known)}. The method '{self.method.name}' cannot learn from more "
                    "images of known classes."
                )
            self.waiting_.add(task)
        taken = self.waiting_.ripe(task_classes, task_images)
        self._write_waiting({name: self._images_of().get(name, 0) for name in taken})
        self.outcome_ = {}
        if not taken:
            return self
        ripe = self.waiting_.task(taken)
        if set(taken) <= set(self.classes_):
            self.update(ripe, callback=callback, held_out=held_out)
        else:
            self.learn(ripe, held_out=held_out, callback=callback)
        self.waiting_.drop(taken)
        if self._origin is not None:
            self.save(self._origin[0])
        return self

    def learn_waiting(self, held_out: float = HELD_OUT, callback: Callback = no_callback) -> Self:
        """Learn all that `observe` has taken, at the end of a stream or whenever it should be known well."""
        return self.observe([], [], task_classes=1, task_images=1, held_out=held_out, callback=callback)

    def _images_of(self) -> dict[str, int]:
        """How many images the model has learned of every class, those held out among them."""
        return {
            name: images + held
            for entry in self._task_entries()
            for name, images, held in zip(entry.classes, entry.images, entry.held_out, strict=False)  # early: no counts
        }

    def _write_waiting(self, learning: dict[str, int]) -> None:
        if self._origin is not None:
            store = ModelStore(self._origin[0])
            with store.existing():
                store.write_waiting(self.waiting_.state(learning))

    def remove(self, name: str) -> Self:
        """Remove a class: its exemplars, mean, head row and held-out images; from disk with the next `save`.

        That deletes older versions, too, as they hold the class. What was trained on several classes together stays,
        and so do predictions among the others. A task without classes is removed; the units of its mask stay in use,
        as other tasks may share them.
        """
        entries = [entry.without(name) for entry in self._task_entries()]
        with _damage_reported(self):
            self.method.remove(name)
        self._entries = [entry for entry in entries if entry.classes]
        self.waiting_.drop([name])
        self._erases = True
        return self

    def rename(self, old: str, new: str) -> Self:
        """Rename a class."""
        check_stored_names("class", [new])
        entries = [entry.renamed(old, new) for entry in self._task_entries()]
        self.method.rename(old, new)
        if old in self.waiting_.images:
            self.waiting_.images[new] = self.waiting_.images.pop(old)
        self._entries = entries
        return self

    def merge(self, other: Learner, estimate: bool = False) -> str | None:
        """Add all that another learner, trained apart on the same encoder, has learned; nothing is trained.

        Features under every task's model stay the same, bit for bit. Classes must have different names. Returns how
        the expert of tpl-plus was merged: `added`, `learned` or, only with `estimate`, `estimated`; see
        `tpl.methods.merge`.
        """
        names = {entry.name for entry in self._task_entries()}
        entries = [*self._task_entries()]
        for entry in other._task_entries():
            name = _unused(entry.name, names)
            names.add(name)
            entries.append(replace(entry, name=name))
        with _damage_reported(self, other):
            how = merge(self.method, other.method, estimate)
        self._entries = entries
        return how

    def _as_task(self, images: Given, labels: Sequence[str] | None, name: str | None) -> Task:
        """The task to learn, with a unique name."""
        names = {entry.name for entry in self._task_entries()}
        taken = set() if self.method.cumulative else names
        if name in taken:
            raise TplError(f"There is a task '{name}' already; choose another name.")
        default = f"task {len(names) + 1}"
        if isinstance(images, (str, Path)):
            default = Path(images).resolve().stem or default
        task = _as_task(images, labels, name or default)
        if not len(task.train):
            raise TplError("There are no images to learn from.")
        return replace(task, name=_unused(name or task.name, taken))

    def _by_novelty(self, task: Task) -> tuple[Task, Task | None]:
        """The part of a task whose classes are new, and the part whose classes are known, if there is one."""
        known = [] if self.method.cumulative else [c for c in task.classes if c in self.classes_]
        if not known:
            return task, None
        new = [c for c in task.classes if c not in known]
        if not new:
            raise TplError(f"Already learned: {', '.join(known)}. To add images of known classes, use update.")
        if not self.method.can_update:
            raise TplError(
                f"Already learned: {', '.join(known)}; new: {', '.join(new)}. The method '{self.method.name}' cannot "
                "learn from more images of known classes: learn the new ones by themselves."
            )
        return _classes_of(task, new), _classes_of(task, known)

    # Storage

    def save(self, path: Path | str, versions: int | None = None) -> None:
        """Write the model directory, or update it, in one atomic step.

        The newest `versions` older versions stay in it; None: as many as before, in a new directory 5. After `remove`,
        none of them does.
        """
        store = ModelStore(path)
        with store.writing():
            old = store.header() if store.exists() else None
            place, commits = self._origin or (None, 0)
            if place == store.path.resolve() and old is not None and old["commits"] != commits:
                raise StoreError(f"{path} was changed by another process meanwhile; load it and do this again.")
            memory = self.method.memory.state() if self.method.memory is not None else {}
            header = self._header()
            keep = kept_by(old) if versions is None else versions
            header |= about_version(old, header, keep)
            store.commit(header, self.state(), memory, keep=0 if self._erases else keep)
            self._erases = False
            self._origin = store.path.resolve(), int(store.header()["commits"])
            if self.waiting_.images or (store.path / WAITING).exists():
                store.write_waiting(self.waiting_.state())

    def state(self) -> State:
        """What the method has learned, with the weights of an encoder that could not be had without a network."""
        state = self.method.state()
        row = weights_in_a_row(self.method.encoder) if self.keeps_encoder else None
        return state if row is None else State(state.shared | {ENCODER: row}, state.tasks)

    @classmethod
    @contextmanager
    def changing(cls, path: Path | str, **loading: Any) -> Iterator[Self]:
        """Load a model, change it in the `with` block, and save it; the directory is locked meanwhile.

        with Learner.changing("model") as learner:
            learner.rename("cat", "tabby")
        """
        with ModelStore(path).existing():
            learner = cls.load(path, **loading)
            yield learner
            learner.save(path)

    @classmethod
    def load(
        cls,
        path: Path | str,
        weights: Path | str | None = None,
        device: str = "auto",
        precision: str = "auto",
        compile: str = "auto",
        version: int | None = None,
        warm: bool = True,
    ) -> Self:
        """The learner that `save` wrote. `weights` names the encoder's file if it has moved.

        `version` is the number of an older version that is kept (`tpl history`); to save it makes it the newest one. No
        hub is contacted, unless the environment variable TPL_DOWNLOAD is 1. What was stored is tried on a blank image,
        so the first prediction is as fast as later ones; or, if it need not be `warm` and the method allows it, on a
        feature vector.
        """
        store = ModelStore(path)
        header, state, memory = store.read(version)
        try:
            row = state.shared.pop(ENCODER, None)
            learner = cls._from_header(header, row if weights is None else None, weights, device, precision, compile)
            learner.keeps_encoder = row is not None
            learner._restore(header, state, memory, warm)
            if version is None and (waiting := store.read_waiting()):
                learner.waiting_.load_state(waiting, learner._images_of())
        except (TplError, KeyboardInterrupt):
            raise
        except Exception as error:  # tensors of other names, shapes or types than the method's own, or too large ones
            raise StoreError(
                f"{path} is damaged: its tensors do not fit its model.json ({type(error).__name__}: {error}); restore "
                "it from a backup."
            ) from error
        commits = header["commits"] if version is None else store.header()["commits"]
        learner._origin, learner._loaded = (store.path.resolve(), int(commits)), store.path
        return learner

    @classmethod
    def _from_header(
        cls,
        header: dict[str, Any],
        row: Tensor | None,
        weights: Path | str | None,
        device: str,
        precision: str,
        compile: str,
    ) -> Self:
        """The untrained learner of a stored model, on the weights that it was learned on: those in `row`, if any."""
        method, encoder = header["method"], header["encoder"]
        remembered = encoder["weights"] if weights is None else None
        if remembered is not None and Path(remembered).is_file() and sha256_of(Path(remembered)) != encoder["sha256"]:
            raise _other_weights(encoder, sha256_of(Path(remembered)))  # not even opened as weights
        options = current_options(method, header["options"])
        learner = cls(
            method,
            encoder["name"] if row is None else encoder_from_row(encoder["name"], row),
            weights or remembered,
            device,
            precision,
            header["seed"],
            compile,
            download=os.environ.get(DOWNLOAD) == "1",
            **options,
        )
        if learner.method.encoder.fingerprint != encoder["fingerprint"]:
            raise _other_weights(encoder, learner.method.encoder.sha256)
        return learner

    def _restore(self, header: dict[str, Any], state: State, memory: dict[str, Tensor], warm: bool) -> None:
        """Take over a stored state, and try it on a blank image: what does not fit is found before it is used."""
        method, self.preset = self.method, header.get("preset", "")
        self._entries = [TaskEntry.from_dict(task, t) for t, task in enumerate(header["tasks"], start=1)]
        method.task_classes_ = [entry.classes for entry in self._entries]
        method.removed_tasks = header.get("removed_tasks", 0)
        if method.memory is not None and memory:
            method.memory.load_state(memory)
        method.load_state(state)
        if self.classes_:
            found = method.decide([method.blank_pass({UNKNOWN}, warm)], {UNKNOWN}).log_p
            if found.shape != (1, len(self.classes_)) or found.isnan().any():
                raise ValueError(f"a blank image gets {found.shape[1]} probabilities for {len(self.classes_)} classes")

    def _header(self) -> dict[str, Any]:
        method = self.method
        file = method.encoder.weights
        return {
            "tpl": __version__,
            "method": method.name,
            "options": method.config.to_dict(),
            "seed": method.seed,
            "encoder": {
                "name": method.encoder.name,
                "sha256": method.encoder.sha256,
                "fingerprint": method.encoder.fingerprint,
                "weights": str(file.resolve()) if file else None,
            },
            "preset": self.preset,
            "removed_tasks": method.removed_tasks,
            "tasks": [entry.to_dict() for entry in self._task_entries()],
            "facts": self.facts(),
        }


load = Learner.load


@contextmanager
def _damage_reported(*learners: Learner) -> Iterator[None]:
    """Report as damage what fails inside a method of a model from disk: some tensors are used first when it learns."""
    try:
        yield
    except (AssertionError, AttributeError, LookupError, RuntimeError) as error:
        places = [str(each._loaded) for each in learners if each._loaded is not None]
        if not places or isinstance(error, torch.OutOfMemoryError):
            raise
        raise StoreError(
            f"{' or '.join(places)} may be damaged: its tensors do not fit each other ({type(error).__name__}: "
            f"{error}). Restore it from a backup; if it is undamaged, this is an error of the program."
        ) from error


def learn_side_by_side(
    learners: Sequence[Learner],
    tasks: Sequence[Task],
    held_out: Sequence[float],
    callbacks: Sequence[Callback],
    source: str = "",
) -> None:
    """Each learner learns a task; all of them, or none if one fails.

    Python, the command line, the server and benchmarks all learn by this function. `held_out` is the
    share of every class that each learner does not train on. Learners whose settings allow it share their passes over
    the frozen trunk.
    """
    shares = [0.0 if each.method.leaves_one_out else share for each, share in zip(learners, held_out, strict=True)]
    rows = zip(learners, tasks, shares, strict=True)
    parts = [hold_out(task, share, [each.method.seed]) for each, task, share in rows]
    before = [each.method.left_out() for each in learners]
    # First, so that an image that cannot be read is reported before the training.
    held = [each.method.samples_of(rest, no_callback) for each, (_, rest) in zip(learners, parts, strict=True)]
    given = [replace(task, train=train, test=None) for task, (train, _) in zip(tasks, parts, strict=True)]
    learn_together([each.method for each in learners], given, callbacks, held)
    for each, task, (train, rest), apart, left_out in zip(learners, tasks, parts, held, before, strict=True):
        each._record(task, train, rest, apart, source, left_out)


def _other_weights(encoder: dict[str, Any], found: str) -> EncoderError:
    return EncoderError(
        f"The model was learned on other weights of '{encoder['name']}' (sha256 of their file "
        f"{encoder['sha256'][:12]}..., found {found[:12]}...). Pass the right file with --weights."
    )


def _as_image_set(images: Images) -> ImageSet:
    if isinstance(images, ImageSet):
        return images
    if isinstance(images, (str, Path)):
        raise TplError(f"Give a list of images, not a single path: [{str(images)!r}].")
    return MixedImages(list(images))


def _as_task(images: Given, labels: Sequence[str] | None, name: str) -> Task:
    """A task from class folders, a zip of them, or images with a class name each; `name` is for a task without one."""
    if isinstance(images, (Task, str, Path)):
        if labels is not None:
            raise TplError("Class names come with a task or with class folders; labels are for a list of images.")
        if isinstance(images, Task):
            return images
        source = image_folder(images)
        return Task(name, source.class_names, source.train, source.test)
    if labels is None:
        raise TplError("Images need labels, the name of a class for each: learn(images, labels).")
    given, names = _as_image_set(images), [str(label) for label in labels]
    if len(names) != len(given):
        raise TplError(f"There are {len(given)} images, but {len(names)} labels; each image needs one.")
    if not all(n.strip() for n in names):
        raise TplError("A label is empty; every image needs the name of a class.")
    classes, numbers = np.unique(np.array(names, dtype=object), return_inverse=True)
    return Task(name, tuple(classes.tolist()), relabelled(given, np.arange(len(given)), numbers))


def _unused(name: str, taken: set[str]) -> str:
    """The name, or with a number where it is taken."""
    numbered = (f"{name} {number}" for number in count(2))
    return next(each for each in chain([name], numbered) if each not in taken)


def _classes_of(task: Task, classes: Sequence[str]) -> Task:
    """The part of a task with these classes."""
    number = np.array([classes.index(c) if c in classes else -1 for c in task.classes])
    rows = np.flatnonzero(number[task.train.labels] >= 0)
    return Task(task.name, tuple(classes), relabelled(task.train, rows, number[task.train.labels[rows]]))


def _without_empty_classes(task: Task) -> Task:
    """A task without the classes that have no images."""
    present, labels = np.unique(task.train.labels, return_inverse=True)
    if len(present) == len(task.classes):
        return task
    train = relabelled(task.train, np.arange(len(labels)), labels)
    return Task(task.name, tuple(task.classes[c] for c in present), train)


def check_stored_names(what: str, names: Iterable[str]) -> None:
    """Refuse names that a model directory cannot hold: empty or endless ones, and file names that are no text."""
    for name in names:
        if not name.strip():
            raise TplError(f"The name of a {what} is empty.")
        if len(name) > MAX_NAME:
            raise TplError(f"The {what} '{name[:40]}...' has more than {MAX_NAME} characters; shorten its name.")
        if any("\ud800" <= sign <= "\udfff" for sign in name):
            raise TplError(f"The {what} {name!a} is no text in UTF-8; rename its folder.")
