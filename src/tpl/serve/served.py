"""The model being served: one immutable snapshot at a time, exchanged in a single step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpl.answers import DIGITS
from tpl.learner import Answer, Learner
from tpl.serve.examples import Example, nearest, one_of_each
from tpl.store import ModelStore

PICTURED_CLASSES = 300


@dataclass(frozen=True)
class Place:
    """Where the model is, and how to compute with it."""

    path: Path
    device: str = "auto"
    precision: str = "auto"
    weights: Path | None = None
    epochs: int | None = None  # of new tasks; None: by their number of images

    def load(self) -> Learner:
        """The committed model."""
        return Learner.load(self.path, weights=self.weights, device=self.device, precision=self.precision)


@dataclass(frozen=True)
class Question:
    """One image as the encoder takes it, and what is wanted: the `top` classes, all tasks, stored examples."""

    pixels: Tensor
    top: int
    tasks: bool = False
    examples: int = 0


@dataclass(frozen=True)
class Reply:
    """What the model says of one image."""

    answer: Answer
    top: int
    tasks: tuple[tuple[str, float], ...] | None = None
    examples: tuple[Example, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As `tpl predict --json` prints it, and what was asked for besides."""
        content = self.answer.to_dict(self.top)
        if self.tasks is not None:
            content["tasks"] = [{"task": name, "probability": round(p, DIGITS)} for name, p in self.tasks]
        if self.examples is not None:
            content["examples"] = [example.to_dict() for example in self.examples]
        return content


class Served:
    """One loaded model. Nothing in it ever changes; a new task makes a new one."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.stamp = stamp(place.path)
        self.learner = place.load()
        self.commits: int = ModelStore(place.path).header().get("commits", 0)
        self.owner = {name: t for t, classes in enumerate(self.learner.method.task_classes_) for name in classes}
        self.task_names = [record.name for record in self.learner.tasks_]
        if self.owner:  # the first pass is slow: better now than in somebody's request
            pre = self.learner.method.preprocess
            self.ask([Question(torch.zeros(3, pre.height, pre.width, dtype=torch.uint8), 1)])

    def ask(self, questions: Sequence[Question]) -> list[Reply]:
        """All questions in one pass through the network."""
        pixels = torch.stack([question.pixels for question in questions])
        wide = any(question.tasks for question in questions)
        top = len(self.owner) if wide else max(question.top for question in questions)
        answers = self.learner.answers_of(pixels, top)
        return [self._reply(question, answer) for question, answer in zip(questions, answers, strict=True)]

    def _reply(self, question: Question, answer: Answer) -> Reply:
        tasks = examples = None
        if question.tasks:  # P(task) is what its classes have together
            shares = [0.0] * len(self.task_names)
            for name, probability in answer.top:
                shares[self.owner[name]] += probability
            tasks = tuple(zip(self.task_names, shares, strict=True))
        if question.examples:
            examples = tuple(nearest(self.learner, question.pixels, self.owner[answer.name], question.examples))
        return Reply(answer, question.top, tasks, examples)

    @cached_property
    def description(self) -> dict[str, Any]:
        """What GET /model says."""
        method = self.learner.method
        files = [file for file in self.place.path.rglob("*") if file.is_file()]
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
            "rejection_floor": self.learner.rejection_floor() if self.owner else 1.0,
            "device": str(method.compute.device),
        }

    @cached_property
    def pictures(self) -> dict[str, str]:
        """One stored image a class."""
        return one_of_each(self.learner, PICTURED_CLASSES)


class Holder:
    """Hands out the newest snapshot; whoever has an older one may finish with it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.current = Served(place)
        self._loading = threading.Lock()

    def is_stale(self) -> bool:
        """Whether the directory holds a newer model, committed by a worker or by `tpl learn` elsewhere."""
        return stamp(self.place.path) not in (None, self.current.stamp)

    def refresh(self) -> Served:
        """Load the directory's model if it is newer, then exchange; on failure the old one stays."""
        with self._loading:
            if self.is_stale():
                self.current = Served(self.place)
            return self.current


def stamp(path: Path) -> tuple[int, int] | None:
    """What changes with every commit: model.json is replaced, never rewritten."""
    try:
        status = ModelStore(path).header_file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
