"""Asking many task models about many images: rows of a batch are pairs of an image and a task.

What all tasks see alike, the patches of an image, is computed once. Then as many pairs share a pass as the memory
likes. On a GPU every pass has the same number of rows, whichever pairs they are, and is the replay of one recording: a
pair's answer has the same bits in any company. On a CPU a pass has as many rows as keep it busy, and the answer is the
same up to rounding: matrix libraries choose kernels by the number of rows, and some kernels add up in another order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tpl.engine import Compute, Inference, records
from tpl.engine.infer import BLOCK, Recording
from tpl.methods.bank.models import TaskModels
from tpl.nets import Encoder, ViTEncoder, unstacked
from tpl.nets.transposed import Part, TransposedTask, TransposedTrunk

ROWS = 256  # of a pass on a GPU
TOKENS = 8192  # of a pass on a CPU: more gains nothing, and fewer make two threads wait for each other too often


class Question(NamedTuple):
    """Some images for one task: their numbers, in ascending order, on the CPU; None: all there are."""

    task: int
    rows: Tensor | None = None


class Piece(NamedTuple):
    """What one pass asks one task: `number` is the question's, `rows` are numbers within a block of images."""

    number: int
    task: int
    rows: Tensor


class Stamp:
    """Tells whether a task's model, or a weight that it shares, has been exchanged or written to since."""

    def __init__(self, bank: TaskModels, task: int) -> None:
        model = bank.tasks[task]
        self.tensors = model.embedding, model.norms, *bank.adapters.weights  # kept: no other can take their place
        self.state = [(id(t), t.data_ptr(), t._version) for t in self.tensors]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stamp) and self.state == other.state

    __hash__ = None  # type: ignore[assignment]


class Asking(ABC):
    """Features of images under finished tasks of a bank."""

    def __init__(self, bank: TaskModels) -> None:
        self.bank = bank

    @abstractmethod
    def __call__(self, pixels: Tensor, questions: Sequence[Question]) -> list[Tensor]:
        """Features `[n, dim]`, float32, one tensor a question; `pixels` are uint8."""


class OneByOne(Asking):
    """A pass a task: for networks that share nothing but weights."""

    def __init__(self, bank: TaskModels) -> None:
        super().__init__(bank)
        self._features = Inference(unstacked(bank.encoder, bank.compute.dtype), bank.compute, bank.normalise)

    def __call__(self, pixels: Tensor, questions: Sequence[Question]) -> list[Tensor]:
        """Task after task."""
        bank = self.bank
        chosen = [pixels if rows is None else pixels[rows.to(pixels.device)] for _, rows in questions]
        pairs = zip(chosen, questions, strict=True)
        return [self._features(own, bank.tasks[q.task].norms, *bank.weights(q.task)) for own, q in pairs]


class Shared(Asking):
    """Patches once an image, then passes over pairs of any tasks."""

    def __init__(self, bank: TaskModels, encoder: ViTEncoder) -> None:
        super().__init__(bank)
        self.encoder, self.dtype = encoder, bank.compute.dtype
        self._tokens = Inference(self._see, bank.compute, bank.normalise)

    def _see(self, images: Tensor) -> Tensor:
        return self.encoder.tokens(images, self.dtype)

    @torch.no_grad()
    def __call__(self, pixels: Tensor, questions: Sequence[Question]) -> list[Tensor]:
        """Block after block of images; in each, all questions, a bounded number of rows at a time."""
        nobody = torch.zeros(0, self.encoder.dim, device=self.bank.compute.device)
        answers: list[list[Tensor]] = [[nobody] for _ in questions]
        for start in range(0, len(pixels), BLOCK):
            block = pixels[start : start + BLOCK]
            pieces = list(_pieces(questions, start, len(block)))
            if not pieces:
                continue
            tokens = self._tokens(block)
            for together in self.passes(pieces, tokens.shape[1]):
                features = self.ask(tokens, together)
                for piece, part in zip(together, features.split([len(p.rows) for p in together]), strict=True):
                    answers[piece.number].append(part)
        return [torch.cat(parts) for parts in answers]

    @abstractmethod
    def passes(self, pieces: list[Piece], tokens: int) -> Iterator[list[Piece]]:
        """The pieces in groups that make a pass each; images have so many tokens."""

    @abstractmethod
    def ask(self, tokens: Tensor, pieces: list[Piece]) -> Tensor:
        """Features of one pass, the pieces' rows one after the other."""


