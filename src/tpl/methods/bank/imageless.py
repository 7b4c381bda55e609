"""Statistics that replace the replay memory where no image may be stored.

`features`: a mean per class and one scatter matrix of the encoder's own features (`EncoderSpace`), from which the
distance to other tasks' classes is computed, as otherwise from the memory. `none`: not even these. With both, the
weights of the scores (logits, distances) are fitted on every new task's images under the old tasks' models
(`Evidence`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from tpl.scores.distances import ClassStatistics, Mahalanobis
from tpl.scores.ratio import LOGITS, RatioConfig
from tpl.store import under_prefix

IMAGES, FEATURES, NONE = "images", "features", "none"
KINDS = (IMAGES, FEATURES, NONE)
SHOWN = 512  # number of a new task's images that are run through the old tasks' models
SPACE, SUMS = "memory.encoder.", "memory.evidence."
DISTANCE = len(LOGITS)  # the column of S_MD in the evidence; the contrast in encoder features is the next
TINY = 1e-9  # of the mean variance, added to every variance, so that constant evidence gets no weight
KEPT = ("means_", "counts_", "pooled_", "scatter_")


class StoredStatistics:
    """Sums over images that are not stored, and the scores and weights computed from them."""

    def __init__(self, kind: str, shrinkage: str) -> None:
        self.space = EncoderSpace(shrinkage) if kind == FEATURES else None
        self.evidence = Evidence(DISTANCE + 1 + (kind == FEATURES))

    def contrast(self, common: Tensor, task_classes: Sequence[Sequence[str]]) -> Tensor:
        """`EncoderSpace.contrast` of every task, `[n, tasks]`."""
        assert self.space is not None
        return self.space.contrast(common[:, : self.space.means_.shape[1]], [len(names) for names in task_classes])

    def weigh(self, evidence: Tensor) -> None:
        """Add evidence `[n, tasks, kinds]` on images of the newest task, which is the last."""
        self.evidence.add(evidence[:, -1], evidence[:, :-1].flatten(0, 1))

    def weights(self, config: RatioConfig, contrasted: bool) -> Tensor:
        """The weight of every kind of evidence; 0 for those that the options exclude."""
        kinds = [] if config.logit_score == "none" else [list(LOGITS).index(config.logit_score)]
        kinds += [] if config.in_task == "none" else [DISTANCE]
        kinds += [DISTANCE + 1] if contrasted else []
        weights = torch.zeros(DISTANCE + 1 + contrasted, dtype=torch.float64)
        weights[kinds] = self.evidence.weights(kinds)
        return weights

    @property
    def bytes_used(self) -> int:
        """Size of the sums."""
        return sum(t.numel() * t.element_size() for t in self.state().values())

    def state(self) -> dict[str, Tensor]:
        """All sums."""
        space = {} if self.space is None else self.space.state()
        sums = {SUMS + k: v for k, v in self.evidence.state().items()}
        return sums | {SPACE + k: v for k, v in space.items()}

    def load_state(self, shared: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        if self.space is not None:
            self.space = EncoderSpace(self.space.shrinkage).load_state(under_prefix(SPACE, shared))
        if sums := under_prefix(SUMS, shared):
            self.evidence.load_state(sums)


def some_rows(count: int) -> Tensor:
    """Rows of a task's images to run through the old tasks' models: evenly spread, so from all its classes."""
    return torch.linspace(0, count - 1, min(count, SHOWN)).round().long()


class EncoderSpace(Mahalanobis):
    """Gaussians of all tasks' classes under one covariance, in the encoder's own features.

    No task changes these features, so a mean per class and the scatter around the means, exact sums over all images
    learned, are enough to compare old classes with new ones. Both are stored in float32, and rounded to it at once, so
    that a loaded model predicts the same.
    """

    def learn(self, z: Tensor, y: Tensor) -> Self:
        """Add new classes; `y` counts from 0 among them."""
        if not self.known:
            return self.fit_features(z, z, y)
        return self.merge(z, y + len(self.means_))

    def forget(self, c: int) -> Self:
        """Remove the mean of one class; the scatter, which is pooled over classes, stays."""
        super().forget(c)
        return self._take(self.statistics)

    @property
    def known(self) -> bool:
        """Whether any class was added."""
        return hasattr(self, "means_")

    def contrast(self, z: Tensor, sizes: Sequence[int]) -> Tensor:
        """How much closer a feature is to a task's classes than to others', `[n, tasks]`; `sizes` are class counts.

        (min_c D_c(z) over others' classes - min_c D_c(z) over the task's own) / d, with D the squared Mahalanobis
        distance: a log-likelihood ratio of Gaussians, divided by the mean of D to the own class over training images.
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
        """The sums; the whitening matrix is computed from them."""
        return {name: getattr(self, name).float() for name in KEPT} if self.known else {}

    def load_state(self, state: dict[str, Tensor]) -> Self:
        """Restore what `state` returned."""
        if not state:
            return self
        super().load_state({name: state[name].double() for name in KEPT})
        return self._take(self.statistics)


