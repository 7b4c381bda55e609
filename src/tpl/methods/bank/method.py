"""The base of the TIL+OOD family: TPL, MORE, ROW, HAT and SupSup.

A family method has a bank of task models, a memory of images, and every task model's outputs on the memory. To learn a
task it trains one more model, by default with one more class, `others`, for the memory's images of earlier tasks
(Eq. 2). To predict, it runs the task models (`forward`) and combines their outputs (`decide`). The two steps are
separate so that outputs that cannot change are computed once, and serve methods that only combine them differently.
Images held out of training calibrate the detection of unknown images.

A method of the family defines what to do after a task is trained (`conclude`), a score for each task (`task_scores`),
class probabilities (`log_probabilities_of`), and a score for unknown images (`in_distribution_score`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import count, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from tpl.config import option
from tpl.engine import Callback, Compute, Recipe, Samples
from tpl.errors import TplError
from tpl.memory import FEATURE_POLICIES, POLICIES, Memory
from tpl.methods.bank.bank import Bank, Outputs, Query, TaskModel, Technique
from tpl.methods.bank.protect import ProtectConfig
from tpl.methods.bank.training import TrainingJob, run_jobs, same_samples, to_all
from tpl.methods.base import UNKNOWN, Answers, Method, cloned, task_of_class
from tpl.nets import Encoder
from tpl.scores.calibration import smallest_share, unknown_scores
from tpl.store import State, under_prefix
from tpl.stream import Task

ADAPTERS = "adapters."
JOINED = "joined."
ADAPTER_SET, TRAINED_SET = "adapter_set", "trained_set"


@dataclass(frozen=True)
class MemoryConfig(ProtectConfig, Recipe):
    """Options of training, network and replay memory."""

    memory: int = option(2000, "images kept for replay, all classes together", minimum=0, group="memory")
    memory_policy: str = option(
        "random",
        "which images of a class are kept: random (paper), the first (public code), or by features under the task's "
        "model: herding, k-centres, nearest to the border, or of the largest leverage",
        (*POLICIES, *FEATURE_POLICIES),
        group="memory",
    )
    rotation_classes: bool = option(
        False,
        "also train on new images rotated by 90, 180 or 270 degrees, as classes that are never predicted",
        group="augmentation",
    )


class HeldOut(NamedTuple):
    """Features of images that were not trained on, under their own task's model."""

    features: Tensor  # [n, dim]
    labels: Tensor  # [n], the task's own classes
    common: Tensor | None = None  # [n, ...], the method's `held_common`

    def without(self, own: int) -> HeldOut:
        """The images of all classes but one; later classes move up."""
        kept = self.labels != own
        labels = self.labels[kept]
        common = None if self.common is None else self.common[kept]
        return HeldOut(self.features[kept], labels - (labels > own).long(), common)

    def extended(self, more: HeldOut) -> HeldOut:
        """These and more images; `common` is dropped if either does not have it."""
        if not len(self.labels):
            return more
        common = None if self.common is None or more.common is None else torch.cat([self.common, more.common])
        return HeldOut(torch.cat([self.features, more.features]), torch.cat([self.labels, more.labels]), common)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are present, by name."""
        return {name: tensor for name, tensor in self._asdict().items() if tensor is not None}


@dataclass(frozen=True)
class ForwardPass:
    """Outputs of the task models for some images."""

    outputs: list[Outputs]  # one entry a task: for all images, or for those the task was queried with
    common: Tensor | None = None  # [n, ...], the method's `common_features`
    queried: Tensor | None = None  # [n, tasks], which tasks were queried with each image; None: all with every image
    by: Method | None = None  # the method whose `common` it is

    def cpu(self) -> ForwardPass:
        """A copy in the CPU's memory."""
        outputs = [Outputs(*(column.cpu() for column in each)) for each in self.outputs]
        common, queried = (None if part is None else part.cpu() for part in (self.common, self.queried))
        return ForwardPass(outputs, common, queried, self.by)

    @classmethod
    def joined(cls, parts: Sequence[ForwardPass]) -> ForwardPass:
        """The outputs for several groups of images, joined."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(part.outputs for part in parts), strict=True)
        outputs = [Outputs(*(torch.cat(column) for column in zip(*each, strict=True))) for each in columns]
        common, queried = (_concatenated([getattr(part, name) for part in parts]) for name in ("common", "queried"))
        return cls(outputs, common, queried, parts[0].by)


def _concatenated(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


class BankMethod(Method):
    """A method that runs task models and combines their outputs."""

    has_task_models = True
    config: MemoryConfig
    memory: Memory

    def __init__(
        self,
        encoder: Encoder,
        config: MemoryConfig,
        compute: Compute,
        seed: int = 0,
        technique: type[Technique] = Technique,
    ) -> None:
        super().__init__(encoder, config, compute, seed)
        if config.rotation_classes:
            self.check_square("rotation_classes=true")
        self.memory = self.new_memory()
        self.bank = Bank(self.encoder, config, compute, self.normalise, self.generator("adapters"), technique)
        self.held_: list[HeldOut] = []  # one entry a task; empty where nothing was held out
        self._held_scores: list[Tensor] | None = None  # their in_distribution_score, sorted; computed on demand
        self.memory_outputs_: list[Outputs] = []  # outputs on the memory's images, one entry a task

    def check_splits(self) -> None:
        """Refuse training by several processes unless method and training technique both allow it."""
        super().check_splits()
        if not self.bank.technique.splits:
            raise TplError(
                f"technique={self.bank.technique.name} needs the whole batch, so several processes cannot share one. "
                "Start one process, or choose another technique."
            )

    def new_memory(self) -> Memory:
        """The memory before the first task."""
        return Memory(self.memory_budget, self.config.memory_policy, self.seed)

    @abstractmethod
    def conclude(self, task: Task, samples: Samples) -> None:
        """Store what later stages need of a task whose model was just trained: its data will not be available again."""

    @abstractmethod
    def task_scores(self, outputs: list[Outputs], common: Tensor | None = None) -> Tensor:
        """A score of every task for every image, `[n, tasks]`; `common` are the `common_features`, if any."""

    @abstractmethod
    def log_probabilities_of(
        self, outputs: list[Outputs], scores: Tensor | None = None, common: Tensor | None = None
    ) -> Tensor:
        """log P(class | image) from every task's outputs.

        `scores` are their task scores if already computed, `common` the `common_features` of a method that has any.
        """

    @abstractmethod
    def in_distribution_score(self, task: int, outputs: Outputs) -> Tensor:
        """How much each image looks like one of the task's, `[n]`; later tasks must not change it."""

    # Learning

    @contextmanager
    def learning(self, task: Task, callback: Callback, held: Samples | None = None) -> Iterator[Samples]:
        """The context of `Method`; training, and all that is computed on the same images then, share their tokens."""
        with super().learning(task, callback, held) as samples, self.bank.sharing(samples.pixels):
            yield samples

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Train the task's model, then call `conclude`."""
        run_jobs([self.training_job(task, samples, callback)])
        self.conclude(task, samples)

    def training_job(self, task: Task, samples: Samples, callback: Callback) -> TrainingJob:
        """The job that trains a task: its own classes, and one more, `others`, for replayed images."""
        own = len(task.classes)
        replay = self.replay_samples(own)
        outputs = own + (replay is not None)
        return self.new_job(samples, replay, own, outputs, callback)

    def new_job(
        self, samples: Samples, replay: Samples | None, own: int, outputs: int, callback: Callback
    ) -> TrainingJob:
        """A job for the bank by this method's own recipe."""
        self.bank.make_room(callback)
        training, rotations = self.generator("training"), self.config.rotation_classes
        return TrainingJob(self.bank, samples, replay, own, outputs, self.config, training, callback, rotations)

    # Predictions

    @property
    def outputs_are_final(self) -> bool:
        """Whether a finished task's outputs never change."""
        return self.bank.protection.final

    def common_features(self, pixels: Tensor) -> Tensor | None:
        """Features that do not come from task models and that no task changes; None if the method uses none."""
        return None

    def capacity(self) -> dict[str, float] | None:
        """How full the network is."""
        return self.bank.capacity()

    def task_features(self, pixels: Tensor, task: int) -> Tensor:
        """Features of images under one task's model."""
        return self.bank.outputs(pixels, task).features

    @cached_property
    def encoder_features(self) -> Callable[[Tensor], Tensor]:
        """The frozen encoder's own features; blocks below the adapted ones are computed with those of queries."""
        return self.bank.encoder_features if self.bank.below else super().encoder_features

    def query(self, pixels: Tensor, queries: Sequence[Query]) -> list[Outputs]:
        """Features and logits of some tasks, each for the images it is queried with."""
        return self.bank.query(pixels, queries)

    def outputs_of(self, task: int, pixels: Tensor) -> Outputs:
        """One task's features and logits."""
        return self.query(pixels, [Query(task)])[0]

    def outputs(self, pixels: Tensor, known: list[Outputs] | None = None) -> list[Outputs]:
        """Every task's features and logits; those already `known` are not computed again."""
        known = known or []
        missing = [Query(t) for t in range(len(known), len(self.bank.tasks))]
        return known + self.query(pixels, missing) if missing else known

    def forward(self, pixels: Tensor, want: Collection[str] = (), before: ForwardPass | None = None) -> ForwardPass:
        """Every task's features and logits, and the method's `common_features`."""
        with self.bank.sharing(pixels):
            return ForwardPass(self.outputs(pixels, self._reusable(before)), self._common(pixels, before), by=self)

    def _common(self, pixels: Tensor, before: ForwardPass | None) -> Tensor | None:
        """The `common_features`, reused from an earlier pass of this method."""
        return before.common if before is not None and before.by is self else self.common_features(pixels)

    def _reusable(self, before: ForwardPass | None) -> list[Outputs]:
        """Outputs of an earlier pass that are still valid: all, unless a new task has changed them."""
        if before is None or (not self.outputs_are_final and len(before.outputs) < len(self.bank.tasks)):
            return []
        return before.outputs

    def decide(
        self, passes: Sequence[ForwardPass], want: Collection[str] = (), scores: Tensor | None = None
    ) -> Answers:
        """Task scores and class probabilities from all tasks' outputs; `scores`, if given, are not computed again."""
        joined = ForwardPass.joined(passes)
        scores = self.task_scores(joined.outputs, joined.common) if scores is None else scores
        log_p = self.log_probabilities_of(joined.outputs, scores, joined.common)
        unknown = self.unknown_scores_of(joined.outputs) if UNKNOWN in want else None
        count = torch.full_like(log_p[:, 0], len(self.bank.tasks) * len(self.bank.views), dtype=torch.long)
        return Answers(log_p, scores, unknown, count)

    def shares_forward(self, other: Method) -> bool:
        """Whether this bank is a copy of the other's, and neither method changes how it is queried."""
        return (
            isinstance(other, BankMethod)
            and other.bank is self.bank.same_as
            and self.outputs_are_final
            and all(type(method).query is BankMethod.query for method in (self, other))
            and self.bank.views == other.bank.views
        )

    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """log P(class | image), `[n, classes]`."""
        return self.answer(pixels).log_p

    # Images held out of training, and the detection of unknown ones

    def hold_out(self, held: Samples) -> None:
        """Keep the features of the newest task's held-out images."""
        with self.bank.sharing(held.pixels):
            self._extend_held_out(len(self.bank.tasks) - 1, held)

    def _extend_held_out(self, task: int, held: Samples) -> None:
        features, before = self.bank.outputs(held.pixels, task).features, self.held_[task]
        more = HeldOut(features, held.labels.to(before.labels.device), self.held_common(held.pixels))
        self.held_[task] = before.extended(more)
        self._held_scores = None

    def held_common(self, pixels: Tensor) -> Tensor | None:
        """Stored features that decide which tasks are queried with a held-out image; None if all tasks always are."""
        return None

    def held_out_scores(self, task: int) -> Tensor:
        """In-distribution scores of a task's held-out images under its own model, sorted."""
        features = self.held_[task].features
        return self.in_distribution_score(task, Outputs(features, self.bank.logits(features, task))).sort().values

    def held_scores(self) -> list[Tensor]:
        """`held_out_scores` of every task, computed once."""
        if self._held_scores is None:
            self._held_scores = [self.held_out_scores(t) for t in range(len(self.bank.tasks))]
        return self._held_scores

    def unknown_scores_of(self, outputs: list[Outputs]) -> Tensor:
        """1 - the largest conformal p-value of any task, from every task's outputs."""
        return unknown_scores(
            [self.in_distribution_score(t, each) for t, each in enumerate(outputs)], self.held_scores()
        )

    def rejection_floor(self) -> float:
        """The smallest share of known images at which any image can be rejected at all."""
        return smallest_share(self.held_scores())

    # The memory

    def outputs_of_newest(self, samples: Samples) -> Outputs:
        """Outputs of the model that was just trained, for its training images."""
        outputs = self.bank.outputs(samples.pixels, len(self.bank.tasks) - 1)
        if not bool(outputs.features.isfinite().all()):
            raise TplError("Training ended with features that are not numbers: lower the learning rate (--lr).")
        return outputs

    def remember(self, task: Task, features: Tensor | None = None) -> None:
        """Store some images of a task that was just trained, and compute every task's outputs on the memory.

        `features` are those of its training images, which a memory that chooses by features needs.
        """
        empty = torch.zeros(0, self.encoder.dim, device=self.compute.device)
        self.held_.append(HeldOut(empty, torch.zeros(0, dtype=torch.long, device=self.compute.device)))
        self._held_scores = None
        kept = self.memory.add(task.train, len(task.classes), self.preprocess, self.compute.device, features)
        self._update_memory_outputs(kept)

    def memory_tasks(self, task_classes: list[tuple[str, ...]]) -> Tensor:
        """The task of every image in the memory."""
        return task_of_class(task_classes).to(self.compute.device)[self.memory.labels.to(self.compute.device)]

    def memory_features(self, task: int) -> Tensor | None:
        """Features of the memory's images under one task's model."""
        return self.memory_outputs_[task].features

    def remembered(self) -> tuple[Tensor, Tensor]:
        """The task of every image in the memory, and its class's number within that."""
        numbers, owner = self.memory.labels.to(self.compute.device), self.memory_tasks(self.task_classes_)
        first = torch.tensor([self.classes_.index(names[0]) for names in self.task_classes_], device=numbers.device)
        return owner, numbers - first[owner]

    def replay_samples(self, label: int) -> Samples | None:
        """The memory's images, all with one label; None while it is empty."""
        labels = torch.full((len(self.memory),), label, device=self.compute.device)
        return Samples(self.memory.pixels(self.preprocess, self.compute.device), labels) if len(labels) else None

    def _update_memory_outputs(self, kept: Tensor) -> None:
        """Compute every task's outputs on the memory; `kept` are the rows that stayed, which now come first.

        Where outputs are final, those of old tasks on old exemplars are reused.
        """
        pixels = self.memory.pixels(self.preprocess, self.compute.device)
        self.bank.share_too(pixels)
        if self.outputs_are_final:
            rows, fresh = kept.to(self.compute.device), torch.arange(len(kept), len(pixels))
            added = self.query(pixels, [Query(t, fresh) for t in range(len(self.memory_outputs_))])
            for t, (old, new) in enumerate(zip(self.memory_outputs_, added, strict=True)):
                self.memory_outputs_[t] = Outputs(*(torch.cat([a[rows], b]) for a, b in zip(old, new, strict=True)))
        else:
            self.memory_outputs_ = []
        self.memory_outputs_ = self.outputs(pixels, known=self.memory_outputs_)

    def _rearrange_memory(self, origin: Tensor) -> None:
        """Reorder the outputs on the memory; `origin` is each exemplar's row before the change, -1 if it is new."""
        if not self.outputs_are_final:
            self._update_memory_outputs(origin[:0])
            return
        origin = origin.to(self.compute.device)
        new = origin < 0
        pixels = self.memory.pixels(self.preprocess, self.compute.device)[new]
        for t, outputs in enumerate(self.memory_outputs_):
            moved = Outputs(*(column[origin.clamp_min(0)] for column in outputs))
            if bool(new.any()):
                for column, fresh in zip(moved, self.outputs_of(t, pixels), strict=True):
                    column[new] = fresh
            self.memory_outputs_[t] = moved

    # Storage

    def shared_state(self) -> dict[str, Tensor]:
        """Learned tensors beyond bank and memory, by name."""
        return {}

    def task_state(self, task: int) -> dict[str, Tensor]:
        """Learned tensors of one task beyond its model, by name."""
        return {}

    def load_own_state(self, shared: dict[str, Tensor], tasks: list[dict[str, Tensor]]) -> None:
        """Restore what `shared_state` and `task_state` returned; bank and memory are restored already."""

    def state(self) -> State:
        """Adapters and the memory's features are shared; masks, norms, heads and statistics are a task's own."""
        return self._state(self.bank.adapters.state_dict(), self.shared_state())

    def snapshot(self) -> State:
        """The state with a copy of the adapters: training writes to them, all other tensors are only replaced.

        So the cost of an attempt does not grow with the number of tasks.
        """
        return self._state(cloned(self.bank.adapters.state_dict()), self.shared_snapshot())

    def shared_snapshot(self) -> dict[str, Tensor]:
        """`shared_state` for `snapshot`: in whatever form is there already."""
        return self.shared_state()

    def _state(self, adapters: dict[str, Tensor], more: dict[str, Tensor]) -> State:
        """`adapters` are those of the set that new tasks train."""
        shared: dict[str, Tensor] = {}
        for number, each in enumerate(self.bank.sets):
            tensors = adapters if number == self.bank.trained_set else each.state_dict()
            shared |= {_prefix(number) + k: v.detach() for k, v in tensors.items()}
        if self.bank.trained_set:
            shared[TRAINED_SET] = torch.tensor(self.bank.trained_set)
        for t, outputs in enumerate(self.memory_outputs_):
            shared[f"memory.{t}.features"], shared[f"memory.{t}.logits"] = outputs
        if self.bank.retired is not None:
            shared["retired"] = self.bank.retired
        tasks = []
        for t, (model, held) in enumerate(zip(self.bank.tasks, self.held_, strict=True)):
            own = {k: v.detach() for k, v in model.state_dict().items()} | self.task_state(t)
            if model.adapter_set:
                own[ADAPTER_SET] = torch.tensor(model.adapter_set)
            tasks.append(own | {f"held.{k}": v for k, v in held.tensors().items()})
        return State(shared | more, tasks)

    def load_state(self, state: State) -> None:
        """Restore the bank and the memory's outputs, then the method's own state, without running the encoder."""
        device = self.compute.device
        shared = {k: v.to(device) for k, v in state.shared.items()}
        tasks = [{k: v.to(device) for k, v in own.items()} for own in state.tasks]
        sets = list(takewhile(bool, (under_prefix(_prefix(number), shared) for number in count())))
        self.bank.restart(sets, int(shared.get(TRAINED_SET, 0)), shared.get("retired"))
        self.held_, self.memory_outputs_, self._held_scores = [], [], None
        for t, (own, classes) in enumerate(zip(tasks, self.task_classes_, strict=True)):
            model = TaskModel(len(classes), *(own[k] for k in ("embedding", "norms", "head_weight", "head_bias")))
            model.rotation_classes = self.config.rotation_classes
            model.adapter_set = int(own.get(ADAPTER_SET, 0))
            self.bank.add(model)
            features = own.get("held.features", own["head_weight"][:0])  # early versions had no held-out images
            labels = own.get("held.labels", torch.zeros(0, dtype=torch.long, device=device))
            self.held_.append(HeldOut(features, labels, own.get("held.common")))
            self.memory_outputs_.append(Outputs(*(shared[f"memory.{t}.{k}"] for k in ("features", "logits"))))
        self.load_own_state(shared, tasks)


