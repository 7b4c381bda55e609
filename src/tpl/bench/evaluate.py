"""Evaluating a method on the test images of all tasks seen so far."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpl.bench import metrics
from tpl.methods import Method
from tpl.methods.base import KEEP, task_of_class
from tpl.stream import ImageSet, Stream, fingerprint

PROBE = 64  # test images of a task on which the drift of its features is measured


@dataclass(frozen=True)
class StageResult:
    """One row of each accuracy matrix, and how well task scores separate the tasks."""

    cil: list[float]  # accuracy among all classes so far
    til: list[float]  # accuracy among the true task's classes
    tp: list[float]  # accuracy of the predicted task
    detection: dict[str, float] | None  # AUROC and FPR95 of the task scores, if the method has any
    passes: float | None  # mean number of task models run per image, if the method has any
    drift: float | None  # largest change of an old task's features since it was learned, on some of its test images
    task_confusion: list[list[int]]  # number of test images by true task (rows) and predicted task (columns)
    class_accuracy: list[float | None]  # accuracy among all classes so far, per class; None without test images
    parts: dict[str, dict[str, list[float]]]  # the same rows (cil, til, tp) of each part of a prediction alone


class Evaluator:
    """Evaluates a method after each task; keeps the test images, and outputs of task models that can never change."""

    def __init__(self, stream: Stream, method: Method) -> None:
        self.stream, self.method = stream, method
        self.pixels: list[Tensor] = []
        self.seen: list[Any] = []  # the results of the method's `forward` for each task's test images
        self.learned: list[Tensor] = []  # features of some test images right after their task was learned
        self.task_of_class = task_of_class([task.classes for task in stream])
        self.beside: Sequence[Evaluator] = ()  # evaluators of runs side by side with this one, which measure before it

    def stage(self, upto: int) -> StageResult:
        """Accuracies on tasks 0..`upto`, which the method has learned."""
        twin = self._twin(upto)
        while len(self.pixels) <= upto:
            images = self.stream[len(self.pixels)].test
            assert images is not None  # Benchmark.stream sees to it
            self.pixels.append(self._prepare(images) if twin is None else twin.pixels[len(self.pixels)])
        before = self.seen if twin is None else twin.seen
        pairs = itertools.zip_longest(self.pixels, before)
        self.seen = [self.method.forward(pixels, {KEEP}, earlier) for pixels, earlier in pairs]
        answer = self.method.decide(self.seen)
        table, scores = answer.log_p, answer.scores
        passes = None if answer.passes is None else float(answer.passes.double().mean())
        labels = torch.cat([self._labels(i) for i in range(len(self.pixels))])
        answers = ReadTable.of(table, labels, self.task_of_class[: table.shape[1]])
        detection = None
        if scores is not None and upto > 0:
            detection = metrics.detection(scores.cpu().numpy(), answers.true_tasks.numpy())
        confusion, known = answers.task_confusion(), answers.class_accuracy()
        parts = {
            name: ReadTable.of(log_p, labels, answers.owner).rows()
            for name, log_p in self.method.parts(self.seen, answer).items()
        }
        return StageResult(**answers.rows(), detection=detection, passes=passes, drift=self._drift(),
                           task_confusion=confusion, class_accuracy=known, parts=parts)  # fmt: skip

    def _twin(self, upto: int) -> Evaluator | None:
        """An evaluator that has the outputs of equal task models on equal images: TPL, MORE and ROW share them."""
        for other in self.beside:
            if len(other.seen) == upto + 1 and self.method.shares_forward(other.method) and other._tests == self._tests:
                return other
        return None

    @cached_property
    def _tests(self) -> str:
        """A hash of the test images of all tasks."""
        return fingerprint([task.test for task in self.stream])

    def _prepare(self, images: ImageSet) -> Tensor:
        """The images as the encoder takes them, on the GPU as long as they leave most of its memory free."""
        preprocess, compute = self.method.preprocess, self.method.compute
        fits = compute.room_for(len(images) * preprocess.bytes_per_image)
        return preprocess.batch(images, device=compute.device if fits else None)

    def _drift(self) -> float | None:
        """The largest change of features since each task was learned.

        Each task has a forward pass of its own, equal every time: in another batch, a CPU may round differently.
        """
        probes = [pixels[:PROBE].to(self.method.compute.device) for pixels in self.pixels]
        found = [self.method.task_features(probe, task) for task, probe in enumerate(probes)]
        features = [each for each in found if each is not None]
        if not features:
            return None
        changes = [float((now - then).abs().max()) for now, then in zip(features, self.learned, strict=False)]
        self.learned += features[len(self.learned) :]
        return max(changes, default=0.0)

    def _labels(self, task: int) -> Tensor:
        images = self.stream[task].test
        assert images is not None
        offset = sum(len(t.classes) for t in self.stream[:task])
        return torch.tensor(np.asarray(images.labels)) + offset


@dataclass(frozen=True)
class ReadTable:
    """The predictions in a table of log P(class | image), on the CPU wherever the table was."""

    owner: Tensor  # the task of every class
    labels: Tensor  # the true class of every image
    classes: Tensor  # the most probable class of all
    within: Tensor  # the most probable class of the true task
    tasks: Tensor  # the task with the largest P(task | x), the sum of P(class | x) over its classes

    @classmethod
    def of(cls, table: Tensor, labels: Tensor, owner: Tensor) -> ReadTable:
        """Read a table `[n, classes]`, given the true classes and the task of every class."""
        tasks, truth = owner.to(table.device), labels.to(table.device)
        inside = table.masked_fill(tasks != tasks[truth].unsqueeze(1), -torch.inf)
        by_task = [table[:, tasks == task].logsumexp(dim=1) for task in range(int(owner.max()) + 1)]
        read = table.argmax(dim=1), inside.argmax(dim=1), torch.stack(by_task, dim=1).argmax(dim=1)
        return cls(owner, labels, *(column.cpu() for column in read))

    @property
    def true_tasks(self) -> Tensor:
        """The task of every image."""
        return self.owner[self.labels]

    def accuracies(self, task: int | None = None) -> tuple[float, float, float]:
        """CIL, TIL and task-prediction accuracy, of one task's images or of all.

        CIL: the class is predicted among all classes. TIL: among those of the true task. TP: the task is predicted,
        which is defined in the same way for every method.
        """
        right = self.classes == self.labels, self.within == self.labels, self.tasks == self.true_tasks
        rows = slice(None) if task is None else self.true_tasks == task
        cil, til, tp = (float(hit[rows].double().mean()) for hit in right)
        return cil, til, tp

    def rows(self) -> dict[str, list[float]]:
        """Every task's `accuracies`, as one row of each accuracy matrix: cil, til and tp."""
        tasks = [self.accuracies(task) for task in range(int(self.owner.max()) + 1)]
        return {kind: list(column) for kind, column in zip(("cil", "til", "tp"), zip(*tasks, strict=True), strict=True)}

    def task_confusion(self) -> list[list[int]]:
        """Number of images by true task (rows) and predicted task (columns)."""
        count = int(self.owner.max()) + 1
        pairs = self.true_tasks * count + self.tasks
        rows: list[list[int]] = pairs.bincount(minlength=count**2).view(count, count).tolist()
        return rows

    def class_accuracy(self) -> list[float | None]:
        """The accuracy among all classes, per class; None for a class without images."""
        count = len(self.owner)
        images = self.labels.bincount(minlength=count)
        right = self.labels[self.classes == self.labels].bincount(minlength=count)
        return [r / n if n else None for r, n in zip(right.tolist(), images.tolist(), strict=True)]
