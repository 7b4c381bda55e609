"""Queries to a bank: features of images under the models of finished tasks, in batches.

A query runs one task's model on some images. Many queries are run in batches whose rows are pairs of an image and a
task; the tokens of an image below the first block that tasks adapt, the same for all tasks, are computed once. On a GPU
every batch has the same number of rows and is the replay of one CUDA graph: a pair's features have the same bits in any
batch. Tasks with different sets of adapters share a batch, of which every group of a few rows has one set. On a CPU a
batch has as many rows as keep it busy, and features are the same up to rounding: matrix libraries choose kernels by the
number of rows, and some kernels add in another order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tpl.engine import BLOCK, CapturedFunction, Inference, uses_cuda_graphs
from tpl.nets import Part, TransposedTask, TransposedTrunk, ViTEncoder, unstacked

if TYPE_CHECKING:
    from tpl.methods.bank.bank import Bank

ROWS = 256  # of a pass on a GPU
GROUP = 8  # rows of a pass on a GPU that share a set of adapters, or more where a set is large
MOST_GATHERED = 2**30  # bytes of adapters that a pass on a GPU has copies of
FILLER = -1  # instead of a query's number: rows that fill a group up
TOKENS = 8192  # of a pass on a CPU: more is no faster, and with fewer two threads wait for each other too often
MOST_SHARED = 2**30  # bytes of tokens kept for further queries with the same images


class Query(NamedTuple):
    """Images to run through one task's model: row numbers, ascending, on the CPU; None: all images."""

    task: int
    rows: Tensor | None = None


class QueryPart(NamedTuple):
    """The rows of a query that one pass computes: `number` is the query's index, `rows` count within a block."""

    number: int
    task: int
    rows: Tensor


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


class Stacks(NamedTuple):
    """Norms, masks and sets of adapters of all tasks, `[tasks, ...]`, and the sets' weights, `[sets, ...]`."""

    norms: Tensor
    masks: Tensor
    sets: Tensor
    adapters: list[Tensor]


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


def inference_for(bank: Bank) -> BankInference:
    """The fastest inference for a bank's encoder on its device."""
    encoder, compute = bank.encoder, bank.compute
    if not isinstance(encoder, ViTEncoder):
        return PerTaskInference(bank)
    on_cpu = compute.device.type == "cpu" and compute.dtype == torch.float32
    return (CPUInference if on_cpu and TransposedTrunk.serves(encoder) else RowInference)(bank, encoder)


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
