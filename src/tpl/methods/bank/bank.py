"""The bank: all task models in one network, protected from each other by e.g. HAT's masks, and queries to them.

The encoder is shared, and so are the weights trained in it: adapters, or the whole network if it is trained from
scratch. A task has its own mask, norms and head. While it is trained, the protection freezes every weight that an
earlier task uses, so an old task's features never change: with binary masks not by a single bit.

A query runs one task's model on some images. Many queries are run in batches whose rows are pairs of an image and a
task; the tokens of an image below the first block that tasks adapt, the same for all tasks, are computed once. On a GPU
every batch has the same number of rows and is the replay of one CUDA graph: a pair's features have the same bits in any
batch. Tasks with different sets of adapters share a batch, of which every group of a few rows has one set. On a CPU a
batch has as many rows as keep it busy, and features are the same up to rounding: matrix libraries choose kernels by the
number of rows, and some kernels add in another order.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.engine import (
    BLOCK,
    IGNORED,
    ROTATIONS,
    Callback,
    CapturedFunction,
    Compute,
    Event,
    Inference,
    uses_cuda_graphs,
)
from tpl.methods.bank.protect import PROTECTIONS, WHEN_FULL, ProtectConfig
from tpl.nets import Encoder, Part, Trainable, TransposedTask, TransposedTrunk, ViTEncoder, Weights, unstacked

ROWS = 256  # of a pass on a GPU
GROUP = 8  # rows of a pass on a GPU that share a set of adapters, or more where a set is large
MOST_GATHERED = 2**30  # bytes of adapters that a pass on a GPU has copies of
FILLER = -1  # instead of a query's number: rows that fill a group up
TOKENS = 8192  # of a pass on a CPU: more is no faster, and with fewer two threads wait for each other too often
NEARLY_FULL = 0.95  # share of weights that are frozen: a warning
FULL = 0.9  # share of units in use: with `grow_adapters=when_full` the next task gets a further set of adapters
MOST_SHARED = 2**30  # bytes of tokens kept for further queries with the same images


# Test-time augmentation: the views of an image that a prediction averages over


class View(NamedTuple):
    """One version of an image: flipped horizontally or not, then rotated by `rotation` times 90 degrees."""

    flipped: bool
    rotation: int

    def of(self, pixels: Tensor) -> Tensor:
        """The view of images `[..., size, size]`."""
        pixels = pixels.flip(-1) if self.flipped else pixels
        return pixels.rot90(self.rotation, dims=(-2, -1)) if self.rotation else pixels


def _views(flip: bool, rotate: bool) -> tuple[View, ...]:
    sides = (False, True) if flip else (False,)
    return tuple(View(side, rotation) for rotation in ((0, *ROTATIONS) if rotate else (0,)) for side in sides)


TTA: dict[str, tuple[View, ...]] = {
    "none": _views(flip=False, rotate=False),
    "flip": _views(flip=True, rotate=False),
    "rotate": _views(flip=False, rotate=True),
    "both": _views(flip=True, rotate=True),
}
ORIGINAL = TTA["none"]


# Task models


class TaskModel(nn.Module):
    """One task's own parameters; `embedding` is what the protection stores of its mask."""

    rotation_classes = False  # whether the last outputs are the classes rotated by 90, 180 and 270 degrees
    adapter_set = 0  # which of the bank's sets of adapters it uses

    def __init__(self, own: int, embedding: Tensor, norms: Tensor, head_weight: Tensor, head_bias: Tensor) -> None:
        super().__init__()
        self.embedding = nn.Parameter(embedding, requires_grad=embedding.is_floating_point())
        self.norms = nn.Parameter(norms)
        self.head_weight = nn.Parameter(head_weight)
        self.head_bias = nn.Parameter(head_bias)
        self.own = own  # the first `own` outputs are the task's classes, the next are for images of other tasks

    def own_head(self, rotation: int = 0) -> tuple[Tensor, Tensor]:
        """Weights and biases of the task's own classes, or of these rotated by `rotation` times 90 degrees."""
        first = self._first_output(rotation)
        rows = slice(first, first + self.own)
        return self.head_weight[rows].detach(), self.head_bias[rows].detach()

    def upright_head(self) -> tuple[Tensor, Tensor]:
        """Weights and biases of the task's own classes and of others, without the outputs for rotated images."""
        count = self._first_output(ROTATIONS[0]) if self.rotation_classes else len(self.head_bias)
        return self.head_weight[:count].detach(), self.head_bias[:count].detach()

    def _first_output(self, rotation: int) -> int:
        return len(self.head_bias) - (1 + len(ROTATIONS) - rotation) * self.own if rotation else 0

    @property
    def others(self) -> int:
        """Number of outputs for images of other tasks."""
        return len(self.upright_head()[1]) - self.own

    def pad(self, count: int) -> None:
        """Put `count` empty outputs before those for images of other tasks."""
        for name in ("head_weight", "head_bias"):
            old = getattr(self, name).detach()
            rows = torch.cat([old[: self.own], old.new_zeros(count, *old.shape[1:]), old[self.own :]])
            setattr(self, name, nn.Parameter(rows, requires_grad=False))

    def drop(self, row: int) -> None:
        """Remove one output of the head; for a class of the task, also the outputs of its rotated versions."""
        rows = [row]
        if self.rotation_classes and row < self.own:
            rows += [self._first_output(rotation) + row for rotation in ROTATIONS]
        kept = torch.ones(len(self.head_bias), dtype=torch.bool, device=self.head_bias.device)
        kept[rows] = False
        self.own -= row < self.own
        for name in ("head_weight", "head_bias"):
            setattr(self, name, nn.Parameter(getattr(self, name).detach()[kept], requires_grad=False))


