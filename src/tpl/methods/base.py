"""The contract of a method: a way of learning a stream of tasks.

A method is one file in this folder: a `Config` and a `Method` with `@register`. It then shows in
`tpl list`, runs in benchmarks, and inherits the common checks in `tests/common_checks.py`.
"""

from __future__ import annotations

import importlib
import pkgutil
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tpl.config import Config
from tpl.engine import Callback, Compute, Event, Inference, Samples, no_callback
from tpl.errors import TplError
from tpl.memory import Memory
from tpl.names import refuse_unknown
from tpl.nets import Encoder, unstacked
from tpl.state import State
from tpl.stream import ImageSet, Preprocess, Task

NOT_COUNTED = ("memory.", "held.", "score.scatter_")
WORTH_COMPILING = 128  # pixels: networks for smaller images run fast enough as they are, unless compile=on


# What can be wanted of an answer beside the probabilities; KEEP: that `forward` sees all that a later stage may need.
UNKNOWN, KEEP = "unknown", "keep"


@dataclass(frozen=True)
class Answers:
    """What a method says of a batch of images; None stands for what was not wanted or what the method does not have."""

    log_p: Tensor  # log P(class | image), [n, classes], float64; rows sum to 1
    scores: Tensor | None = None  # how much each task claims each image, [n, tasks]; -inf where it was not computed
    unknown: Tensor | None = None  # how little each image looks like any class learned, [n] in [0, 1]
    passes: Tensor | None = None  # passes through task models for each image, [n]


