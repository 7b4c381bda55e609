"""KLDA: linear discriminant analysis of random Fourier features of a frozen encoder (Momeni, Mazumder and Liu, 2025).

Random Fourier features approximate the feature space of the kernel exp(-gamma |x - x'|^2). In it, classes are Gaussians
with one covariance:

    h(x) = sqrt(2 / D) cos(W x + b),   W ~ N(0, 2 gamma),   b ~ U(0, 2 pi)
    class = argmin over c of (h - mu_c)^T (S + r I)^-1 (h - mu_c)

S is the scatter of all h around their own class's mean, r the `ridge`. Means and scatter are exact sums: one pass, no
training, no replay, nothing forgotten, whatever order tasks come in. Five analyses with other random numbers answer by
the mean of their probabilities, P(c | x) = softmax_c of -1/2 n (h - mu_c)^T (S + r I)^-1 (h - mu_c) after n images.

As published: D = 5000 (for a first task of 1250 images or more; fewer for a small problem), five members, no
adaptation of the encoder (`adapt=first` is the option) and the encoder's features as they are. The published gamma
differs by encoder: 1e-4 for features about 50 long, as those of the ViTs here and of DINOv2 are, 1e-2 for
shorter ones. The public code moves a class's mean while it adds later images of that class to S; here the sums join
exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tpl.config import option
from tpl.methods.base import register
from tpl.methods.parts.first_task import ClosedFormMethod, FirstTaskConfig
from tpl.methods.parts.ridge import features_for
from tpl.scores.distances import ClassStatistics, in_blocks, mirror, packed, unpacked
from tpl.store import under_prefix

PUBLISHED = 5000  # random features
BLOCK = 4096  # samples whose random features are computed at a time


@dataclass(frozen=True)
class KLDAConfig(FirstTaskConfig):
    """KLDA's options; those of training matter for the first task alone, with `adapt=first`."""

    adapt: str = option(
        "none",
        "none: the encoder as it is, as published; first: adapters are trained on the first task, then frozen",
        ("none", "first"),
        group="encoder",
    )
    random_features: int = option(
        0, "random features; 0: by the first task's size, 5000 at most", minimum=0, group="classifier", maximum=32768
    )
    gamma: float = option(1e-4, "of the kernel exp(-gamma |x - x'|^2)", above=0, group="classifier")
    ridge: float = option(1e-3, "added to the diagonal of the scatter", above=0, group="classifier")
    ensemble: int = option(5, "analyses with different random numbers", minimum=1, group="classifier", maximum=32)


