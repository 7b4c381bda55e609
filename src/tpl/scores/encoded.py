"""Whose are they, in the encoder's own space? Gaussians of all classes under one covariance, from sums alone.

The space is the same for every task, for ever, so what was noted of old images stays comparable with new ones: a mean
per class and the scatter around the means are all that is kept, and both are exact sums over every image ever seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from tpl.scores.mahalanobis import Mahalanobis
from tpl.scores.statistics import ClassStatistics

KEPT = ("means_", "counts_", "pooled_", "scatter_")


class EncoderSpace(Mahalanobis):
    """The classes of all tasks in the encoder's own features.

    Numbers are kept in float32, and rounded to that at once: a stored model answers as the one that was stored.
    """

    def learn(self, z: Tensor, y: Tensor) -> Self:
        """Take up classes that are new; `y` counts from 0 among them."""
        if not self.known:
            return self.fit_features(z, z, y)
        return self.merge(z, y + len(self.means_))

    def forget(self, c: int) -> Self:
        """Drop the centre of one class; its part of the scatter belongs to no single one and stays."""
        super().forget(c)
        return self._take(self.statistics)

    @property
    def known(self) -> bool:
        """Whether any class is here."""
        return hasattr(self, "means_")

    def contrast(self, z: Tensor, sizes: Sequence[int]) -> Tensor:
        """How much nearer each task's classes are than all others', `[n, tasks]`; `sizes` are their numbers of classes.

        (min_c D_c(z) over others' classes - min_c D_c(z) over the task's own) / d, with D the squared Mahalanobis
        distance. Over the training images D to the own class is d on average, so this is a log-likelihood ratio of
        Gaussians in units of what an own image has.
        """
        nearest = torch.stack([own.amin(dim=1) for own in self.distances(z).split(list(sizes), dim=1)], dim=1)
        if nearest.shape[1] == 1:
            return torch.zeros_like(nearest)
        best, second = nearest.topk(2, dim=1, largest=False).values.unbind(1)
        others = torch.where(nearest == best.unsqueeze(1), second.unsqueeze(1), best.unsqueeze(1))
        return (others - nearest) / z.shape[1]

    def _take(self, statistics: ClassStatistics) -> Self:
        means, scatter = (part.float().double() for part in (statistics.means, statistics.scatter))
        return super()._take(statistics._replace(means=means, scatter=scatter))

    def state(self) -> dict[str, Tensor]:
        """The sums; the whitening follows from them."""
        return {name: getattr(self, name).float() for name in KEPT} if self.known else {}

    def load_state(self, state: dict[str, Tensor]) -> Self:
        """Take up what `state` gave; nothing, if that was nothing."""
        if not state:
            return self
        super().load_state({name: state[name].double() for name in KEPT})
        return self._take(self.statistics)