class Method(ABC):
    """Learns tasks one by one and tells all their classes apart."""

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str] = ""
    keeps: ClassVar[str] = ""  # what is stored for later tasks, beside the network
    cost: ClassVar[str] = ""  # of training and of an answer, in passes through the trunk
    config_class: ClassVar[type[Config]]
    from_scratch: ClassVar[bool] = False  # whether it can also train an encoder that has no pre-trained trunk
    cumulative: ClassVar[bool] = False  # True: wants all data so far at every stage (an upper bound)
    own_rate: ClassVar[bool] = False  # its optimiser is not SGD: a benchmark's learning rate is not meant for it
    splits: ClassVar[bool] = False  # whether several processes can share its batches: see `check_splits`
    has_task_models: ClassVar[bool] = False  # whether every task has a model of its own

    memory: Memory | None = None

    def __init__(self, encoder: Encoder, config: Any, compute: Compute, seed: int = 0) -> None:
        self._refuse_untrained(encoder)
        self.encoder = encoder.to(compute.device)
        self.config, self.compute, self.seed = config, compute, seed
        self.preprocess = Preprocess(encoder.data_config)
        self.normalise = self.preprocess.normaliser(compute.device, compute.dtype)
        if compute.compiled and (compute.small_too or self.preprocess.height >= WORTH_COMPILING):
            encoder.fuse()
            self.normalise = torch.compile(self.normalise)
        self.task_classes_: list[tuple[str, ...]] = []
        self.removed_tasks = 0  # tasks that lost all their classes; their random numbers are not drawn again

    def _refuse_untrained(self, encoder: Encoder) -> None:
        if not encoder.pretrained and not self.from_scratch:
            able = ", ".join(sorted(name for name, method in load_methods().items() if method.from_scratch))
            raise TplError(
                f"The method '{self.name}' stands on a pre-trained encoder; '{encoder.name}' is trained from scratch, "
                f"by {able}."
            )

    def check_square(self, turning: str) -> None:
        """Refuse an encoder whose images are not square, as they must be for what turns them."""
        if self.preprocess.height != self.preprocess.width:
            raise TplError(
                f"{turning} turns images; '{self.encoder.name}' takes none that are square. Choose another encoder."
            )

    def check_splits(self) -> None:
        """Refuse to be trained by several processes that share every batch, unless they end where one would.

        A loss can be split if it is a mean over rows, or a sum of means over new rows and over replayed ones, and of
        terms that no row enters. Such a method says `splits = True`.
        """
        if not self.splits:
            able = ", ".join(sorted(name for name, method in load_methods().items() if method.splits))
            raise TplError(
                f"The method '{self.name}' cannot be trained by several processes: it has no training steps, or looks "
                f"at a batch as a whole. These can: {able}. Or start one process."
            )
        if self.encoder.batch_norms:
            raise TplError(
                f"Batch norms look at a whole batch, so several processes cannot share one with '{self.encoder.name}'. "
                "Start one process, or take an encoder with layer norms (compact, a ViT or DeiT)."
            )

    # What a method must say

    @abstractmethod
    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Learn one task; `samples` are its training images as the encoder takes them."""

    @abstractmethod
    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """log P(class | image) over all classes seen, `[n, classes]`, float64, rows sum to 1.

        `pixels` are uint8 images in the encoder's size. An answer never depends on the rest of the batch.
        """

    @abstractmethod
    def state(self) -> State:
        """All that was learned."""

    @abstractmethod
    def load_state(self, state: State) -> None:
        """Take up what `state` gave. `task_classes_` and the memory are already in place."""

    # What a method may say

    def hold_out(self, held: Samples) -> None:  # noqa: B027 (most methods have no use for them)
        """Note what the newest task's model says of images held out of its training, where that is of use."""

    def forward(self, pixels: Tensor, want: Collection[str] = (), before: Any = None) -> Any:
        """What the networks say of uint8 images: the part of an answer that takes time, for `decide`.

        `before` is what an earlier call that wanted KEEP gave for the same images, of this method or of one whose
        forward it shares; what no later task can change is not computed again.
        """
        return pixels

    def decide(self, seen: Sequence[Any], want: Collection[str] = ()) -> Answers:
        """The answer, from what `forward` gave for one or several groups of images, which are joined."""
        return Answers(torch.cat([self.log_probabilities(pixels) for pixels in seen]))

    def shares_forward(self, other: Method) -> bool:
        """Whether `forward` of another method gives what this method's would for the same images."""
        return False

    def task_features(self, pixels: Tensor, task: int) -> Tensor | None:
        """Features of uint8 images under one task's model, `[n, dim]`; None without task models."""
        return None

    def memory_features(self, task: int) -> Tensor | None:
        """Features of the memory's images under one task's model, `[images, dim]`; None where they are not kept."""
        return None

    def rejection_floor(self) -> float:
        """The smallest share of known images at which any image can be rejected as unknown; 1: it never can."""
        return 1.0

    def weighting(self) -> dict[str, Any] | None:
        """How far each part of an answer counts, and by what that was chosen; None if there is one part alone."""
        return None

    def capacity(self) -> dict[str, float] | None:
        """How full the network is: shares of units in use and of weights frozen; None if it cannot fill up."""
        return None

    def update_classes(self, task: Task, samples: Samples, held: Samples) -> None:
        """Take up more images of known classes."""
        raise TplError(
            f"The method '{self.name}' cannot take up more images of classes it knows; tpl can. "
            "Or learn them in a new model, with all images of the class."
        )

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Drop class `own` of a task, the `number`-th of all; `task_classes_` is already without it."""
        raise TplError(f"The method '{self.name}' cannot remove a class.")

    def parameters(self) -> int:
        """Size of the network with everything a task keeps, in numbers, without the memory or what it derives.

        The scatter behind a whitening matrix says the same once more, and held-out images only serve to judge.
        """
        trunk = sum(p.numel() for p in self.encoder.parameters())
        state = self.state()
        kept = [(k, t) for part in (state.shared, *state.tasks) for k, t in part.items()]
        return trunk + sum(t.numel() for k, t in kept if not k.startswith(NOT_COUNTED))

    # What every method gets

    def answer(self, pixels: Tensor, want: Collection[str] = ()) -> Answers:
        """All that is said of uint8 images in the encoder's size; `want` names more than probabilities.

        This is the one road to an answer: for Python, the command line, the server, benchmarks and export.
        """
        return self.decide([self.forward(pixels, want)], want)

    @property
    def memory_bytes(self) -> int:
        """Size of what is kept of old images, beside the network: the memory's images, or what stands in for them."""
        return self.memory.bytes_used if self.memory is not None else 0

    @property
    def classes_(self) -> list[str]:
        """All classes seen, in the order of arrival."""
        return [c for classes in self.task_classes_ for c in classes]

    @cached_property
    def encoder_features(self) -> Inference:
        """The frozen encoder's own features of uint8 images: no task changes them."""
        return Inference(partial(self.encoder.plain, dtype=self.compute.dtype), self.compute, self.normalise)

    @cached_property
    def adapted_features(self) -> Inference:
        """Features of uint8 images under given norms and adapter weights."""
        return Inference(unstacked(self.encoder, self.compute.dtype), self.compute, self.normalise)

    def learn(self, task: Task, callback: Callback = no_callback, held: Samples | None = None) -> None:
        """Learn one more task, or stay as before if that fails or is interrupted.

        The task's classes must be new (a cumulative method starts afresh instead). `held` are images of them that are
        not trained on.
        """
        with self.learning(task, callback, held) as samples:
            self.learn_task(task, samples, callback)

    def update(self, task: Task, held: Samples, callback: Callback = no_callback) -> None:
        """Take up more images of known classes, or stay as before if that fails or is interrupted."""
        callback(Event("task", {"task": task.name, "classes": list(task.classes), "images": len(task.train)}))
        samples = self.samples(task, callback)
        with self._attempt():
            self.update_classes(task, samples, held)

    def remove(self, name: str) -> None:
        """Forget one class; the last class of a task takes the task with it."""
        task, own = self.place_of(name)
        if len(self.classes_) == 1:
            raise TplError(f"'{name}' is the only class; a model needs at least one. Delete the model instead.")
        number = self.classes_.index(name)
        left = [tuple(c for c in classes if c != name) for classes in self.task_classes_]
        with self._attempt():
            self.task_classes_ = [classes for classes in left if classes]
            self.remove_class(task, own, number)
        self.removed_tasks += len(left) - len(self.task_classes_)

    def rename(self, old: str, new: str) -> None:
        """Give a class another name."""
        self.place_of(old)
        if not new.strip():
            raise TplError(f"The new name of '{old}' is empty.")
        if new != old and new in self.classes_:
            raise TplError(f"There is a class '{new}' already; class names must be unique.")
        self.task_classes_ = [tuple(new if c == old else c for c in classes) for classes in self.task_classes_]

    def place_of(self, name: str) -> tuple[int, int]:
        """The number of a class's task, and its own number within that."""
        for task, classes in enumerate(self.task_classes_):
            if name in classes:
                return task, classes.index(name)
        known = ", ".join(self.classes_[:20]) + (", ..." if len(self.classes_) > 20 else "")
        raise TplError(f"There is no class '{name}'; there are {known or 'none yet'}.")

    def numbers_of(self, task: Task, samples: Samples) -> Tensor:
        """The numbers, among all classes, of samples of a task whose classes are known already."""
        numbers = [self.classes_.index(name) for name in task.classes]
        return torch.tensor(numbers, device=samples.labels.device)[samples.labels]

    @contextmanager
    def learning(self, task: Task, callback: Callback, held: Samples | None = None) -> Iterator[Samples]:
        """Check a task and hand over its samples; afterwards it counts as learned, or nothing has happened.

        The last of it is to note what the new model says of the `held` images.
        """
        known = set() if self.cumulative else set(self.classes_) & set(task.classes)
        if known:
            raise TplError(f"Already learned: {', '.join(sorted(known))}. A task must bring new classes only.")
        counts = np.bincount(np.asarray(task.train.labels), minlength=len(task.classes))
        empty = [name for name, count in zip(task.classes, counts, strict=True) if count == 0]
        if empty:
            raise TplError(f"No training images for {', '.join(empty)}; leave the class out or add images.")
        callback(Event("task", {"task": task.name, "classes": list(task.classes), "images": len(task.train)}))
        samples = self.samples(task, callback)
        with self._attempt():
            if self.cumulative:
                self.task_classes_ = []
            yield samples
            self.task_classes_ = [*self.task_classes_, task.classes]
            if held is not None and len(held):
                self.hold_out(held)

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """All that happens inside, or nothing of it."""
        before = self._snapshot()
        try:
            yield
        except BaseException:
            self._restore(before)
            raise

    def _snapshot(self) -> tuple[State, list[tuple[str, ...]], list[list[bytes]]]:
        state = self.state()
        copy = State(*(_cloned(part) for part in (state.shared, state.tasks)))
        exemplars = [list(images) for images in self.memory.exemplars] if self.memory is not None else []
        return copy, self.task_classes_, exemplars

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
        """Random numbers that depend on the seed, the task's number and the purpose, on nothing else.

        So a run that was interrupted and resumed draws the same numbers as one that was not.
        """
        return seeded(self.seed, len(self.task_classes_) + self.removed_tasks if task is None else task, purpose)


