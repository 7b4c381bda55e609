"""Answers for any number of images: in this process, or on a Ray cluster. They come in the order of the images.

`ray.data` is not used: its input is files that all machines see or a data set in memory, while here one machine reads
images of any number, from folders, zips or paths on stdin, and sends them to the others with the model.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from tpl._version import __version__
from tpl.answers import Answer
from tpl.cluster import Machine, chosen_threads, connect, load_ray, pack, share_out, unpack, use_threads
from tpl.errors import TplError
from tpl.files import at_home
from tpl.learner import Learner
from tpl.stream import Batch, Found, UnreadableImage, batches

TICK = 1.0  # seconds between two looks at which machines there are
ATTEMPTS = 3  # workers that may die at one batch
RETURNS = 20  # times that a batch may come back from a worker that cannot be reached, which says nothing of the batch
AHEAD = 2  # batches a worker is given at a time: the next is there when one is done
MANY = 1 << 30  # nobody has counted the images


@dataclass(frozen=True)
class Answered:
    """Images by name; `errors` has a reason for each that cannot be read, `answers` has one for each of the others."""

    names: tuple[str, ...]
    errors: tuple[str | None, ...]
    answers: tuple[Answer, ...]


def answer_here(learner: Learner, found: Iterable[Found], size: int, top: int) -> Generator[Answered]:
    """What a learner answers for found images, `size` of them at a time."""
    with closing(batches(found, learner.method.preprocess, size)) as ready:
        for batch in ready:
            yield _answer(learner, batch, top)


def _answer(learner: Learner, batch: Batch, top: int) -> Answered:
    answers = learner.answers_of(batch.pixels, top) if len(batch.pixels) else []
    return Answered(batch.names, batch.errors, tuple(answers))


# On the machines of a cluster


@dataclass(frozen=True)
class SentImage:
    """The content of an image file; without content, the reason why it cannot be read."""

    name: str
    content: bytes | None
    error: str = ""

    @classmethod
    def of(cls, item: Found) -> SentImage:
        """A found image, read now."""
        try:
            return cls(item.name, item.read())
        except UnreadableImage as error:
            return cls(item.name, None, str(error))

    def read(self) -> bytes:
        """The content, or the error that reading the file gave."""
        if self.content is None:
            raise UnreadableImage(self.error)
        return self.content


@dataclass(frozen=True)
class SentModel:
    """What a worker needs to load the model."""

    directory: tuple[Any]  # the ObjectRef of a Payload: in a tuple, so that Ray leaves fetching it to the worker
    weights: str | None
    device: str
    threads: int
    version: str = __version__

    def load(self) -> Learner:
        """The model, on this machine."""
        if self.version != __version__:
            raise TplError(f"tpl is {__version__}, not {self.version}: install the same on all machines.")
        use_threads(self.threads)
        with tempfile.TemporaryDirectory(prefix="tpl-model-") as place:
            unpack(load_ray().get(self.directory[0]), Path(place))
            return Learner.load(place, self.weights, self.device)


class Worker:
    """An actor of Ray that gets the model once, and images batch by batch."""

    def __init__(self, model: SentModel) -> None:
        self.model = model
        self.learner: Learner | None = None

    def answer(self, images: list[SentImage], top: int) -> Answered:
        """The model is loaded at the first call: what is wrong with it is then an error of a call, not of the actor."""
        if self.learner is None:
            try:
                self.learner = self.model.load()
            except TplError as error:
                raise TplError(f"On {socket.gethostname()}: {error}") from error
        use_threads(self.model.threads)
        (batch,) = batches(images, self.learner.method.preprocess, len(images))
        return _answer(self.learner, batch, top)


@dataclass
class _Pending:
    """A batch that a worker was given: its first image, the ObjectRefs of its images and of the answer."""

    first: str
    images: Any
    worker: Any = None
    answer: Any = None
    returned: int = 0  # times that its worker could not be reached


class WorkerPool:
    """Workers on all machines of a cluster. Ray starts one that died again, and repeats the calls that it had."""

    def __init__(self, model: Path, weights: Path | None, device: str, top: int, address: str | None) -> None:
        self.ray, self.top = load_ray(), top
        self.own = connect(address)
        try:
            self.share = share_out(Machine.all(self.ray), device, MANY)
        except TplError:
            self._leave()
            raise
        place = None if weights is None else str(at_home(weights).absolute())
        self.model = SentModel((self.ray.put(pack(model)),), place, device, chosen_threads(self.share.threads))
        self.actor = self.ray.remote(
            num_cpus=self.share.cpus,
            num_gpus=self.share.gpus,
            max_restarts=-1,
            max_task_retries=ATTEMPTS - 1,
            scheduling_strategy="SPREAD",
        )(Worker)
        self.workers: list[Any] = []
        self.pending: deque[_Pending] = deque()  # in the order of the images
        self._names = (f"tpl-worker-{number}" for number in count())

    def answer(self, found: Iterable[Found], size: int) -> Generator[Answered]:
        """What the model answers for found images, `size` of them at a time, in their order; close it to stop early."""
        try:
            yield from self._answers(_batches(found, size))
        finally:
            self._kill_all()
            self._leave()

    def _answers(self, batches: Iterator[list[SentImage]]) -> Iterator[Answered]:
        while True:
            room = max(1, self.share.fits(Machine.all(self.ray)))
            if len(self.workers) > room:
                self._start_over(room)
            while len(self.pending) < AHEAD * room and (images := next(batches, None)) is not None:
                batch = _Pending(images[0].name, self.ray.put(images))
                self._give(batch, room)
                self.pending.append(batch)
            if not self.pending:
                return
            if not self.ray.wait([self.pending[0].answer], timeout=TICK)[0]:
                continue
            answered = self._result(self.pending[0])
            if answered is not None:
                self.pending.popleft()
                yield answered
            else:  # Ray knows soon whether the worker is dead
                time.sleep(TICK)
                self._give(self.pending[0], room)

    def _give(self, batch: _Pending, room: int) -> None:
        """Give a batch to the worker with the fewest, or to a new one."""
        answers = [given.answer for given in self.pending if given is not batch]
        waiting = set(self.ray.wait(answers, num_returns=len(answers), timeout=0)[1]) if answers else set()
        loads = Counter(dict.fromkeys(self.workers, 0))
        loads.update(given.worker for given in self.pending if given is not batch and given.answer in waiting)
        worker = min(loads, key=lambda one: loads[one], default=None)
        if worker is None or (loads[worker] and len(self.workers) < room):
            worker = self.actor.options(name=next(self._names)).remote(self.model)
            self.workers.append(worker)
        batch.worker, batch.answer = worker, worker.answer.remote(batch.images, self.top)

    def _start_over(self, room: int) -> None:
        """New workers for what is pending: those of a lost machine would wait for room that others never give up."""
        self._kill_all()
        given, self.pending = self.pending, deque()
        for batch in given:
            self._give(batch, room)
            self.pending.append(batch)

    def _result(self, batch: _Pending) -> Answered | None:
        """The answer for a batch; None if its worker could not be reached, so that it must be given once more."""
        errors = self.ray.exceptions
        try:
            answered: Answered = self.ray.get(batch.answer)
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, TplError):
                raise TplError(str(cause)) from None
            raise TplError(f"A machine of the cluster could not answer: {type(cause).__name__}: {cause}.") from None
        except errors.RayError as error:
            if isinstance(error, errors.ActorUnavailableError) and batch.returned < RETURNS:
                batch.returned += 1
                return None
            raise TplError(
                f"{ATTEMPTS} workers died at the images from {batch.first} on ({type(error).__name__}); "
                "they may have run out of memory: try a smaller --batch."
            ) from None
        return answered

    def _kill_all(self) -> None:
        for worker in self.workers:
            self.ray.kill(worker)
        self.workers.clear()

    def _leave(self) -> None:
        if self.own:
            self.ray.shutdown()


def _batches(found: Iterable[Found], size: int) -> Iterator[list[SentImage]]:
    source = iter(found)
    while some := list(islice(source, size)):
        yield [SentImage.of(item) for item in some]