class OnCPU(Shared):
    """With weights transposed, and each task's closed units left out."""

    def __init__(self, bank: TaskModels, encoder: ViTEncoder) -> None:
        super().__init__(bank, encoder)
        self._trunk: TransposedTrunk | None = None
        self._tasks: dict[int, tuple[Stamp, TransposedTask]] = {}

    def passes(self, pieces: list[Piece], tokens: int) -> Iterator[list[Piece]]:
        """As many rows as keep all threads busy."""
        return _grouped(pieces, max(TOKENS // tokens, 1))

    def ask(self, tokens: Tensor, pieces: list[Piece]) -> Tensor:
        """A pass through the transposed trunk."""
        if self._trunk is None:  # not before somebody asks: it takes as much memory again as the encoder
            self._trunk = TransposedTrunk(self.encoder)
        parts = [Part(self._task(piece.task), len(piece.rows)) for piece in pieces]
        return self._trunk(tokens[torch.cat([piece.rows for piece in pieces])], parts)

    def _task(self, task: int) -> TransposedTask:
        stamp = Stamp(self.bank, task)
        found = self._tasks.get(task)
        if found is None or found[0] != stamp:
            transposed = TransposedTask.of(self.bank.tasks[task].norms, self.bank.weights(task))
            self._tasks[task] = found = stamp, transposed
        return found[1]


class InRows(Shared):
    """With norms and masks gathered for every row; without unit masks, a pass asks one task alone."""

    def __init__(self, bank: TaskModels, encoder: ViTEncoder) -> None:
        super().__init__(bank, encoder)
        self._features = Recording(self._answer, bank.compute)
        self._stacked: tuple[list[Stamp], Tensor, Tensor] | None = None

    def _answer(self, tokens: Tensor, norms: Tensor, *rest: Tensor) -> Tensor:
        """Norms with an axis of rows come with masks and the shared weights, others with a task's own weights."""
        masks, weights = (rest[0], rest[1:]) if norms.dim() == 4 else (None, rest)
        return self.encoder.beyond(tokens, norms, weights, masks)

    @cached_property
    def _mixes(self) -> bool:
        return self.bank.unit_mask(0) is not None

    def passes(self, pieces: list[Piece], tokens: int) -> Iterator[list[Piece]]:
        """One number of rows for all, of several tasks where masks can tell them apart."""
        if self._mixes:
            return _grouped(pieces, ROWS)
        return (group for piece in pieces for group in _grouped([piece], ROWS))

    def ask(self, tokens: Tensor, pieces: list[Piece]) -> Tensor:
        """One replay; rows that are missing are those of the first image."""
        device, bank = tokens.device, self.bank
        count = sum(len(piece.rows) for piece in pieces)
        size = ROWS if records(device) else count
        rows = torch.zeros(2, size, dtype=torch.long)  # image and task
        rows[0, :count] = torch.cat([piece.rows for piece in pieces])
        rows[1, :count] = torch.cat([torch.full_like(piece.rows, piece.task) for piece in pieces])
        images, tasks = rows.to(device, non_blocking=True)
        if self._mixes:
            norms, masks = self._stacks()
            given = norms[tasks], masks[tasks], *bank.adapters.weights
        else:
            given = bank.tasks[pieces[0].task].norms, *bank.weights(pieces[0].task)
        return self._features(tokens[images], *given)[:count]

    def _stacks(self) -> tuple[Tensor, Tensor]:
        """Norms and masks of all tasks, `[tasks, ...]`."""
        stamps = [Stamp(self.bank, t) for t in range(len(self.bank.tasks))]
        if self._stacked is None or self._stacked[0] != stamps:
            masks = [self.bank.unit_mask(t) for t in range(len(self.bank.tasks))]
            norms = torch.stack([model.norms for model in self.bank.tasks])
            self._stacked = stamps, norms, torch.stack([mask for mask in masks if mask is not None])
        return self._stacked[1:]


def asking(bank: TaskModels, encoder: Encoder, compute: Compute) -> Asking:
    """How this encoder is best asked on this device."""
    if not isinstance(encoder, ViTEncoder):
        return OneByOne(bank)
    transposed = compute.device.type == "cpu" and compute.dtype == torch.float32 and TransposedTrunk.serves(encoder)
    return OnCPU(bank, encoder) if transposed else InRows(bank, encoder)


def _pieces(questions: Sequence[Question], start: int, count: int) -> Iterator[Piece]:
    """What each question asks of a block of images."""
    for number, (task, rows) in enumerate(questions):
        own = torch.arange(count) if rows is None else rows[(rows >= start) & (rows < start + count)] - start
        if len(own):
            yield Piece(number, task, own)


def _grouped(pieces: list[Piece], limit: int) -> Iterator[list[Piece]]:
    """Pieces, cut where they must be, in groups of `limit` rows; the last may have fewer."""
    group: list[Piece] = []
    room = limit
    for piece in pieces:
        rows = piece.rows
        while len(rows):
            group.append(piece._replace(rows=rows[:room]))
            rows, room = rows[room:], room - len(group[-1].rows)
            if not room:
                yield group
                group, room = [], limit
    if group:
        yield group
