"""The contract of a method: a way of learning a stream of tasks.

A method is one file in this folder: a `Config` and a `Method` with `@register`. It then shows in
`tpl list`, runs in benchmarks, and inherits the common checks in `tests/common_checks.py`.
"""

from __future__ import annotations

import importlib
import pkgutil
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tpl.config import Config
from tpl.engine import BLOCK, Callback, Compute, Event, Inference, Samples, no_callback
from tpl.errors import TplError
from tpl.memory import Memory
from tpl.names import refuse_unknown
from tpl.nets import Compiled, Encoder, unstacked
from tpl.store import State
from tpl.stream import ImageSet, Task
from tpl.stream.vectors import preprocess_for

NOT_COUNTED = ("memory.", "held.", "score.scatter_")  # prefixes of stored tensors that are no parameters
WORTH_COMPILING = 128  # pixels: networks for smaller images are fast enough uncompiled, unless compile=on

# What `want` may name beside the probabilities. KEEP: `forward` computes all that a later stage may need.
UNKNOWN, KEEP = "unknown", "keep"


@dataclass(frozen=True)
class Answers:
    """Predictions for a batch of images; None where something was not wanted or the method does not have it."""

    log_p: Tensor  # log P(class | image), [n, classes], float64; rows sum to 1
    scores: Tensor | None = None  # a score of every task for every image, [n, tasks]; -inf where it was not computed
    unknown: Tensor | None = None  # how little each image looks like any class learned, [n] in [0, 1]
    passes: Tensor | None = None  # passes through task models for each image, [n]


class LeftOut(NamedTuple):
    """Images that were learned, each classified as if it had not been: by all others (leave-one-out)."""

    labels: Tensor  # [n], class numbers
    log_p: Tensor  # [n, classes]


