"""TPL's score: a likelihood ratio in feature space, composed with a logit score (paper, Sec. 4.2).

    LR    = beta2 * S_MD + d_kNN(z, others)                                        Eq. 7
    S_TPL = log(exp(beta1 * S_MLS) + exp(LR))            compose="or", Eq. 9
    S_TPL = -log(exp(-beta1 * S_MLS) + exp(-LR))         compose="and", the paper's pseudo-code

beta1 and beta2 are the inverse means of the two scores on the task's training data (Eq. 10). Every
part can be exchanged, so that the paper's ablations are choices made at evaluation time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from tpl.config import Config, option
from tpl.errors import TplError
from tpl.scores.base import Score, positive_mean
from tpl.scores.distances import Mahalanobis, NearestNeighbours
from tpl.scores.logits import Energy, LogitScore, MaxLogit, MaxSoftmax

LOGITS: dict[str, type[LogitScore]] = {s.name: s for s in (MaxLogit, MaxSoftmax, Energy)}


@dataclass(frozen=True)
class RatioConfig(Config):
    """The choices in TPL's score; all but `shrinkage` can be changed on a trained model."""

    logit_score: str = option(
        "mls", "logit score; none leaves the likelihood ratio alone", (*LOGITS, "none"), group="task prediction"
    )
    in_task: str = option(
        "md",
        "E_t: md, or knn over the task's own memory; none leaves the logit score alone",
        ("md", "knn", "none"),
        group="task prediction",
    )
    out_of_task: str = option(
        "knn", "E_tc, over other tasks' memory", ("knn", "md", "constant"), group="task prediction"
    )
    compose: str = option(
        "or", "or: soft maximum, Eq. 9; and: soft minimum, the pseudo-code", ("or", "and"), group="task prediction"
    )
    distance: str = option(
        "l2", "l2: the paper's; squared: the public code's", ("l2", "squared"), group="task prediction"
    )
    k: int = option(5, "which neighbour counts in kNN", minimum=1, group="task prediction")
    beta1: float | str | None = option(
        None,
        "scale of the logit score; none: inverse mean on the training data, Eq. 10; 1.3x: that many inverse means",
        group="task prediction",
    )
    beta2: float | str | None = option(
        None,
        "scale of MD = 1/d^2 (the paper's table is in units of 20/d^2); none: inverse mean; 1.3x: that many of them",
        group="task prediction",
    )
    shrinkage: str = option(
        "auto",
        "covariance of MD; auto: none (the paper's) where samples abound, else oas",
        ("auto", "none", "oas"),
        group="task prediction",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            _factor(name, value)
        if self.logit_score == "none" and self.in_task == "none":
            raise TplError("A score needs at least one part: logit_score and in_task cannot both be none.")


def _factor(name: str, value: float | str | None) -> tuple[float, bool]:
    """The number in a scale, and whether it counts inverse means, as in `1.3x`, or stands for itself."""
    if value is None:
        return 1.0, True
    relative = isinstance(value, str)
    try:
        number = float(value.removesuffix("x")) if isinstance(value, str) else float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf or (isinstance(value, str) and not value.endswith("x")):
        raise TplError(f"{name} must be a number of at least 0, a number of inverse means such as 1.3x, or none.")
    return number, relative


class LikelihoodRatio(Score):
    """TPL's score of one task."""

    name = "tpl"
    summary = "likelihood ratio (MD against kNN over other tasks' memory) composed with the maximum logit"

    scales_: Tensor

    def __init__(self, config: RatioConfig | None = None) -> None:
        self.config = config or RatioConfig()
        self.centres = Mahalanobis(self.config.shrinkage)
        self.own = NearestNeighbours(self.config.k, self.config.distance)
        self.others = NearestNeighbours(self.config.k, self.config.distance)
        self.others_centres: Mahalanobis | None = None
        self.others_scale = 1.0

    def fit_features(self, z: Tensor, logits: Tensor, y: Tensor, others: Tensor | None = None) -> Self:
        """Statistics of the task: centres, covariance, and the mean of every score (Eq. 10)."""
        self.centres.fit_features(z, logits, y)
        self.scales_ = self._means_of_scores(z, logits)
        empty = z[:0]
        return self.refresh(own=empty, others=empty if others is None else others)

    def merge(self, z: Tensor, logits: Tensor, y: Tensor) -> Self:
        """Add more samples of the task's classes; labels `y` count its current classes."""
        before = self.centres.pooled_
        self.centres.merge(z, y)
        share = len(z) / (before + len(z))
        self.scales_ = (1 - share) * self.scales_ + share * self._means_of_scores(z, logits)
        return self

    def counted(self, c: int) -> int:
        """Number of samples of a class in the statistics."""
        if not self.centres.mergeable:
            raise TplError(
                "This task was learned by an earlier version of tpl, which stored too little of it to add images. "
                "Learn it in a new model to update it later."
            )
        return int(self.centres.counts_[c])

    def in_distribution_score(self, z: Tensor, logits: Tensor) -> Tensor:
        """How much an image looks like one of the task's: S_MD, scaled; later tasks do not change it.

        Not S_TPL, which compares tasks: a large logit would make up for a feature that is far from every class. On
        digits, S_MD alone separates unseen classes from known ones better than any combination with the logits. It
        does not depend on the options in `config`, so stored values stay comparable.
        """
        return self.centres.score_features(z, logits) / self.scales_[-1]

    def _means_of_scores(self, z: Tensor, logits: Tensor) -> Tensor:
        parts = [positive_mean(score().score_features(z, logits)) for score in LOGITS.values()]
        return torch.stack([*parts, positive_mean(self.centres.score_features(z, logits))])

    def evidence(self, z: Tensor, logits: Tensor) -> Tensor:
        """Every logit score and log S_MD, relative to their means over the training images, `[n, logit scores + 1]`.

        The logarithm of S_MD, like a log-density: S_MD itself has a long tail, so few images would set the weights.
        """
        parts = [score().score_features(z, logits) for score in LOGITS.values()]
        found = torch.stack([*parts, self.centres.score_features(z, logits)], dim=1) / self.scales_
        return torch.cat([found[:, :-1], found[:, -1:].log()], dim=1)

    def refresh(self, own: Tensor, others: Tensor, others_y: Tensor | None = None) -> Self:
        """Set the memory's features under this task's model: those of its own images and of other tasks'."""
        self.own.remember(own)
        self.others.remember(others)
        self.others_centres = None
        if self.config.out_of_task == "md" and len(others):
            labels = torch.zeros(len(others), dtype=torch.long) if others_y is None else others_y
            labels = labels.unique(return_inverse=True)[1].to(others.device)
            self.others_centres = Mahalanobis(self.config.shrinkage).fit_features(others, others, labels)
            self.others_scale = float(1 / positive_mean(self.others_centres.score_features(others, others)))
        return self

    def score_features(
        self, z: Tensor, logits: Tensor, skip_own: Tensor | None = None, skip_others: Tensor | None = None
    ) -> Tensor:
        """S_TPL per row. The `skip` arguments name the row of each memory that is the sample itself."""
        if self.config.in_task == "none":
            return self.logit_part(z, logits)
        ratio = self.in_task_part(z, logits, skip_own) - self.out_of_task_part(z, skip_others)
        if self.config.logit_score == "none":
            return ratio
        logit = self.logit_part(z, logits)
        if self.config.compose == "or":
            return torch.logaddexp(logit, ratio)  # Eq. 9
        return -torch.logaddexp(-logit, -ratio)  # pseudo-code

    def logit_part(self, z: Tensor, logits: Tensor) -> Tensor:
        """beta1 * S_logit."""
        position = list(LOGITS).index(self.config.logit_score)
        factor, relative = _factor("beta1", self.config.beta1)
        beta = factor / self.scales_[position] if relative else factor
        return beta * LOGITS[self.config.logit_score]().score_features(z, logits)

    def in_task_part(self, z: Tensor, logits: Tensor, skip: Tensor | None = None) -> Tensor:
        """E_t: beta2 * S_MD, or minus the distance to the task's own memory."""
        if self.config.in_task == "knn":
            return -self.own.distances(z, skip)
        factor, relative = _factor("beta2", self.config.beta2)
        beta = factor / self.scales_[-1] if relative else factor
        return beta * self.centres.score_features(z, logits)

    def out_of_task_part(self, z: Tensor, skip: Tensor | None = None) -> Tensor:
        """E_tc: minus the distance to other tasks' memory, their MD score, or nothing."""
        if self.config.out_of_task == "md" and self.others_centres is not None:
            return self.others_scale * self.others_centres.score_features(z, z)
        if self.config.out_of_task == "knn":
            return -self.others.distances(z, skip)
        return z.new_zeros(z.shape[0], dtype=torch.float64)

    def state(self) -> dict[str, Tensor]:
        """Fitted tensors by name."""
        return super().state() | self.centres.state()

    def load_state(self, state: dict[str, Tensor]) -> Self:
        """Restore what `state` returned; the memory is set by `refresh`."""
        self.scales_ = state["scales_"]
        self.centres.load_state({k: v for k, v in state.items() if k != "scales_"})
        empty = self.centres.means_[:0]
        return self.refresh(empty, empty)


def use_memory(
    scores: Sequence[LikelihoodRatio], outputs: Sequence[tuple[Tensor, Tensor]], tasks: Tensor, labels: Tensor
) -> bool:
    """Set every score's kNN banks from the memory; returns whether each has images of other tasks.

    `outputs[t]` are features and logits of the memory under task t, `tasks` and `labels` those of its images, task by
    task. Scores with and without the kNN term are not comparable: if one task lacks images of others, all are without
    it.
    """
    sizes = tasks.bincount(minlength=len(scores)).tolist()
    has_others = len(tasks) > max(sizes, default=0)
    for score, (features, _), size, end in zip(scores, outputs, sizes, accumulate(sizes), strict=True):
        others = [torch.cat([column[: end - size], column[end:]]) for column in (features, labels)]
        score.refresh(features[end - size : end], *(others if has_others else (column[:0] for column in others)))
    return has_others


def memory_scores(scores: Sequence[LikelihoodRatio], outputs: Sequence[tuple[Tensor, Tensor]], tasks: Tensor) -> Tensor:
    """Every task's score of the memory's images, `[n, tasks]`, for calibration.

    Every image is in one of a task's two kNN banks, where it is not compared with itself.
    """
    sizes = tasks.bincount(minlength=len(scores)).unsqueeze(1)
    starts, rows = sizes.cumsum(dim=0) - sizes, torch.arange(len(tasks), device=tasks.device)
    own = tasks == torch.arange(len(scores), device=tasks.device).unsqueeze(1)
    among_own = torch.where(own, rows - starts, -1)
    among_others = torch.where(own, -1, torch.where(rows < starts, rows, rows - sizes))
    places = zip(among_own, among_others, strict=True)
    columns = [score.score_features(*seen, *at) for score, seen, at in zip(scores, outputs, places, strict=True)]
    return torch.stack(columns, dim=1)