def seeded(seed: int, number: int, purpose: str) -> torch.Generator:
    """Random numbers that depend on these three alone."""
    mixed = np.random.SeedSequence([seed, number, zlib.crc32(purpose.encode())])
    return torch.Generator().manual_seed(int(mixed.generate_state(1, np.uint64)[0] >> 1))


def task_of_class(task_classes: Sequence[Sequence[str]]) -> Tensor:
    """The number of the task that brought each class."""
    return owners([len(classes) for classes in task_classes])


def owners(sizes: Sequence[int]) -> Tensor:
    """0 as often as the first size says, then 1 as often as the second, and so on."""
    return torch.tensor([t for t, size in enumerate(sizes) for _ in range(size)], dtype=torch.long)


def _cloned(part: Any) -> Any:
    """Nested lists and dicts of tensors, with copies of the tensors."""
    if isinstance(part, list):
        return [_cloned(entry) for entry in part]
    return {name: tensor.clone() for name, tensor in part.items()}


METHODS: dict[str, type[Method]] = {}


def register(method: type[Method]) -> type[Method]:
    """Make a method known by its name."""
    METHODS[method.name] = method
    return method


def load_methods() -> dict[str, type[Method]]:
    """All methods: every module in this package registers its own."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{module.name}")
    return METHODS


def find_method(name: str) -> type[Method]:
    """A method by name, or an error that lists them all."""
    methods = load_methods()
    refuse_unknown("method", name, sorted(methods))
    return methods[name]
