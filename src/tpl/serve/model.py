"""The served model: loaded snapshots that are replaced in one step, queries answered in batches, stored examples.

A single thread computes. Queries that arrive while it is busy go together into its next forward pass; a query that
finds it idle waits a few milliseconds for others.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import gc
import io
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl import program
from tpl.answers import DIGITS, Answer
from tpl.learner import Learner
from tpl.store import ModelStore
from tpl.stream.decoding import decode

MAX_PICTURES = 300  # classes shown with a stored image
THUMBNAIL = 112  # pixels of the longer side: sharp at half that size on a phone

Result = TypeVar("Result")


@dataclass(frozen=True)
class ModelSource:
    """The model directory, and how to compute with the model."""

    path: Path
    device: str = "auto"
    precision: str = "auto"
    weights: Path | None = None
    epochs: int | None = None  # of new tasks; None: by their number of images

    def load(self) -> Learner:
        """Load the committed model."""
        return Learner.load(self.path, weights=self.weights, device=self.device, precision=self.precision)


@dataclass(frozen=True)
class ImageQuery:
    """One image as input of the encoder, and what to return: the `top` classes, all tasks, stored examples.

    With `reject`, an image is called unknown if only that share of known images has so high an unknown score.
    """

    pixels: Tensor
    top: int
    tasks: bool = False
    examples: int = 0
    reject: float | None = None


@dataclass(frozen=True)
class Example:
    """A stored image: its class, and its distance to the query (0: features of equal direction, 2: opposite)."""

    name: str
    distance: float
    picture: str  # a data: URL

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"class": self.name, "distance": self.distance, "picture": self.picture}


def thumbnail(image: bytes) -> str:
    """A stored image as a data: URL of a small PNG."""
    picture = decode(image, "a stored image")
    if max(picture.size) > THUMBNAIL:
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


@dataclass(frozen=True)
class Reply:
    """The answer for one image."""

    answer: Answer
    top: int
    tasks: tuple[tuple[str, float], ...] | None = None
    examples: tuple[Example, ...] | None = None
    reject: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The answer as `tpl predict --json` prints it, with tasks and examples if they were requested."""
        content = self.answer.to_dict(self.top)
        if self.reject is not None:
            rejected = self.answer.rejected(self.reject)
            content |= {"class": None if rejected else self.answer.name, "rejected": rejected}
        if self.tasks is not None:
            content["tasks"] = [{"task": name, "probability": round(p, DIGITS)} for name, p in self.tasks]
        if self.examples is not None:
            content["examples"] = [example.to_dict() for example in self.examples]
        return content


class ServedModel:
    """An immutable snapshot of the model; a new task makes a new one."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self.version = version_of(source.path)
        self.learner = source.load()  # which answers a blank image: the slow first forward pass is in no request
        self.commits: int = ModelStore(source.path).header().get("commits", 0)
        self.task_of_class = {
            name: t for t, classes in enumerate(self.learner.method.task_classes_) for name in classes
        }
        self.task_names = [record.name for record in self.learner.tasks_]

    def answer(self, queries: Sequence[ImageQuery]) -> list[Reply]:
        """Answer all queries in one forward pass."""
        pixels = torch.stack([query.pixels for query in queries])
        all_classes = any(query.tasks for query in queries)
        top = len(self.task_of_class) if all_classes else max(query.top for query in queries)
        answers = self.learner.answers_of(pixels, top)
        return [self._reply(query, answer) for query, answer in zip(queries, answers, strict=True)]

    def _reply(self, query: ImageQuery, answer: Answer) -> Reply:
        tasks = examples = None
        if query.tasks:  # P(task) is the sum over its classes
            shares = [0.0] * len(self.task_names)
            for name, probability in answer.top:
                shares[self.task_of_class[name]] += probability
            tasks = tuple(zip(self.task_names, shares, strict=True))
        if query.examples:
            examples = tuple(nearest(self.learner, query.pixels, self.task_of_class[answer.name], query.examples))
        return Reply(answer, query.top, tasks, examples, query.reject)

    @cached_property
    def description(self) -> dict[str, Any]:
        """The content of GET /model."""
        method = self.learner.method
        files = [file for file in self.source.path.rglob("*") if file.is_file()]
        memory = method.memory
        return {
            "method": method.name,
            "commits": self.commits,
            "classes": self.learner.classes_,
            "tasks": [asdict(record) | {"source": Path(record.source).name} for record in self.learner.tasks_],
            "encoder": {
                "name": method.encoder.name,
                "sha256": method.encoder.sha256,
                "image_size": [method.preprocess.width, method.preprocess.height],
            },
            "sizes": {
                "parameters": method.parameters(),
                "directory_bytes": sum(file.stat().st_size for file in files),
                "stored_images": len(memory) if memory is not None else 0,
                "stored_image_bytes": memory.bytes_used if memory is not None else 0,
            },
            "capacity": self.learner.capacity(),
            "rejection_floor": self.learner.facts()["smallest_reject"],
            "device": str(method.compute.device),
        }

    @cached_property
    def pictures(self) -> dict[str, str]:
        """A stored image of each of the first classes, as a thumbnail."""
        memory = self.learner.method.memory
        if memory is None:
            return {}
        pairs = zip(self.learner.classes_, memory.exemplars, strict=False)
        return {name: thumbnail(images[0]) for name, images in list(pairs)[:MAX_PICTURES] if images}


def executor(name: str, workers: int = 1, threads: int = 1) -> ThreadPoolExecutor:
    """Threads of Python, each of which computes with so many threads of torch.

    A thread that computes with several has a team of its own. With two teams, waiting threads sleep instead of
    spinning, and an answer takes twice as long: only the thread that answers has a team. In a program of this
    package all of them round denormal numbers to zero, as every other command does.
    """

    def begin() -> None:
        torch.set_num_threads(threads)
        if program.own:
            torch.set_flush_denormal(True)

    return ThreadPoolExecutor(workers, name, begin)


class CurrentModel:
    """The newest snapshot; requests in progress keep the one they began with."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self._loader = executor("load")
        self.current = self._load()
        self._loading = threading.Lock()

    def _load(self) -> ServedModel:
        return self._loader.submit(ServedModel, self.source).result()

    def is_stale(self) -> bool:
        """Whether the directory has a newer model, committed by a worker or by another process."""
        return version_of(self.source.path) not in (None, self.current.version)

    def close(self) -> None:
        """End the thread that loads."""
        self._loader.shutdown(wait=False, cancel_futures=True)

    def refresh(self) -> ServedModel:
        """Load the directory's model if it is newer; if that fails, the old one stays."""
        with self._loading:
            if self.is_stale():
                self.current = self._load()
                give_back_memory()
            return self.current


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def give_back_memory() -> None:
    """Return the memory of replaced models to the system: glibc keeps it, and a server replaces many of them."""
    gc.collect()
    if _trim is not None:
        _trim(0)


