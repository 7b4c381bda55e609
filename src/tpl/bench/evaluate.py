"""Evaluating a method on the test images of all tasks seen so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpl.bench import metrics
from tpl.methods import Method
from tpl.methods.bank import BankMethod, Outputs, Question
from tpl.methods.base import task_of_class
from tpl.stream import ImageSet, Stream, fingerprint

PROBE = 256  # test images of a task that its features' drift is measured on


@dataclass(frozen=True)
class StageResult:
    """One row of each accuracy matrix, and how well task scores told the tasks apart."""

    cil: list[float]  # class known among all classes so far
    til: list[float]  # class known among the true task's classes
    tp: list[float]  # task predicted
    detection: dict[str, float] | None  # AUROC and FPR95 of the task scores, where the method has any
    passes: float | None  # task models asked about a test image, on average, where the method has any
    drift: float | None  # largest change of an old task's features since it was learned, on some of its test images
    task_confusion: list[list[int]]  # how many test images of each task (rows) were taken for each (columns)
    class_accuracy: list[float | None]  # class known among all so far, for each class; None without test images


class Evaluator:
    """Keeps the test images, and what task models said of them where that can never change."""

    def __init__(self, stream: Stream, method: Method) -> None:
        self.stream, self.method = stream, method
        self.pixels: list[Tensor] = []
        self.known: list[Outputs] = []  # one entry a task model, over all test images so far
        self.common: list[Tensor | None] = []  # what a method sees of each task's test images beside its models
        self.learned: list[Tensor] = []  # the features of some test images as each task's model saw them at first
        self.task_of_class = task_of_class([task.classes for task in stream])
        self.beside: Sequence[Evaluator] = ()  # of runs in step with this one, which measure before it

    def stage(self, upto: int) -> StageResult:
        """Accuracies on tasks 0..`upto`, which the method has learned."""
        seen = len(self.pixels)
        twin = self._twin(upto)
        while len(self.pixels) <= upto:
            images = self.stream[len(self.pixels)].test
            assert images is not None  # Benchmark.stream sees to it
            self.pixels.append(self._prepare(images) if twin is None else twin.pixels[len(self.pixels)])
        if twin is not None:
            self.known = list(twin.known)
            seen = upto + 1
        answers, scores = self._ask(seen)
        sizes = [len(pixels) for pixels in self.pixels]
        rows = [
            accuracies(part, self._labels(i), i, self.task_of_class[: answers.shape[1]])
            for i, part in enumerate(answers.split(sizes))
        ]
        detection = None
        if scores is not None and upto > 0:
            detection = metrics.detection(scores, np.repeat(np.arange(len(sizes)), sizes))
        cil, til, tp = (list(column) for column in zip(*rows, strict=True))
        labels = torch.cat([self._labels(i) for i in range(len(sizes))])
        confusion = task_confusion(answers, labels, self.task_of_class[: answers.shape[1]])
        known = class_accuracy(answers, labels)
        return StageResult(cil, til, tp, detection, self._passes(), self._drift(), confusion, known)

    def _twin(self, upto: int) -> Evaluator | None:
        """One that has asked the same task models about the same images already, as those of TPL, MORE and ROW are."""
        method = self.method
        if not isinstance(method, BankMethod) or type(method).answers is not BankMethod.answers:
            return None
        if method.bank.same_as is None or not method.outputs_are_final:
            return None
        for other in self.beside:
            asked = other.method
            if isinstance(asked, BankMethod) and asked.bank is method.bank.same_as and len(other.pixels) == upto + 1:
                plain = type(asked).answers is BankMethod.answers and len(other.known) == len(method.bank.tasks)
                if plain and other._tests == self._tests:
                    return other
        return None

    @cached_property
    def _tests(self) -> str:
        """What tells the test images of all tasks from others."""
        return fingerprint([task.test for task in self.stream])

    def _prepare(self, images: ImageSet) -> Tensor:
        """The images as the encoder takes them, on the GPU as long as they leave most of its memory free."""
        preprocess, compute = self.method.preprocess, self.method.compute
        fits = compute.room_for(len(images) * preprocess.bytes_per_image)
        return preprocess.batch(images, device=compute.device if fits else None)

    def _ask(self, seen: int) -> tuple[Tensor, NDArray[np.float64] | None]:
        """log P(class) of all test images, and task scores where the method has any; `seen` tasks were asked before."""
        method = self.method
        if not isinstance(method, BankMethod):
            return torch.cat([method.log_probabilities(pixels) for pixels in self.pixels]).cpu(), None
        if not method.outputs_are_final and len(self.known) < len(method.bank.tasks):
            self.known = []  # a new task has moved the old ones' outputs
        old_models = len(self.known)
        fresh = [method.answers(pixels, [Question(m) for m in range(old_models)]) for pixels in self.pixels[seen:]]
        for model, before in enumerate(self.known):
            self.known[model] = _joined([before, *(told[model] for told in fresh)])
        new = [Question(model) for model in range(old_models, len(method.bank.tasks))]
        told = [method.answers(pixels, new) for pixels in self.pixels]
        self.known += [_joined(list(each)) for each in zip(*told, strict=True)]
        self.common += [method.common_features(pixels) for pixels in self.pixels[len(self.common) :]]
        common = self._common()
        scores = method.task_scores(self.known, common)
        return method.log_probabilities_of(self.known, scores, common).cpu(), scores.cpu().numpy()

    def _common(self) -> Tensor | None:
        found = [features for features in self.common if features is not None]
        return torch.cat(found) if found else None

    def _passes(self) -> float | None:
        return self.method.passes(self._common()) if isinstance(self.method, BankMethod) else None

    def _drift(self) -> float | None:
        """Asks every task's model again about the images it was first asked about."""
        if not isinstance(self.method, BankMethod):
            return None
        bank, drift = self.method.bank, 0.0
        for task in range(len(bank.tasks)):
            features = bank.outputs(self.pixels[task][:PROBE], task).features
            if task < len(self.learned):
                drift = max(drift, float((features - self.learned[task]).abs().max()))
            else:
                self.learned.append(features)
        return drift

    def _labels(self, task: int) -> Tensor:
        images = self.stream[task].test
        assert images is not None
        offset = sum(len(t.classes) for t in self.stream[:task])
        return torch.tensor(np.asarray(images.labels)) + offset


