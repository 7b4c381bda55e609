"""SLDA: linear discriminant analysis over a frozen encoder's features, kept up to date by sums (Hayes and Kanan, 2020).

Features z of a class are taken for a Gaussian around the class's mean mu_c, with one covariance Sigma for all classes:

    Lambda = ((1 - e) Sigma + e I)^-1,   score_c(z) = mu_c^T Lambda z - 1/2 mu_c^T Lambda mu_c,   P(c | z) = softmax_c

Sigma is the mean squared deviation of all features seen so far from their own class's mean, e the `shrinkage`. Counts,
means and the sum of squared deviations are all that is kept: one pass, no training, no replay, nothing forgotten.
There are no adapters, as published and as in the comparison of the TPL paper.

Other than the public code, which takes samples one by one, starts Sigma at a matrix of ones and weighs each deviation
by the number of samples of all classes, the sums here join exactly (Chan, Golub and LeVeque, 1979): the answer is that
of one analysis of all data at once, whatever order tasks and images come in. As published, rare classes count as much
as frequent ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.config import Config, option
from tpl.engine import Callback, Compute, Samples
from tpl.errors import TplError
from tpl.methods.base import register
from tpl.methods.parts.fixed_features import FixedFeatures
from tpl.nets import Encoder
from tpl.scores.distances import ClassStatistics
from tpl.store import State
from tpl.stream import Task


@dataclass(frozen=True)
class SLDAConfig(Config):
    """SLDA's one option."""

    shrinkage: float = option(
        1e-4, "how much of the identity is mixed into the covariance, up to 1", above=0, group="classifier"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shrinkage > 1:
            raise TplError(f"shrinkage must be at most 1; got {self.shrinkage}.")


class Discriminant:
    """The linear classifier that class means and the pooled scatter give."""

    def __init__(self, statistics: ClassStatistics, shrinkage: float) -> None:
        self.statistics, self.shrinkage = statistics, shrinkage
        identity = torch.eye(len(statistics.scatter)).to(statistics.scatter)
        covariance = (1 - shrinkage) * statistics.scatter / statistics.seen.clamp_min(1) + shrinkage * identity
        self.weights = torch.linalg.solve(covariance, statistics.means.T).T
        self.offsets = -0.5 * (self.weights * statistics.means).sum(dim=1)

    def logits(self, z: Tensor) -> Tensor:
        """Scores of `[n, dim]` features over all classes, float64."""
        return F.linear(z.double(), self.weights, self.offsets)


@register
class SLDA(FixedFeatures):
    """A global classifier in closed form over the frozen encoder."""

    name = "slda"
    summary = "linear discriminant analysis of frozen features, exact in any order; one pass, no replay"
    paper = "Hayes and Kanan, Lifelong Machine Learning with Deep Streaming Linear Discriminant Analysis, CVPRW 2020"
    keeps = "a mean a class and one covariance"
    cost = "one forward pass an image, once; one an answer"
    config_class = SLDAConfig
    config: SLDAConfig

    def __init__(self, encoder: Encoder, config: SLDAConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.statistics = ClassStatistics.empty(encoder.dim, compute.device)

    @property
    def statistics(self) -> ClassStatistics:
        """All that was learned."""
        return self.analysis.statistics

    @statistics.setter
    def statistics(self, statistics: ClassStatistics) -> None:
        self.analysis = Discriminant(statistics, self.config.shrinkage)

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Take up the task's features."""
        self._add(self.encode(samples, callback), samples.labels + len(self.classes_))

    def update_classes(self, task: Task, samples: Samples, held: Samples) -> None:
        """More images of known classes join as if they had always been there."""
        self._add(self.encoder_features(samples.pixels), self.numbers_of(task, samples))

    def _add(self, z: Tensor, labels: Tensor) -> None:
        self.statistics = self.statistics.add(z, labels)

    def features(self, pixels: Tensor) -> Tensor:
        """The encoder's own."""
        return self.encoder_features(pixels)

    def classify(self, z: Tensor) -> Tensor:
        """What Gaussians with the classes' means and the common covariance say of each image."""
        return self.analysis.logits(z).log_softmax(dim=1)

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Drop the class's mean."""
        self.statistics = self.statistics.without(number)

    def state(self) -> State:
        """Counts, means and scatter."""
        return State(self.statistics._asdict(), [{} for _ in self.task_classes_])

    def load_state(self, state: State) -> None:
        """Take up what `state` gave."""
        parts = {name: state.shared[name].to(self.compute.device) for name in ClassStatistics._fields}
        self.statistics = ClassStatistics(**parts)