def version_of(path: Path) -> tuple[int, int] | None:
    """A value that changes with every commit, because model.json is replaced; None if there is none."""
    try:
        status = ModelStore(path).header_file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


Pending = tuple[ServedModel, ImageQuery, "asyncio.Future[Reply]"]


class Batcher:
    """Collects queries into batches for the one thread that computes."""

    def __init__(
        self,
        max_batch: int = 32,
        wait_seconds: float = 0.003,
        on_batch: Callable[[int], None] = lambda size: None,
        threads: int | None = None,
    ) -> None:
        self.max_batch, self.wait_seconds, self.on_batch = max_batch, wait_seconds, on_batch
        self._waiting: asyncio.Queue[Pending] = asyncio.Queue()
        self._thread = executor("model", 1, threads or torch.get_num_threads())
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """The number of queries that wait."""
        return self._waiting.qsize()

    def start(self) -> None:
        """Begin to answer; to be called in the event loop."""
        self._task = asyncio.create_task(self._serve())

    async def stop(self) -> None:
        """Finish the current forward pass and stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def answer(self, model: ServedModel, query: ImageQuery) -> Reply:
        """The answer of a snapshot to one query."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((model, query, future))
        return await future

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run a function in the thread that computes, between two forward passes."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def _serve(self) -> None:
        while True:
            batch = [await self._waiting.get()]
            if self._waiting.empty():
                await asyncio.sleep(self.wait_seconds)
            while len(batch) < self.max_batch and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            # Clients that disconnected are not answered. A batch never mixes two snapshots.
            present = [pending for pending in batch if not pending[2].done()]
            for _, group in groupby(present, key=lambda pending: id(pending[0])):
                await self._answer(list(group))

    async def _answer(self, group: list[Pending]) -> None:
        model, futures = group[0][0], [future for _, _, future in group]
        self.on_batch(len(group))
        try:
            replies = await self.call(lambda: model.answer([query for _, query, _ in group]))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # raised for these queries; the next batch is answered
            for future in futures:
                if not future.done():
                    future.set_exception(error)
            return
        for future, reply in zip(futures, replies, strict=True):
            if not future.done():
                future.set_result(reply)


def nearest(learner: Learner, pixels: Tensor, task: int, count: int) -> list[Example]:
    """The stored images nearest to one image in the features of one task's model.

    The distance is between normalised features, as in the score's nearest-neighbour term. Methods without task models
    have no examples.
    """
    method = learner.method
    known = method.memory_features(task)
    if known is None or method.memory is None or not len(known):
        return []
    features = method.task_features(pixels.unsqueeze(0), task)
    assert features is not None  # it has features of the memory, so of this image, too
    features, stored = (F.normalize(z.double(), dim=1) for z in (features, known))
    distances = (2 - 2 * (stored @ features[0])).clamp_min(0).sqrt()
    best = torch.topk(distances, min(count, len(distances)), largest=False)
    labels, classes = method.memory.labels, learner.classes_
    images = [image for images in method.memory.exemplars for image in images]
    return [
        Example(classes[int(labels[row])], float(distance), thumbnail(images[row]))
        for distance, row in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]