class Evidence:
    """Weights of several scores in one: Fisher's discriminant between a task's own images and others, from sums alone.

    A new task's images are foreign to the models of all earlier tasks. Their scores under these, against those under
    the new model, show how well each kind of evidence (logits, distances) separates own from foreign images. Without
    replay no model was trained on another task's images, so the weights also apply to pairs of tasks never compared.
    """

    def __init__(self, kinds: int) -> None:
        self.own_ = torch.zeros(kinds + 1, kinds + 1, dtype=torch.float64)
        self.foreign_ = torch.zeros_like(self.own_)

    def add(self, own: Tensor, foreign: Tensor) -> Self:
        """Add evidence `[n, kinds]` on own and on foreign images."""
        self.own_ = self.own_ + _sums(own).cpu()
        self.foreign_ = self.foreign_ + _sums(foreign).cpu()
        return self

    def weights(self, kinds: Sequence[int]) -> Tensor:
        """The weights of some kinds of evidence, `[len(kinds)]`, none below 0, with sum 1.

        w = S^-1 (m_own - m_foreign), S the mean of both covariances. Evidence with a negative weight is left
        out and the others are weighed again; without any foreign image all weights are equal.
        """
        used = list(range(len(kinds)))
        while self.own_[0, 0] > 0 and self.foreign_[0, 0] > 0 and used:
            (own, own_spread), (foreign, foreign_spread) = (
                _moments(sums, [kinds[i] for i in used]) for sums in (self.own_, self.foreign_)
            )
            spread = (own_spread + foreign_spread) / 2
            spread = spread + TINY * spread.diagonal().mean().clamp_min(1e-12) * torch.eye(len(used)).to(spread)
            found = torch.linalg.solve(spread, own - foreign)
            if bool((found > 0).all()):
                weights = torch.zeros(len(kinds), dtype=torch.float64)
                weights[used] = found / found.sum()
                return weights
            used = [i for i, weight in zip(used, found.tolist(), strict=True) if weight > 0]
        return torch.full((len(kinds),), 1 / max(len(kinds), 1), dtype=torch.float64)

    def state(self) -> dict[str, Tensor]:
        """The sums."""
        return {"own_": self.own_, "foreign_": self.foreign_}

    def load_state(self, state: dict[str, Tensor]) -> Self:
        """Restore what `state` returned."""
        self.own_, self.foreign_ = state["own_"].cpu(), state["foreign_"].cpu()
        return self


def _sums(rows: Tensor) -> Tensor:
    """Count, sums and products of rows, in one matrix."""
    extended = torch.cat([torch.ones_like(rows[:, :1]), rows], dim=1).double()
    return extended.T @ extended


def _moments(sums: Tensor, kinds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Mean and covariance of some kinds."""
    places = torch.tensor(kinds) + 1
    mean = sums[0, places] / sums[0, 0]
    return mean, sums[places][:, places] / sums[0, 0] - torch.outer(mean, mean)
