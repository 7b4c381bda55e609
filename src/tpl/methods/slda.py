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
from tpl.methods.base import Method, register
from tpl.nets import Encoder
from tpl.scores.mahalanobis import class_means
from tpl.state import State
from tpl.stream import Task

PARTS = ("counts", "seen", "means", "scatter")  # of an analysis, as they are stored


@dataclass(frozen=True)
class SLDAConfig(Config):
    """SLDA's one option."""

    shrinkage: float = option(1e-4, "how much of the identity is mixed into the covariance, up to 1", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shrinkage > 1:
            raise TplError(f"shrinkage must be at most 1; got {self.shrinkage}.")


class Discriminant:
    """Class means and the pooled scatter around them, exact in any order, and the classifier they give."""

    def __init__(self, dim: int, shrinkage: float, device: torch.device) -> None:
        self.shrinkage = shrinkage
        nothing = torch.zeros(dim, dim, dtype=torch.float64, device=device)
        self.scatter, self.means, self.counts = nothing, nothing[:0], nothing[:0, 0]
        self.seen = nothing.sum()  # samples behind the scatter, those of classes since removed included
        self.weights, self.offsets = self.means, self.counts

    def add(self, z: Tensor, y: Tensor) -> None:
        """Take up samples; labels may name classes not seen before."""
        z, classes = z.double(), max(int(y.max()) + 1, len(self.counts))
        missing = classes - len(self.counts)
        old_counts, old_means = F.pad(self.counts, (0, missing)), F.pad(self.means, (0, 0, 0, missing))
        counts, means = class_means(z, y, classes)
        self.counts, deviations, apart = old_counts + counts, z - means[y], means - old_means
        # A class with no sample on one side has weight 0 here: its mean there does not matter.
        weight = old_counts * counts / self.counts.clamp_min(1)
        self.means = old_means + apart * (counts / self.counts.clamp_min(1)).unsqueeze(1)
        self.scatter = self.scatter + deviations.T @ deviations + (apart.T * weight) @ apart
        self.seen = self.seen + len(y)
        self.solve()

    def forget(self, c: int) -> None:
        """Drop a class; what it said about the spread of features stays."""
        kept = torch.arange(len(self.counts), device=self.counts.device) != c
        self.counts, self.means = self.counts[kept], self.means[kept]
        self.solve()

    def solve(self) -> None:
        """The linear classifier of all that was taken up."""
        identity = torch.eye(len(self.scatter)).to(self.scatter)
        covariance = (1 - self.shrinkage) * self.scatter / self.seen.clamp_min(1) + self.shrinkage * identity
        self.weights = torch.linalg.solve(covariance, self.means.T).T
        self.offsets = -0.5 * (self.weights * self.means).sum(dim=1)

    def logits(self, z: Tensor) -> Tensor:
        """Scores of `[n, dim]` features over all classes, float64."""
        return F.linear(z.double(), self.weights, self.offsets)


@register
class SLDA(Method):
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
        self.analysis = self.new_analysis()

    def new_analysis(self) -> Discriminant:
        """An analysis of nothing yet."""
        return Discriminant(self.encoder.dim, self.config.shrinkage, self.compute.device)

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Take up the task's features."""
        self.analysis.add(self.encoder_features(samples.pixels), samples.labels + len(self.classes_))

    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """What Gaussians with the classes' means and the common covariance say of each image."""
        return self.analysis.logits(self.encoder_features(pixels)).log_softmax(dim=1)

    def update_classes(self, task: Task, samples: Samples, held: Samples) -> None:
        """More images of known classes join as if they had always been there."""
        self.analysis.add(self.encoder_features(samples.pixels), self.numbers_of(task, samples))

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Drop the class's mean."""
        self.analysis.forget(number)

    def state(self) -> State:
        """Counts, means and scatter."""
        return State({name: getattr(self.analysis, name) for name in PARTS}, [{} for _ in self.task_classes_])

    def load_state(self, state: State) -> None:
        """Take up what `state` gave."""
        self.analysis = self.new_analysis()
        for name in PARTS:
            setattr(self.analysis, name, state.shared[name].to(self.compute.device))
        self.analysis.solve()