class Method(ABC):
    """Learns tasks one by one and classifies among all their classes."""

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str] = ""
    keeps: ClassVar[str] = ""  # what is stored for later tasks, beside the network
    cost: ClassVar[str] = ""  # of training and of a prediction, in passes through the trunk
    config_class: ClassVar[type[Config]]
    from_scratch: ClassVar[bool] = False  # whether it can also train an encoder that has no pre-trained trunk
    cumulative: ClassVar[bool] = False  # True: needs all data so far at every stage (an upper bound)
    own_options: ClassVar[tuple[str, ...]] = ()  # options whose defaults hold whatever a benchmark sets
    splits: ClassVar[bool] = False  # whether several processes can share its batches: see `check_splits`
    leaves_one_out: ClassVar[bool] = False  # whether `left_out` measures it, so that no image need be held out
    has_task_models: ClassVar[bool] = False  # whether every task has a model of its own

    memory: Memory | None = None
    repeated_: int = 0  # images that came again since the model was made or loaded, where a method notices them

    def __init__(self, encoder: Encoder, config: Any, compute: Compute, seed: int = 0) -> None:
        self._refuse_untrained(encoder)
        self.encoder = encoder.to(compute.device)
        self.config, self.compute, self.seed = config, compute, seed
        self.preprocess = preprocess_for(encoder.data_config)
        self.normalise = self.preprocess.normaliser(compute.device, compute.dtype)
        if compute.compiled and (compute.small_too or self.preprocess.height >= WORTH_COMPILING):
            encoder.fuse()
            self.normalise = Compiled(self.normalise, dynamic=None)
        self.task_classes_: list[tuple[str, ...]] = []
        self.removed_tasks = 0  # tasks that lost all their classes; their seeds are not used again

    def _refuse_untrained(self, encoder: Encoder) -> None:
        if not encoder.pretrained and not self.from_scratch:
            able = ", ".join(sorted(name for name, method in load_methods().items() if method.from_scratch))
            raise TplError(
                f"The method '{self.name}' needs a pre-trained encoder; '{encoder.name}' is trained from scratch, "
                f"by {able}."
            )

    def check_square(self, rotating: str) -> None:
        """Refuse an encoder whose images are not square, for an option or method that rotates them."""
        if self.preprocess.height != self.preprocess.width:
            raise TplError(
                f"{rotating} rotates images; those of '{self.encoder.name}' are not square. Choose another encoder."
            )

    def check_splits(self) -> None:
        """Refuse training by several processes that share every batch, unless the result is that of one process.

        A loss can be split if it is a mean over rows, or a sum of means over new rows and over replayed ones, and of
        terms that do not depend on rows. Such a method sets `splits = True`.
        """
        if not self.splits:
            able = ", ".join(sorted(name for name, method in load_methods().items() if method.splits))
            raise TplError(
                f"The method '{self.name}' cannot be trained by several processes: it hardly trains, or its loss "
                f"needs the whole batch. These can: {able}. Or start one process."
            )
        if self.encoder.batch_norms:
            raise TplError(
                f"Batch norms need the whole batch, so several processes cannot share one with '{self.encoder.name}'. "
                "Start one process, or use an encoder with layer norms (compact, a ViT or DeiT)."
            )

    # What a method must define

    @abstractmethod
    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Learn one task; `samples` are its training images in the encoder's size."""

    @abstractmethod
    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """log P(class | image) over all classes learned, `[n, classes]`, float64, rows sum to 1.

        `pixels` are uint8 images in the encoder's size. A prediction never depends on the rest of the batch.
        """

    @abstractmethod
    def state(self) -> State:
        """All that was learned, for storage."""

    @abstractmethod
    def load_state(self, state: State) -> None:
        """Restore what `state` returned. `task_classes_` and the memory are already in place."""

    # What a method may override

    def first_stage(self, stages: int) -> int:
        """The first of the stages of a run at which the method learns and is measured."""
        return 0

    def trains_like(self, other: Method) -> bool:
        """Whether training on the same samples ends in the same network: then `learn_task_from` does without it."""
        return False

    def learn_task_from(self, other: Method, task: Task, samples: Samples) -> None:
        """Learn a task without training, from a method with equal training that has just learned the same samples."""
        raise NotImplementedError

    def stored_vectors(self) -> tuple[Tensor, Tensor] | None:
        """Stored features of images under the plain encoder, `[n, dim]`, and their classes; None without any."""
        return None

    def class_directions(self) -> Tensor | None:
        """A mean of unit encoder features for every class, `[classes, dim]`, if the method keeps them; else None."""
        return None

    def left_out(self) -> LeftOut | None:
        """What leave-one-out says of images of all classes, old and new; None for a method that cannot do it."""
        return None

    def measure(self, held: Samples) -> Tensor:
        """log P(class | image) of the newest task's held-out images, as for images that were never seen."""
        return self.answer(held.pixels).log_p

    def hold_out(self, held: Samples) -> None:  # noqa: B027 (most methods do not use them)
        """Use images held out of the newest task's training, e.g. to calibrate unknown scores."""

    def forward(self, pixels: Tensor, want: Collection[str] = (), before: Any = None) -> Any:
        """Outputs of the networks for uint8 images: the expensive part of a prediction, for `decide`.

        `before` is the result of an earlier call with KEEP for the same images, of this method or of one whose forward
        it shares; outputs that no later task can change are not computed again.
        """
        return pixels

    def blank_pass(self, want: Collection[str] = (), warm: bool = True) -> Any:
        """`forward` of a blank image, to try out what was stored.

        If the network need not be `warm` afterwards, a method may return something as good that costs less.
        """
        return self.forward(torch.zeros(1, 3, self.preprocess.height, self.preprocess.width, dtype=torch.uint8), want)

    def decide(self, passes: Sequence[Any], want: Collection[str] = ()) -> Answers:
        """Predictions from the results of `forward` for one or several groups of images, which are joined."""
        return Answers(torch.cat([self.log_probabilities(pixels) for pixels in passes]))

    def parts(self, passes: Sequence[Any], answers: Answers) -> dict[str, Tensor]:
        """log P(class | image) by each part of a prediction alone, by the part's name; empty for a single part.

        `answers` are those of `decide` for the same `passes`, which were made with KEEP.
        """
        return {}

    def shares_forward(self, other: Method) -> bool:
        """Whether `forward` of another method returns the same as this method's for the same images."""
        return False

    def task_features(self, pixels: Tensor, task: int) -> Tensor | None:
        """Features of uint8 images under one task's model, `[n, dim]`; None without task models."""
        return None

    def memory_features(self, task: int) -> Tensor | None:
        """Features of the memory's images under one task's model, `[images, dim]`; None where they are not kept."""
        return None

    def rejection_floor(self) -> float:
        """The smallest share of known images at which any image can be rejected as unknown; 1: none can.

        A method with an unknown score defines it; 1 then means that there are too few images to compare with.
        """
        return 1.0

    @property
    def has_unknown_score(self) -> bool:
        """Whether `decide` computes an unknown score; such a method says from which share on it can reject."""
        return type(self).rejection_floor is not Method.rejection_floor

    def check_unknown_score(self) -> None:
        """Refuse to look for unknown images by a method that has no unknown score."""
        if not self.has_unknown_score:
            raise TplError(f"'{self.name}' has no unknown score; tpl, tpl-plus and closed-form have one.")

    def weighting(self) -> dict[str, Any] | None:
        """The weights of the parts of a prediction, and how they were chosen; None for a single part."""
        return None

    def covariance_estimators(self) -> list[str] | None:
        """How each task's covariance was estimated, e.g. none or oas; None for a method without covariances."""
        return None

    def capacity(self) -> dict[str, float] | None:
        """How full the network is: shares of units in use and of weights frozen; None if it cannot fill up."""
        return None

    def update_classes(self, task: Task, samples: Samples, held: Samples) -> None:
        """Learn from more images of known classes."""
        raise TplError(
            f"The method '{self.name}' cannot learn from more images of known classes; tpl can. "
            "Or learn them in a new model, with all images of the class."
        )

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Drop class `own` of a task, the `number`-th of all; `task_classes_` is already without it."""
        raise TplError(f"The method '{self.name}' cannot remove a class.")

    def parameters(self) -> int:
        """Number of stored parameters: the network and everything a task keeps, without the memory.

        The scatter behind a whitening matrix is redundant, and held-out images only serve to calibrate.
        """
        return self.size()[0]

    def network_bytes(self) -> int:
        """Size of these parameters, each in the precision that it is stored in."""
        return self.size()[1]

    def size(self) -> tuple[int, int]:
        """`parameters` and `network_bytes` from one look at the state, which may take long to collect."""
        state = self.state()
        parts = [part.items() for part in (state.shared, *state.tasks)]
        kept = [tensor for part in parts for name, tensor in part if not name.startswith(NOT_COUNTED)]
        counted = [*self.encoder.parameters(), *kept]
        return sum(tensor.numel() for tensor in counted), sum(tensor.nbytes for tensor in counted)

    # What every method inherits

    @property
    def memory_budget(self) -> int:
        """Number of images the memory may store."""
        return getattr(self.config, "memory", 0)

    def set_options(self, **changes: Any) -> None:
        """Change options for later tasks; networks and masks do not change."""
        self.config = self.config.replace(**changes)
        if self.memory is not None and "memory" in changes:
            self.memory.budget = self.memory_budget

    def answer(self, pixels: Tensor, want: Collection[str] = ()) -> Answers:
        """Predictions for uint8 images in the encoder's size; `want` names what is needed beside probabilities.

        Python, the command line, the server, benchmarks and export all predict by this method.
        """
        return self.decide([self.forward(pixels, want)], want)

    @property
    def memory_bytes(self) -> int:
        """Size of what is stored of old images: those in the memory, what belongs to them, or statistics instead."""
        return self.memory.bytes_used if self.memory is not None else 0

    @property
    def classes_(self) -> list[str]:
        """All classes learned, in the order of arrival."""
        return [c for classes in self.task_classes_ for c in classes]

    @cached_property
    def encoder_features(self) -> Callable[[Tensor], Tensor]:
        """The frozen encoder's own features of uint8 images: no task changes them."""
        return Inference(partial(self.encoder.plain, dtype=self.compute.dtype), self.compute, self.normalise)

    def encode(
        self, samples: Samples, callback: Callback, features: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """The encoder's own features of a task's images, or others `features`; the callback hears how far it has come.

        Without training, most of the time is spent here.
        """
        found = []
        for part in samples.pixels.split(BLOCK):
            found.append((features or self.encoder_features)(part))
            callback(Event("encode", {"done": len(part), "images": len(samples)}))
        return torch.cat(found)

    @cached_property
    def adapted_features(self) -> Inference:
        """Features of uint8 images under given norms and adapter weights."""
        return Inference(unstacked(self.encoder, self.compute.dtype), self.compute, self.normalise)

    def learn(self, task: Task, callback: Callback = no_callback, held: Samples | None = None) -> None:
        """Learn one more task, or stay unchanged if that fails or is interrupted.

        The task's classes must be new (a cumulative method starts over instead). `held` are images of them that are not
        trained on.
        """
        with self.learning(task, callback, held) as samples:
            self.learn_task(task, samples, callback)

    def update(self, task: Task, held: Samples, callback: Callback = no_callback) -> None:
        """Learn from more images of known classes, or stay unchanged if that fails or is interrupted."""
        callback(Event("task", {"task": task.name, "classes": list(task.classes), "images": len(task.train)}))
        samples = self.samples(task, callback)
        with self.attempt():
            self.update_classes(task, samples, held)

    @property
    def can_update(self) -> bool:
        """Whether it learns from more images of known classes."""
        return type(self).update_classes is not Method.update_classes

    def remove(self, name: str) -> None:
        """Forget one class; with its last class a task is removed."""
        task, own = self.place_of(name)
        if len(self.classes_) == 1:
            raise TplError(f"'{name}' is the only class; a model needs at least one. Delete the model instead.")
        number = self.classes_.index(name)
        left = [tuple(c for c in classes if c != name) for classes in self.task_classes_]
        with self.attempt():
            self.task_classes_ = [classes for classes in left if classes]
            self.remove_class(task, own, number)
        self.removed_tasks += len(left) - len(self.task_classes_)

    def rename(self, old: str, new: str) -> None:
        """Rename a class."""
        self.place_of(old)
        if not new.strip():
            raise TplError(f"The new name of '{old}' is empty.")
        if new != old and new in self.classes_:
            raise TplError(f"There is a class '{new}' already; class names must be unique.")
        self.task_classes_ = [tuple(new if c == old else c for c in classes) for classes in self.task_classes_]

    def place_of(self, name: str) -> tuple[int, int]:
        """The index of a class's task, and the class's index within that task."""
        for task, classes in enumerate(self.task_classes_):
            if name in classes:
                return task, classes.index(name)
        known = ", ".join(self.classes_[:20]) + (", ..." if len(self.classes_) > 20 else "")
        raise TplError(f"There is no class '{name}'; there are {known or 'none yet'}.")

    def numbers_of(self, task: Task, samples: Samples) -> Tensor:
        """Class numbers, among all classes, of samples of a task whose classes are known already."""
        numbers = [self.classes_.index(name) for name in task.classes]
        return torch.tensor(numbers, device=samples.labels.device)[samples.labels]

    @contextmanager
    def learning(self, task: Task, callback: Callback, held: Samples | None = None) -> Iterator[Samples]:
        """A context in which a task is learned from the samples it yields; on an error everything is restored.

        At the end `hold_out` gets the `held` images.
        """
        known = set() if self.cumulative else set(self.classes_) & set(task.classes)
        if known:
            raise TplError(f"Already learned: {', '.join(sorted(known))}. A task must have new classes only.")
        counts = np.bincount(np.asarray(task.train.labels), minlength=len(task.classes))
        empty = [name for name, count in zip(task.classes, counts, strict=True) if count == 0]
        if empty:
            raise TplError(f"No training images for {', '.join(empty)}; leave the class out or add images.")
        callback(Event("task", {"task": task.name, "classes": list(task.classes), "images": len(task.train)}))
        samples = self.samples(task, callback)
        with self.attempt():
            if self.cumulative:
                self.task_classes_ = []
            yield samples
            self.task_classes_ = [*self.task_classes_, task.classes]
            if held is not None and len(held):
                self.hold_out(held)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """A context that restores the method on an error."""
        before = self._snapshot()
        try:
            yield
        except BaseException:
            self._restore(before)
            raise

    def snapshot(self) -> State:
        """What `load_state` needs to undo a change: a copy, except of tensors that no change writes to."""
        state = self.state()
        return State(cloned(state.shared), [cloned(own) for own in state.tasks])

    def _snapshot(self) -> tuple[State, list[tuple[str, ...]], list[list[bytes]]]:
        exemplars = [list(images) for images in self.memory.exemplars] if self.memory is not None else []
        return self.snapshot(), self.task_classes_, exemplars

    def _restore(self, snapshot: tuple[State, list[tuple[str, ...]], list[list[bytes]]]) -> None:
        state, self.task_classes_, exemplars = snapshot
        if self.memory is not None:
            self.memory.restore(exemplars)
        self.load_state(state)

    def samples(self, task: Task, callback: Callback) -> Samples:
        """The task's training images, decoded and resized once, on the compute device if they fit."""
        return self.samples_of(task.train, callback)

    def samples_of(self, images: ImageSet, callback: Callback) -> Samples:
        """Any labelled images, decoded and resized once, on the compute device if they fit."""
        count, device = len(images), self.compute.device
        fits = self.compute.room_for(count * self.preprocess.bytes_per_image)
        pixels = self.preprocess.batch(
            images,
            lambda n: callback(Event("prepare", {"done": n, "images": count})),
            device if fits else None,
        )
        labels = torch.tensor(np.asarray(images.labels), dtype=torch.long)
        return Samples(pixels, labels.to(self.compute.device))

    def generator(self, purpose: str, task: int | None = None) -> torch.Generator:
        """A generator seeded by the method's seed, the task's number and the purpose alone.

        So an interrupted and resumed run draws the same numbers as an uninterrupted one.
        """
        return seeded(self.seed, len(self.task_classes_) + self.removed_tasks if task is None else task, purpose)


def seeded(seed: int, number: int, purpose: str) -> torch.Generator:
    """A generator seeded by these three values alone."""
    mixed = np.random.SeedSequence([seed, number, zlib.crc32(purpose.encode())])
    return torch.Generator().manual_seed(int(mixed.generate_state(1, np.uint64)[0] >> 1))


def task_of_class(task_classes: Sequence[Sequence[str]]) -> Tensor:
    """The number of each class's task."""
    return owners([len(classes) for classes in task_classes])


def owners(sizes: Sequence[int]) -> Tensor:
    """The group number of every element of consecutive groups: 0 `sizes[0]` times, then 1 `sizes[1]` times, ..."""
    return torch.tensor([t for t, size in enumerate(sizes) for _ in range(size)], dtype=torch.long)


def cloned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy of named tensors."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


METHODS: dict[str, type[Method]] = {}


def register(method: type[Method]) -> type[Method]:
    """Add a method to `METHODS`; a class decorator."""
    METHODS[method.name] = method
    return method


def load_methods() -> dict[str, type[Method]]:
    """All methods by name: every module of this package is imported, and registers its own."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{module.name}")
    return METHODS


def find_method(name: str) -> type[Method]:
    """A method by name, or an error that lists them all; only the file that states this name is imported."""
    for file in Path(__file__).parent.glob("*.py") if name not in METHODS else ():
        if f'name = "{name}"' in file.read_text(encoding="utf-8"):
            importlib.import_module(f"{__package__}.{file.stem}")
    if name not in METHODS:
        refuse_unknown("method", name, sorted(load_methods()))
    return METHODS[name]