def _prefix(adapter_set: int) -> str:
    """What the names of a set's tensors begin with in storage."""
    return f"{JOINED}{adapter_set - 1}." if adapter_set else ADAPTERS


def learn_together(
    methods: Sequence[Method],
    tasks: Sequence[Task],
    callbacks: Sequence[Callback],
    held: Sequence[Samples | None] | None = None,
) -> None:
    """Each method learns its task; all of them do, or none if one fails. `held` are images that are not trained on.

    Bank methods with the same encoder, settings and number of images share the passes over the frozen trunk; the result
    is that of learning alone, up to rounding. Other methods learn one after the other, and copy equal trainings.
    """
    held = held or [None] * len(methods)
    if len(methods) == 1:
        methods[0].learn(tasks[0], callbacks[0], held[0])
        return
    with ExitStack() as attempts:
        samples = [
            attempts.enter_context(method.learning(task, callback, apart))
            for method, task, callback, apart in zip(methods, tasks, callbacks, held, strict=True)
        ]
        rows = list(zip(methods, tasks, samples, callbacks, strict=True))
        run_jobs([m.training_job(task, own, callback) for m, task, own, callback in rows if isinstance(m, BankMethod)])
        for method, task, own, _ in rows:
            if isinstance(method, BankMethod):
                method.conclude(task, own)
        _learn_others([row for row in rows if not isinstance(row[0], BankMethod)])


def _learn_others(rows: Sequence[tuple[Method, Task, Samples, Callback]]) -> None:
    """Methods without a bank learn one after the other; equal trainings on equal samples are done once."""
    groups: list[list[tuple[Method, Task, Samples, Callback]]] = []
    for row in rows:
        twins = (g for g in groups if row[0].trains_like(g[0][0]) and same_samples(row[2], g[0][2]))
        group = next(twins, None)
        groups.append([row]) if group is None else group.append(row)
    for first, *rest in groups:
        method, task, samples, _ = first
        method.learn_task(task, samples, to_all([callback for *_, callback in (first, *rest)]))
        for twin, same_task, same, _ in rest:
            twin.learn_task_from(method, same_task, same)