class FourierAnalysis:
    """Linear discriminant analysis of one set of random Fourier features."""

    def __init__(self, frequencies: Tensor, phases: Tensor, ridge: float) -> None:
        self.frequencies, self.phases, self.ridge = frequencies, phases, ridge  # [dim, width], [width]
        self.statistics = ClassStatistics.empty(len(phases), phases.device)
        self.weights = self.statistics.means.T.contiguous()  # [width, classes]

    @classmethod
    def drawn(cls, dim: int, width: int, config: KLDAConfig, generator: torch.Generator) -> FourierAnalysis:
        """An analysis without classes."""
        frequencies = math.sqrt(2 * config.gamma) * torch.randn(dim, width, generator=generator)
        return cls(frequencies, 2 * math.pi * torch.rand(width, generator=generator), config.ridge)

    def to(self, device: torch.device) -> FourierAnalysis:
        """The same random numbers on another device, without classes."""
        return FourierAnalysis(self.frequencies.to(device), self.phases.to(device), self.ridge)

    def hidden(self, z: Tensor) -> Tensor:
        """Random Fourier features of `[n, dim]` features, float64."""
        angles = z.double() @ self.frequencies.double() + self.phases.double()
        return math.sqrt(2 / len(self.phases)) * torch.cos(angles)

    def add(self, z: Tensor, y: Tensor) -> None:
        """Add samples; labels may include new classes."""
        found = self.statistics
        for part, labels in zip(z.split(BLOCK), y.split(BLOCK), strict=True):
            found = found.add(self.hidden(part), labels)
        self.take(found._replace(scatter=mirror(found.scatter)))

    def take(self, statistics: ClassStatistics) -> None:
        """Use these statistics, and solve for the classifier."""
        self.statistics = statistics
        covariance = statistics.scatter.clone()
        covariance.diagonal().add_(self.ridge)
        factor = torch.linalg.cholesky(covariance / statistics.seen.clamp_min(1))
        self.weights = torch.cholesky_solve(statistics.means.T.contiguous(), factor).contiguous()

    def logits(self, z: Tensor) -> Tensor:
        """-1/2 squared Mahalanobis distance to every class mean, up to a term that all classes share."""
        offsets = -0.5 * (self.statistics.means.T * self.weights).sum(dim=0)
        return torch.cat([self.hidden(part) @ self.weights + offsets for part in in_blocks(z, BLOCK)])

    def state(self) -> dict[str, Tensor]:
        """All tensors, the scatter as one triangle; with the classifier, since solving for it takes long."""
        statistics = self.statistics._replace(scatter=packed(self.statistics.scatter))._asdict()
        own = {"frequencies": self.frequencies, "phases": self.phases, "weights": self.weights}
        return own | statistics

    @classmethod
    def from_state(cls, state: dict[str, Tensor], ridge: float) -> FourierAnalysis:
        """The analysis that `state` came from."""
        found = cls(state["frequencies"], state["phases"], ridge)
        parts = {name: state[name] for name in ClassStatistics._fields}
        found.statistics = ClassStatistics(**parts | {"scatter": unpacked(parts["scatter"], len(found.phases))})
        found.weights = state["weights"]
        return found


class Ensemble:
    """Several analyses that answer by the mean of their probabilities."""

    def __init__(self, members: list[FourierAnalysis]) -> None:
        self.members = members

    def learn(self, z: Tensor, y: Tensor, generator: torch.Generator) -> None:
        """Add a task."""
        self.update(z, y)

    def update(self, z: Tensor, y: Tensor) -> None:
        """Add samples; the result is the same as if all had come at once."""
        for member in self.members:
            member.add(z, y)

    def forget(self, c: int) -> None:
        """Drop a class's mean."""
        for member in self.members:
            member.take(member.statistics.without(c))

    def log_probabilities(self, z: Tensor) -> Tensor:
        """log of the mean probability."""
        found = torch.stack([member.logits(z).log_softmax(dim=1) for member in self.members])
        return found.logsumexp(dim=0) - math.log(len(self.members))

    def state(self) -> dict[str, Tensor]:
        """All tensors of all members."""
        return {f"{m}.{name}": part for m, member in enumerate(self.members) for name, part in member.state().items()}


@register
class KLDA(ClosedFormMethod):
    """Kernel discriminant analysis over the frozen encoder."""

    name = "klda"
    summary = "linear discriminant analysis of random Fourier features, five times; one pass, no replay"
    paper = "Momeni, Mazumder and Liu, Continual Learning Using a Kernel-Based Method Over Foundation Models, AAAI 2025"
    keeps = "a mean a class and one covariance of random features, five times"
    cost = "one forward pass an image, once; one an answer"
    config_class = KLDAConfig
    config: KLDAConfig

    def new_classifier(self, z: Tensor) -> Ensemble:
        """Analyses whose number of random features suits the first task."""
        width = self.config.random_features or features_for(len(z), PUBLISHED)
        generators = [self.generator(f"fourier {m}") for m in range(self.config.ensemble)]
        return Ensemble([FourierAnalysis.drawn(z.shape[1], width, self.config, g).to(z.device) for g in generators])

    def stored_classifier(self, tensors: dict[str, Tensor]) -> Ensemble:
        """The analyses that were stored."""
        members = [under_prefix(f"{m}.", tensors) for m in range(self.config.ensemble)]
        return Ensemble([FourierAnalysis.from_state(member, self.config.ridge) for member in members])
