"""Answers from a Ray cluster: readers on all its machines, and batches given to whoever has least to do.

This machine reads the files and sends them, model included: the others need nothing but tpl (and an encoder's weights).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tpl.bulk.answered import Answered
from tpl.bulk.reader import Model, Reader, Sent
from tpl.cluster import Room, chosen_threads, connect, load_ray, pack, share_out
from tpl.errors import TplError
from tpl.stream import Found, UnreadableImage

TICK = 1.0
ATTEMPTS = 3  # readers that may die at one batch
AHEAD = 2  # batches a reader is given at a time: the next is there when one is done
MANY = 1 << 30  # nobody has counted the images


def _batches(found: Iterable[Found], size: int) -> Iterator[list[Sent]]:
    source = iter(found)
    while some := list(islice(source, size)):
        yield [_sent(item) for item in some]


def _sent(item: Found) -> Sent:
    try:
        return Sent(item.name, item.read())
    except UnreadableImage as error:
        return Sent(item.name, None, str(error))


@dataclass
class _Piece:
    """A batch: the how-manieth, its first image, where Ray keeps it, and who tried."""

    number: int
    first: str
    images: Any
    attempts: int = 0
    reader: Any = None


class Readers:
    """Readers on all machines of a cluster, and what they are at."""

    def __init__(self, model: Path, weights: Path | None, device: str, top: int, address: str | None) -> None:
        self.ray, self.top = load_ray(), top
        self.own = connect(address)
        try:
            self.share = share_out(Room.of_all(self.ray), device, MANY)
        except TplError:
            self._leave()
            raise
        place = None if weights is None else str(weights.expanduser().absolute())
        self.model = Model((self.ray.put(pack(model)),), place, device, chosen_threads(self.share.threads))
        self.loads: dict[Any, int] = {}  # by reader
        self.working: dict[Any, _Piece] = {}  # by the answer to come
        self.returned: deque[_Piece] = deque()

    def answer(self, found: Iterable[Found], size: int) -> Generator[Answered]:
        """What the model says of found images, `size` of them at a time, in their order; close it to stop early."""
        try:
            yield from self._answers(_batches(found, size))
        finally:
            for reader in self.loads:
                self.ray.kill(reader)
            self._leave()

    def _leave(self) -> None:
        if self.own:
            self.ray.shutdown()

    def _answers(self, batches: Iterator[list[Sent]]) -> Iterator[Answered]:
        """One for each batch; a few are worked at ahead."""
        pieces = (_Piece(number, images[0].name, self.ray.put(images)) for number, images in enumerate(batches))
        done: dict[int, Answered] = {}
        told = 0
        while True:
            room = max(1, self.share.fits(Room.of_all(self.ray)))
            while len(done) + len(self.working) < AHEAD * room:
                piece = self.returned.popleft() if self.returned else next(pieces, None)
                if piece is None:
                    break
                self._give(piece, room)
            if not self.working:
                return
            for answer in self.ray.wait(list(self.working), timeout=TICK)[0]:
                self._collect(answer, done)
            while told in done:
                yield done.pop(told)
                told += 1

    def _give(self, piece: _Piece, room: int) -> None:
        reader = min(self.loads, key=lambda one: self.loads[one], default=None)
        if reader is None or (self.loads[reader] and len(self.loads) < room):
            options = {"num_cpus": self.share.cpus, "num_gpus": self.share.gpus, "scheduling_strategy": "SPREAD"}
            reader = self.ray.remote(Reader).options(max_restarts=0, **options).remote(self.model)
            self.loads[reader] = 0
        self.loads[reader] += 1
        piece.reader, piece.attempts = reader, piece.attempts + 1
        self.working[reader.answer.remote(piece.images, self.top)] = piece

    def _collect(self, answer: Any, done: dict[int, Answered]) -> None:
        piece = self.working.pop(answer)
        errors = self.ray.exceptions
        try:
            done[piece.number] = self.ray.get(answer)
            self.loads[piece.reader] -= 1
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, TplError):
                raise TplError(str(cause)) from None
            raise TplError(f"A machine of the cluster could not answer: {type(cause).__name__}: {cause}.") from None
        except errors.RayError as error:  # the reader, or its machine, is gone: another one takes the batch
            self.loads.pop(piece.reader, None)
            if piece.attempts == ATTEMPTS:
                raise TplError(
                    f"{ATTEMPTS} workers died at the images from {piece.first} on ({type(error).__name__}); "
                    "they may have run out of memory: try a smaller --batch."
                ) from None
            self.returned.append(piece)
