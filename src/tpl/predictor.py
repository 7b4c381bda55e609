"""Asking a method that has learned: names, probabilities, tasks, and whether an image is of any known class."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpl.answers import Answer, TaskEntry, TaskRecord
from tpl.errors import TplError
from tpl.intake import Images, as_image_set
from tpl.methods import Method
from tpl.methods.base import UNKNOWN, task_of_class
from tpl.stream import ImageSet

CHUNK = 1024  # images decoded at a time: any number of them needs the same memory


class Predictor:
    """What can be asked of a method, and what is noted of its tasks."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self._entries: list[TaskEntry] = []

    # What it knows

    @property
    def classes_(self) -> list[str]:
        """All classes learned, in the order of arrival."""
        return self.method.classes_

    @property
    def tasks_(self) -> list[TaskRecord]:
        """How each task was learned, in the order of arrival."""
        return [entry.record for entry in self._noted()]

    def held_out_confusions(self) -> list[tuple[str, str, int]]:
        """The newest task's held-out images that got a wrong name: true, predicted, how often; most frequent first."""
        entries = self._noted()
        return list(entries[-1].confusions) if entries else []

    def capacity(self) -> dict[str, float] | None:
        """How full the network is: shares of units in use and of adapter weights frozen; None if it cannot fill up."""
        return self.method.capacity()

    def _noted(self) -> list[TaskEntry]:
        """One entry a task. A method that was taught without the learner has classes alone."""
        known = {entry.classes: entry for entry in self._entries}
        tasks = self.method.task_classes_
        return [known.get(classes, TaskEntry(f"task {t}", classes)) for t, classes in enumerate(tasks, start=1)]

    # Answers

    def log_probabilities(self, images: Images) -> Tensor:
        """log P(class | image), one row an image, one column a class learned."""
        return self._chunked(images, lambda pixels: self.method.answer(pixels).log_p)

    def predict_proba(self, images: Images) -> NDArray[np.float64]:
        """P(class | image), one row an image, columns as in `classes_`."""
        probabilities: NDArray[np.float64] = self.log_probabilities(images).exp().numpy()
        return probabilities

    def predict(self, images: Images) -> list[str]:
        """The most probable class of every image."""
        best = self.log_probabilities(images).argmax(dim=1)
        return [self.classes_[i] for i in best.tolist()]

    def task_proba(self, images: Images) -> NDArray[np.float64]:
        """P(task | image), one row an image, columns as in `tasks_`."""
        of_class = self.log_probabilities(images).exp()
        owner = task_of_class(self.method.task_classes_)
        of_task = torch.zeros(len(of_class), len(self.method.task_classes_), dtype=of_class.dtype)
        probabilities: NDArray[np.float64] = of_task.index_add(1, owner, of_class).numpy()
        return probabilities

    def unknown_score(self, images: Images) -> NDArray[np.float64]:
        """How little every image looks like any class learned, between 0 and 1.

        Of images of known classes, at most a share `a` reach 1 - a: reject those from 0.95 on, and one in twenty known
        images is lost at most. `rejection_floor` says how small a share can be.
        """
        scores: NDArray[np.float64] = self._chunked(images, self._unknown).numpy()
        return scores

    def _unknown(self, pixels: Tensor) -> Tensor:
        found = self.method.answer(pixels, {UNKNOWN}).unknown
        if found is None:
            raise TplError(
                f"The method '{self.method.name}' cannot tell unknown images: it has no task scores. Use tpl."
            )
        return found

    def rejection_floor(self) -> float:
        """The smallest share of known images at which unknown ones can be told at all; 1 if never.

        It takes 1 / share - 1 held-out images in every task: 19 for 5 %.
        """
        self._refuse_empty()
        return self.method.rejection_floor()

    def answers(self, images: Images, top: int = 5) -> list[Answer]:
        """All there is to say of every image."""
        given = as_image_set(images)
        return [answer for pixels in self._pixels(given) for answer in self.answers_of(pixels, top)]

    def answers_of(self, pixels: Tensor, top: int = 5) -> list[Answer]:
        """`answers` of images that `prepare` has made ready, uint8 `[n, 3, size, size]`."""
        self._refuse_empty()
        told = self.method.answer(pixels, {UNKNOWN})
        count, names = len(told.log_p), self.classes_
        unknown = [0.0] * count if told.unknown is None else told.unknown.tolist()
        passes = [None] * count if told.passes is None else told.passes.tolist()
        tasks = [entry.name for entry in self._noted() for _ in entry.classes]
        best = told.log_p.exp().cpu().topk(min(max(top, 1), len(names)), dim=1)
        rows = zip(best.indices.tolist(), best.values.tolist(), unknown, passes, strict=True)
        return [
            Answer(names[i[0]], p[0], tasks[i[0]], u, tuple((names[j], q) for j, q in zip(i, p, strict=True)), asked)
            for i, p, u, asked in rows
        ]

    def prepare(self, images: Images) -> Tensor:
        """Images as the encoder takes them: uint8 `[n, 3, size, size]`."""
        return self.method.preprocess.batch(as_image_set(images))

    def _pixels(self, images: ImageSet) -> Iterator[Tensor]:
        """Images made ready, a bounded number at a time; no images are one empty batch."""
        for start in range(0, max(len(images), 1), CHUNK):
            yield self.prepare(images.select(np.arange(start, min(start + CHUNK, len(images)))))

    def _chunked(self, images: Images, ask: Callable[[Tensor], Tensor]) -> Tensor:
        self._refuse_empty()
        return torch.cat([ask(pixels).cpu() for pixels in self._pixels(as_image_set(images))])

    def _refuse_empty(self) -> None:
        if not self.classes_:
            raise TplError("Nothing was learned yet: call learn(task) first.")