class Outputs(NamedTuple):
    """Outputs of one task's model for some images."""

    features: Tensor  # [n, dim]
    logits: Tensor  # [n, own classes]


class Query(NamedTuple):
    """Images to run through one task's model: row numbers, ascending, on the CPU; None: all images."""

    task: int
    rows: Tensor | None = None


class QueryPart(NamedTuple):
    """The rows of a query that one pass computes: `number` is the query's index, `rows` count within a block."""

    number: int
    task: int
    rows: Tensor


class Technique:
    """How a task's network is trained and its logits are computed: here, plain cross-entropy over the head's outputs.

    An instance is made for every network and task. On a GPU a training step is captured in a CUDA graph, so a technique
    may not branch on a tensor's value, change a shape or draw random numbers: a step gets `numbers` of them.
    """

    name: ClassVar[str] = "none"
    summary: ClassVar[str] = "plain cross-entropy"
    paper: ClassVar[str] = ""
    splits: ClassVar[bool] = True  # False: the loss of a row depends on other rows, or on its position in the batch
    outliers: ClassVar[bool] = False  # whether a batch has a second half of stored images of earlier tasks
    swaps_quarters: ClassVar[bool] = False  # whether `swapped_quarters` of its own images serve the first task as such

    def __init__(self, own: int, dim: int, batch: int, device: torch.device) -> None:
        """For a task of `own` classes, features of size `dim`, and at most `batch` new images a step."""
        self.own, self.dim, self.batch, self.device = own, dim, batch, device

    @property
    def numbers(self) -> int:
        """How many random numbers, uniform in [0, 1), a step needs."""
        return 0

    def parameters(self) -> list[Tensor]:
        """What is trained beside the network, by the same optimiser."""
        return []

    def mixed(self, images: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """The images `[b, 3, h, w]` that the network is shown in place of these (normalised) ones.

        `labels` are `[b]`: a class of the task, `own` for an image of another task, `IGNORED` for a row that only
        fills the batch up. The first rows are the new images; `b` is the same at every step of a task.
        """
        return images

    def loss(self, z: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """The loss, a scalar, of features `[b, dim]` under a head; `labels` and `draws` are those `mixed` was given."""
        return F.cross_entropy(F.linear(z, weight, bias), labels, ignore_index=IGNORED)

    def finish(
        self, z: Tensor, y: Tensor, weight: Tensor, bias: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """The head to keep, given all features and labels of the task once the network is trained and frozen."""
        return weight, bias

    @classmethod
    def logits(cls, z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Logits of a trained head, in float64: those of an image do not depend on the rest of the batch."""
        return F.linear(z.double(), weight.double(), bias.double())


class Bank:
    """One encoder, the shared weights in it, a protection between tasks, and the models of finished tasks."""

    used: Tensor | None = None  # units that any finished task uses
    retired: Tensor | None = None  # units of removed tasks: their weights are never trained again
    same_as: Bank | None = None  # the bank that every task here was copied from, if there is one
    views: tuple[View, ...] = ORIGINAL  # of every image in a query

    def __init__(
        self,
        encoder: Encoder,
        config: ProtectConfig,
        compute: Compute,
        normalise: Callable[[Tensor], Tensor],
        generator: torch.Generator,
        technique: type[Technique] = Technique,
    ) -> None:
        self.encoder, self.config, self.compute, self.normalise = encoder, config, compute, normalise
        self.technique = technique  # how heads are trained, and how logits are computed from them
        self.protection = PROTECTIONS[config.protect](config)
        self.below = config.blocks_below(encoder)  # blocks that no task changes, under the adapted ones
        # New tasks train one of these; the others are full, or came with a bank that was joined, and never change.
        self.sets: list[Trainable] = [encoder.new_adapters(config.latent, generator, self.below).to(compute.device)]
        self.trained_set = 0
        self.protection.prepare(self.adapters)
        self.tasks: list[TaskModel] = []

    def weights(self, task: int) -> Weights:
        """The shared weights under a finished task's mask."""
        model = self.tasks[task]
        return self.protection.finished(self.adapters_of(model).weights, model.embedding.detach())

    def adapters_of(self, model: TaskModel) -> Trainable:
        """The adapters that a task's model uses."""
        return self.sets[model.adapter_set]

    @property
    def adapters(self) -> Trainable:
        """The adapters that new tasks train."""
        return self.sets[self.trained_set]

    def make_room(self, callback: Callback) -> None:
        """Before a new task: if hardly any unit is free, start a further set of adapters, or warn.

        The new set starts with the weights of the full one, which may all be trained again: earlier tasks keep theirs.
        A task is run with its own set alone, so an answer costs the same however many sets there are.
        """
        full = self.capacity()
        if self.config.grow_adapters == WHEN_FULL and full["units"] >= FULL:
            self.sets.append(copy.deepcopy(self.adapters))
            self.trained_set = len(self.sets) - 1
            self.used = self.retired = None
        elif full["frozen"] >= NEARLY_FULL:
            text = (
                f"{full['frozen']:.1%} of the shared weights belong to earlier tasks. A new task still gets its own "
                "norms, mask and head, but hardly any free weights. A model with grow_adapters=when_full or a larger "
                "latent size (a wider network, if it is trained from scratch) has more room."
            )
            callback(Event("warning", {"text": text}))

    def join(self, other: Bank) -> None:
        """Add the tasks of a bank that was trained apart, with its adapters: their features stay bit for bit."""
        first = len(self.sets)
        self.sets += [copy.deepcopy(each).to(self.compute.device) for each in other.sets]
        for model in other.tasks:
            added = copy.deepcopy(model)
            added.adapter_set = first + model.adapter_set
            self.add(added)

    def unit_mask(self, task: int) -> Tensor | None:
        """A finished task's mask over units, from 0 to 1; None if the protection does not mask units."""
        return self.protection.unit_mask(self.tasks[task].embedding.detach())

    @cached_property
    def _inference(self) -> BankInference:
        """The fastest inference for the encoder on the device."""
        if not isinstance(self.encoder, ViTEncoder):
            return PerTaskInference(self)
        on_cpu = self.compute.device.type == "cpu" and self.compute.dtype == torch.float32
        kind = CPUInference if on_cpu and TransposedTrunk.serves(self.encoder) else RowInference
        return kind(self, self.encoder)

    def outputs(self, pixels: Tensor, task: int) -> Outputs:
        """Features and own-class logits of samples under a finished task's model."""
        return self.query(pixels, [Query(task)])[0]

    def query(self, pixels: Tensor, queries: Sequence[Query]) -> list[Outputs]:
        """Outputs of several tasks, each for its own selection of the images: faster than one by one.

        On a GPU outputs have the same bits as one by one, on a CPU they are the same up to rounding.
        """
        with torch.no_grad():
            found = [self._inference(view.of(pixels), queries) for view in self.views]
            return [self._averaged(task, views) for (task, _), *views in zip(queries, *found, strict=True)]

    @contextmanager
    def sharing(self, pixels: Tensor) -> Iterator[None]:
        """A context in which queries with this very tensor of images compute the blocks below the adapted ones once."""
        with self._shared.sharing(pixels) if self.below else nullcontext():
            yield

    def share_too(self, pixels: Tensor) -> None:
        """Within `sharing`, do the same for queries with these images until its end."""
        if self.below:
            self._shared.share_too(pixels)

    def encoder_features(self, pixels: Tensor) -> Tensor:
        """The encoder's own features `[n, dim]`, by the blocks below the adapted ones that queries share."""
        return self._shared.plain(pixels)

    def tokens(self, pixels: Tensor) -> Tensor:
        """What all tasks share of images: the input of the first adapted block, `[n, tokens, dim]`."""
        return self._shared.tokens(pixels)

    def block_of_tokens(self, pixels: Tensor, start: int) -> Tensor:
        """The `tokens` of the `BLOCK` images from `start` on; within `sharing`, queries use the same."""
        return self._shared.block(pixels, start)

    @property
    def _shared(self) -> SharedInference:
        """The inference of a transformer, which alone has blocks below the adapted ones."""
        assert isinstance(self._inference, SharedInference)
        return self._inference

    def _averaged(self, task: int, views: list[Tensor]) -> Outputs:
        """One task's outputs, averaged over all views: features over those without rotation, logits over all."""
        by_rotation: dict[int, list[Tensor]] = {}
        for view, features in zip(self.views, views, strict=True):
            by_rotation.setdefault(view.rotation, []).append(features)
        means = {rotation: _mean(features) for rotation, features in by_rotation.items()}
        upright = means.pop(0)
        logits = [self.logits(upright, task), *(self._logits(z, task, rotation) for rotation, z in means.items())]
        return Outputs(upright, _mean(logits))

    def logits(self, features: Tensor, task: int) -> Tensor:
        """Logits of a finished task's own classes.

        Computed in float64: rounded to float32, they do not depend on the number of images in the product.
        """
        return self._logits(features, task, 0)

    def _logits(self, features: Tensor, task: int, rotation: int) -> Tensor:
        with torch.no_grad():
            return self.technique.logits(features, *self.tasks[task].own_head(rotation)).to(features.dtype)

    def restart(self, sets: Sequence[dict[str, Tensor]], trained: int, retired: Tensor | None) -> None:
        """Remove all tasks and load the sets of adapters, of which new tasks train the set number `trained`.

        `retired` are units of it that belong to tasks removed earlier: they stay in use.
        """
        self.sets = [self.sets[0], *(copy.deepcopy(self.sets[0]) for _ in sets[1:])]
        for own, state in zip(self.sets, sets, strict=True):
            own.load_state_dict(state)
        self.tasks, self.trained_set, self.used, self.retired = [], trained, retired, retired

    def add(self, model: TaskModel) -> None:
        """Add a finished task: freeze its model and mark its units as used."""
        self.same_as = None
        self.tasks.append(model.requires_grad_(False).to(self.compute.device))
        if model.adapter_set == self.trained_set:
            self.used = _united(self.used, self.unit_mask(len(self.tasks) - 1))

    @torch.no_grad()
    def copy_newest(self, other: Bank) -> None:
        """Copy the newest task of a bank that was equal to this one before."""
        followed = not self.tasks or self.same_as is other
        for own, trained in zip(self.adapters.weights, other.adapters.weights, strict=True):
            own.copy_(trained)
        self.add(copy.deepcopy(other.tasks[-1]))
        self.same_as = other if followed else None

    def retire(self, task: int) -> None:
        """Remove a task. Its units stay in use, since other tasks may share them."""
        if self.tasks[task].adapter_set == self.trained_set:
            self.retired = _united(self.retired, self.unit_mask(task))
        self.same_as = None
        del self.tasks[task]

    def capacity(self) -> dict[str, float]:
        """How full the adapters in training are: shares of units in use and of weights that are frozen.

        And the number of `sets` of adapters, where there are several.
        """
        sets = {"sets": float(len(self.sets))} if len(self.sets) > 1 else {}
        return self.protection.capacity(self.adapters, self.used) | sets

    def new_task(self, own: int, outputs: int, generator: torch.Generator, rotation_classes: bool = False) -> TaskModel:
        """An untrained task with `outputs` head outputs: the first `own` its classes, the last for rotated ones."""
        dim = self.encoder.dim
        bound = dim**-0.5  # torch's own initialisation of a linear layer
        head = torch.empty(outputs, dim).uniform_(-bound, bound, generator=generator)
        bias = torch.empty(outputs).uniform_(-bound, bound, generator=generator)
        embedding = self.protection.initial(self.adapters, generator)
        model = TaskModel(own, embedding, self.encoder.new_norms(self.below), head, bias)
        model.rotation_classes, model.adapter_set = rotation_classes, self.trained_set
        return model.to(self.compute.device)


def within_tasks(outputs: list[Outputs]) -> Tensor:
    """log P(class | image, task) of every task, side by side, `[n, classes]`."""
    return torch.cat([each.logits.double().log_softmax(dim=1) for each in outputs], dim=1)


def _mean(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else sum(parts[1:], parts[0]) / len(parts)


def _united(used: Tensor | None, more: Tensor | None) -> Tensor | None:
    return more if used is None or more is None else torch.maximum(used, more)


# Batched inference: one class for each kind of encoder and device


class ModelVersion:
    """Detects, by comparison, whether some tasks' models or the shared weights were replaced or written to."""

    def __init__(self, bank: Bank, tasks: Sequence[int]) -> None:
        models = [bank.tasks[task] for task in tasks]
        shared = {model.adapter_set: bank.adapters_of(model).weights for model in models}
        # Kept alive, so that no other tensor gets their address.
        self.tensors: list[Tensor] = [part for model in models for part in (model.embedding, model.norms)]
        self.tensors += [part for weights in shared.values() for part in weights]
        self.state = [(id(t), t.data_ptr(), t._version) for t in self.tensors]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelVersion) and self.state == other.state

    __hash__ = None  # type: ignore[assignment]


class BankInference(ABC):
    """Features of images under finished tasks of a bank."""

    def __init__(self, bank: Bank) -> None:
        self.bank = bank

    @abstractmethod
    def __call__(self, pixels: Tensor, queries: Sequence[Query]) -> list[Tensor]:
        """Features `[n, dim]`, float32 (float64 of an `exact` encoder), one tensor a query."""


class PerTaskInference(BankInference):
    """One pass per task, for networks without a shared trunk."""

    def __init__(self, bank: Bank) -> None:
        super().__init__(bank)
        dtype = torch.float64 if bank.encoder.exact else bank.compute.dtype
        self._features = Inference(unstacked(bank.encoder, dtype), bank.compute, bank.normalise)

    def __call__(self, pixels: Tensor, queries: Sequence[Query]) -> list[Tensor]:
        """Task after task."""
        bank = self.bank
        chosen = [pixels if rows is None else pixels[rows.to(pixels.device)] for _, rows in queries]
        pairs = zip(chosen, queries, strict=True)
        return [self._features(own, bank.tasks[q.task].norms, *bank.weights(q.task)) for own, q in pairs]


class SharedTokens:
    """Tokens of a tensor of images, by the first image of a block: kept for further queries."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels
        self.blocks: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens that are kept."""
        return sum(tokens.nbytes for tokens in self.blocks.values())


class SharedInference(BankInference):
    """Tokens below the adapted blocks once per image, then passes over pairs of images and tasks."""

    _shared: tuple[SharedTokens, ...] = ()

    def __init__(self, bank: Bank, encoder: ViTEncoder) -> None:
        super().__init__(bank)
        self.encoder, self.dtype = encoder, bank.compute.dtype
        self._tokens = Inference(self._embed, bank.compute, bank.normalise)

    @abstractmethod
    def _embed(self, images: Tensor) -> Tensor:
        """Tokens of normalised images."""

    def tokens(self, pixels: Tensor) -> Tensor:
        """The input of the first adapted block, `[n, tokens, dim]`."""
        return self._tokens(pixels)

    @contextmanager
    def sharing(self, pixels: Tensor) -> Iterator[None]:
        """A context in which the tokens of these images are computed once; within another for them, no new one."""
        before = self._shared
        if self._shared_of(pixels) is None:
            self._shared = *before, SharedTokens(pixels)
        try:
            yield
        finally:
            self._shared = before

    def share_too(self, pixels: Tensor) -> None:
        """Within `sharing`, compute the tokens of these images once, too, until its end."""
        if self._shared and self._shared_of(pixels) is None:
            self._shared = *self._shared, SharedTokens(pixels)

    def _shared_of(self, pixels: Tensor) -> SharedTokens | None:
        return next((each for each in self._shared if each.pixels is pixels), None)

    def block(self, pixels: Tensor, start: int) -> Tensor:
        """Tokens of the block of images that begins at `start`."""
        shared = self._shared_of(pixels)
        if shared is not None and (known := shared.blocks.get(start)) is not None:
            return known
        tokens = self.tokens(pixels[start : start + BLOCK])
        room = MOST_SHARED - sum(each.nbytes for each in self._shared)
        if shared is not None and tokens.nbytes <= room and self.bank.compute.room_for(tokens.nbytes):
            shared.blocks[start] = tokens
        return tokens

    @torch.no_grad()
    def plain(self, pixels: Tensor) -> Tensor:
        """The encoder's own features, block after block of images."""
        empty = torch.zeros(0, self.encoder.dim, device=self.bank.compute.device)
        starts = range(0, len(pixels), BLOCK)
        return torch.cat([empty, *(self.run_plain(self.block(pixels, start)) for start in starts)])

    @torch.no_grad()
    def __call__(self, pixels: Tensor, queries: Sequence[Query]) -> list[Tensor]:
        """Block after block of images; in each, all queries, a bounded number of rows at a time."""
        empty = torch.zeros(0, self.encoder.dim, device=self.bank.compute.device)
        found: list[list[Tensor]] = [[empty] for _ in queries]
        if queries:
            self.prepare()
        for start, parts in _query_parts(queries, len(pixels)).items():
            if not parts:
                continue
            tokens = self.block(pixels, start)
            for together in self.batches(parts, tokens.shape[1]):
                features = self.run(tokens, together)
                for part, rows in zip(together, features.split([len(p.rows) for p in together]), strict=True):
                    if part.number != FILLER:
                        found[part.number].append(rows)
        return [torch.cat(each) for each in found]

    def prepare(self) -> None:
        """Called before the passes of some queries, in which no task changes."""

    @abstractmethod
    def batches(self, parts: list[QueryPart], tokens: int) -> Iterator[list[QueryPart]]:
        """Groups of parts, one pass each; `tokens` is the number of tokens of an image."""

    @abstractmethod
    def run(self, tokens: Tensor, parts: list[QueryPart]) -> Tensor:
        """Features of one pass, the rows of all parts concatenated."""

    @abstractmethod
    def run_plain(self, tokens: Tensor) -> Tensor:
        """The encoder's own features of a block of images."""


class CPUInference(SharedInference):
    """Inference on a CPU, with transposed weights and without the units that a task's mask closes."""

    def __init__(self, bank: Bank, encoder: ViTEncoder) -> None:
        super().__init__(bank, encoder)
        self._trunk: TransposedTrunk | None = None
        self._tasks: dict[int, tuple[ModelVersion, TransposedTask]] = {}

    @property
    def trunk(self) -> TransposedTrunk:
        """The transposed trunk, made on demand: it needs as much memory as the encoder."""
        if self._trunk is None:
            self._trunk = TransposedTrunk(self.encoder, self.bank.below)
        return self._trunk

    def _embed(self, images: Tensor) -> Tensor:
        return self.encoder.tokens(images, self.dtype)

    def tokens(self, pixels: Tensor) -> Tensor:
        """Patches, then the blocks below, as many rows at a time as keep all threads busy."""
        embedded = super().tokens(pixels)
        if not self.bank.below or not len(embedded):
            return embedded
        return torch.cat([self.trunk.shared(rows) for rows in embedded.split(_rows(embedded.shape[1]))])

    def batches(self, parts: list[QueryPart], tokens: int) -> Iterator[list[QueryPart]]:
        """As many rows as keep all threads busy."""
        return _grouped(parts, _rows(tokens))

    def run(self, tokens: Tensor, parts: list[QueryPart]) -> Tensor:
        """A pass through the transposed trunk."""
        rows = torch.cat([part.rows for part in parts])
        return self.trunk(tokens[rows], [Part(self._task(part.task), len(part.rows)) for part in parts])

    def run_plain(self, tokens: Tensor) -> Tensor:
        """Passes without adapters."""
        parts = tokens.split(_rows(tokens.shape[1]))
        return torch.cat([self.trunk(rows.clone(), [Part(self.trunk.upper, len(rows))]) for rows in parts])

    def _task(self, task: int) -> TransposedTask:
        version = ModelVersion(self.bank, [task])
        found = self._tasks.get(task)
        if found is None or found[0] != version:
            transposed = TransposedTask.of(self.bank.tasks[task].norms, self.bank.weights(task))
            self._tasks[task] = found = version, transposed
        return found[1]


class RowInference(SharedInference):
    """Inference with norms and masks gathered per row, and adapters per group of rows.

    A pass has a single task if the protection does not mask units, and a single set of adapters where it is not the
    replay of a CUDA graph.
    """

    def __init__(self, bank: Bank, encoder: ViTEncoder) -> None:
        super().__init__(bank, encoder)
        self._features = CapturedFunction(self._forward, bank.compute)
        self._plain = CapturedFunction(partial(encoder.plain_from, below=bank.below), bank.compute)
        self._version: ModelVersion | None = None
        self._stacks: Stacks | None = None  # of that version

    def _embed(self, images: Tensor) -> Tensor:
        return self.encoder.tokens(images, self.dtype, self.bank.below)

    def _forward(self, tokens: Tensor, norms: Tensor, *rest: Tensor) -> Tensor:
        """Norms with an axis of rows are followed by masks and the groups' weights, others by a task's own weights."""
        masks, weights = (rest[0], rest[1:]) if norms.dim() == 4 else (None, rest)
        return self.encoder.from_tokens(tokens, norms, weights, masks)

    @cached_property
    def _mixes(self) -> bool:
        return self.bank.unit_mask(0) is not None

    @cached_property
    def _group(self) -> int:
        """Rows of a replayed pass that share a set of adapters, of which each group has a copy."""
        size = sum(part.numel() for part in self.bank.adapters.weights) * self.dtype.itemsize
        sizes = [GROUP * 2**i for i in range((ROWS // GROUP).bit_length())]
        return next((rows for rows in sizes if ROWS // rows * size <= MOST_GATHERED), ROWS)

    def prepare(self) -> None:
        """Stack what the passes gather from, unless nothing has changed."""
        bank = self.bank
        if not self._mixes or (version := ModelVersion(bank, range(len(bank.tasks)))) == self._version:
            return
        masks = [bank.unit_mask(t) for t in range(len(bank.tasks))]
        layers = zip(*(each.weights for each in bank.sets), strict=True)
        self._version = version
        self._stacks = Stacks(
            torch.stack([model.norms for model in bank.tasks]),
            torch.stack([mask for mask in masks if mask is not None]),
            torch.tensor([model.adapter_set for model in bank.tasks], device=bank.compute.device),
            [torch.stack(list(tensors)).to(self.dtype) for tensors in layers],
        )

    def batches(self, parts: list[QueryPart], tokens: int) -> Iterator[list[QueryPart]]:
        """Passes with the same number of rows; with unit masks, of several tasks and their sets of adapters."""
        if not self._mixes:
            return (group for part in parts for group in _grouped([part], ROWS))
        sets: dict[int, list[QueryPart]] = {}
        for part in parts:
            sets.setdefault(self.bank.tasks[part.task].adapter_set, []).append(part)
        if uses_cuda_graphs(self.bank.compute.device):
            return _grouped([part for own in sets.values() for part in _filled_up(own, self._group)], ROWS)
        return (group for own in sets.values() for group in _grouped(own, ROWS))

    def run(self, tokens: Tensor, parts: list[QueryPart]) -> Tensor:
        """One replay; the pass is filled up with rows of the first image."""
        device, bank = tokens.device, self.bank
        count = sum(len(part.rows) for part in parts)
        replayed = uses_cuda_graphs(device)
        rows = torch.zeros(2, ROWS if replayed else count, dtype=torch.long)  # image and task
        rows[0, :count] = torch.cat([part.rows for part in parts])
        rows[1, :count] = torch.cat([torch.full_like(part.rows, part.task) for part in parts])
        images, tasks = rows.to(device, non_blocking=True)
        if self._stacks is not None:
            stacks = self._stacks
            groups = stacks.sets[tasks[:: self._group if replayed else count]]
            given = stacks.norms[tasks], stacks.masks[tasks], *(tensor[groups] for tensor in stacks.adapters)
        else:
            given = bank.tasks[parts[0].task].norms, *bank.weights(parts[0].task)
        return self._features(tokens[images], *given)[:count]

    def run_plain(self, tokens: Tensor) -> Tensor:
        """One replay; the pass is filled up with the first image."""
        count = len(tokens)
        size = BLOCK if uses_cuda_graphs(tokens.device) else count
        return self._plain(torch.cat([tokens, tokens[:1].expand(size - count, -1, -1)]))[:count]


class Stacks(NamedTuple):
    """Norms, masks and sets of adapters of all tasks, `[tasks, ...]`, and the sets' weights, `[sets, ...]`."""

    norms: Tensor
    masks: Tensor
    sets: Tensor
    adapters: list[Tensor]


def _rows(tokens: int) -> int:
    """Images of a pass on a CPU, given the number of tokens of each."""
    return max(TOKENS // tokens, 1)


def _query_parts(queries: Sequence[Query], images: int) -> dict[int, list[QueryPart]]:
    """The parts of all queries that fall into each block of images, by the block's first image."""
    starts, everything = range(0, images, BLOCK), torch.arange(images)
    limits = torch.tensor([*starts[1:], images])
    parts: dict[int, list[QueryPart]] = {start: [] for start in starts}
    for number, (task, rows) in enumerate(queries):
        rows = everything if rows is None else rows
        ends = torch.searchsorted(rows, limits).tolist()
        for start, first, end in zip(starts, [0, *ends], ends, strict=False):
            if first < end:
                parts[start].append(QueryPart(number, task, rows[first:end] - start))
    return parts


def _filled_up(parts: list[QueryPart], size: int) -> list[QueryPart]:
    """Parts with a number of rows that is a multiple of `size`, the last of them a filler where one is needed."""
    missing = -sum(len(part.rows) for part in parts) % size
    return [*parts, QueryPart(FILLER, parts[-1].task, parts[-1].rows[:1].repeat(missing))] if missing else parts


def _grouped(parts: list[QueryPart], limit: int) -> Iterator[list[QueryPart]]:
    """Parts, split where necessary, in groups of `limit` rows; the last may have fewer."""
    group: list[QueryPart] = []
    room = limit
    for part in parts:
        rows = part.rows
        while len(rows):
            group.append(part._replace(rows=rows[:room]))
            rows, room = rows[room:], room - len(group[-1].rows)
            if not room:
                yield group
                group, room = [], limit
    if group:
        yield group