def _joined(parts: list[Outputs]) -> Outputs:
    return Outputs(*(torch.cat(column) for column in zip(*parts, strict=True)))


def accuracies(
    log_probabilities: Tensor, labels: Tensor, task: int, task_of_class: Tensor
) -> tuple[float, float, float]:
    """CIL, TIL and task-prediction accuracy of images that all belong to `task`.

    CIL: argmax over all classes. TIL: argmax over the true task's classes. TP: the task with the largest
    P(task | x) = sum of P(class | x) over its classes, so it is defined for every method alike.
    """
    cil = log_probabilities.argmax(dim=1) == labels
    inside = log_probabilities.masked_fill(task_of_class != task, -torch.inf)
    til = inside.argmax(dim=1) == labels
    tp = predicted_tasks(log_probabilities, task_of_class) == task
    return tuple(float(hit.double().mean()) for hit in (cil, til, tp))  # type: ignore[return-value]


def predicted_tasks(log_probabilities: Tensor, task_of_class: Tensor) -> Tensor:
    """The task with the largest P(task | x) of every image."""
    groups: Sequence[int] = range(int(task_of_class.max()) + 1)
    by_task = torch.stack([log_probabilities[:, task_of_class == g].logsumexp(dim=1) for g in groups], dim=1)
    return by_task.argmax(dim=1)


def task_confusion(log_probabilities: Tensor, labels: Tensor, task_of_class: Tensor) -> list[list[int]]:
    """How many images of each task (rows) were taken for each task (columns), as the task prediction of TP sees it."""
    tasks = int(task_of_class.max()) + 1
    pairs = task_of_class[labels] * tasks + predicted_tasks(log_probabilities, task_of_class)
    rows: list[list[int]] = pairs.bincount(minlength=tasks**2).view(tasks, tasks).tolist()
    return rows


def class_accuracy(log_probabilities: Tensor, labels: Tensor) -> list[float | None]:
    """The share of each class's images that were given this class among all; None for a class without images."""
    classes = log_probabilities.shape[1]
    images = labels.bincount(minlength=classes)
    right = labels[log_probabilities.argmax(dim=1) == labels].bincount(minlength=classes)
    return [r / n if n else None for r, n in zip(right.tolist(), images.tolist(), strict=True)]
