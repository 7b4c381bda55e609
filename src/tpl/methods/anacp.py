"""AnaCP: an analytic contrastive projection in front of a ridge classifier (Momeni, Mazumder and Liu, NeurIPS 2025).

Adapters are trained on the first task and frozen. Features x, scaled to length 1, are then projected in closed form so
that classes lie further apart. Each of three heads has a fixed random R_h, and regresses a class's target on
z = gelu(R_h x):

    u(x) = mean over h of normalise(z^T theta_h),   theta_h = (sum z z^T + r I)^-1 sum_c (sum of z of class c) p_c^T

The targets p_c are the class means, pushed apart. With S the pooled covariance of x within classes, M the centred class
means and M S^(-1/2) = U diag(s) V^T, every singular value is raised by `spread`, so that directions in which classes
hardly differ gain most:

    P = normalise(U diag(s + spread) V^T S^(1/2) + mean)

All of it follows from sums: targets change with every task, but no image is needed again. The classifier is a ridge
regression to one-hot targets on gelu(R' u(x)), fitted to 100 draws of every class from N(mu_c, S).

The public code differs from the paper in two points. It always raises singular values, while the paper takes the sign
from a lemma: here, too, they are raised. It multiplies by S^(-1/2) a second time instead of S^(1/2): `recolour=twice`.
Only singular values that are not zero are raised here; the one that centring makes zero has no direction but that of
rounding. S is the exact pooled covariance plus 1e-4 I, where the code weighs tasks unevenly. As published: 5000 random
features (for a first task of 1250 images or more), three heads, r = 100. The first task is trained by the toolkit's SGD
with its adapters, where the code has LoRA of rank 8 and Adam. The softmax temperature, which no prediction depends on,
is fitted on further draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.config import option
from tpl.methods.base import register
from tpl.methods.parts.first_task import (
    ClosedFormMethod,
    FirstTaskConfig,
    best_temperature,
)
from tpl.methods.parts.ridge import features_for
from tpl.scores.distances import ClassStatistics, in_blocks, mirror, packed, unpacked, without_row
from tpl.store import under_prefix

PUBLISHED = 5000  # random features
BLOCK = 4096  # samples whose random features are computed at a time
FLOOR = 1e-4  # added to the variance of every direction
CHECKS = 20  # further draws a class, for the temperature
ZERO = 1e-8  # of the largest singular value: what is smaller is rounding


@dataclass(frozen=True)
class AnaCPConfig(FirstTaskConfig):
    """AnaCP's options; those of training matter for the first task alone, with `adapt=first`."""

    random_features: int = option(
        0,
        "random features of a head; 0: by the first task's size, 5000 at most",
        minimum=0,
        group="classifier",
        maximum=32768,
    )
    heads: int = option(3, "projections whose mean is taken", minimum=1, group="classifier", maximum=32)
    ridge: float = option(100.0, "strength of both ridge regressions", above=0, group="classifier")
    spread: float = option(1.0, "what singular values of the class means are raised by", minimum=0, group="classifier")
    recolour: str = option(
        "restore",
        "restore: targets return from whitened space by S^(1/2) (paper); twice: by S^(-1/2) again (public code)",
        ("restore", "twice"),
        group="classifier",
    )
    draws: int = option(100, "draws a class that the classifier is fitted to", minimum=1, group="classifier")


def spread_means(means: Tensor, roots: tuple[Tensor, Tensor], spread: float, recolour: str) -> Tensor:
    """Targets of unit length: class means whose differences, measured by S, are enlarged.

    `roots` are S^(1/2) and S^(-1/2).
    """
    root, inverse = roots
    middle = means.mean(dim=0)
    left, sizes, right = torch.linalg.svd((means - middle) @ inverse, full_matrices=False)
    # A set of identical means has singular values of rounding's size: whitened features have a variance of 1.
    real = sizes > ZERO * sizes.amax().clamp_min(1)
    raised = torch.where(real, sizes + spread, 0)
    return F.normalize((left * raised) @ right @ (root if recolour == "restore" else inverse) + middle, dim=1)


class Projection:
    """One head: sums of random features, and the map onto the targets that they give."""

    def __init__(self, random: Tensor) -> None:
        self.random = random  # [dim, width]
        dim, width = random.shape
        self.gram = torch.zeros(width, width, dtype=torch.float64, device=random.device)
        self.sums = self.gram[:, :0]  # [width, classes]
        self.theta = torch.zeros(width, dim, dtype=torch.float64, device=random.device)

    def hidden(self, x: Tensor) -> Tensor:
        """Random features of unit features, float64."""
        return F.gelu(x @ self.random.double())

    def add(self, x: Tensor, y: Tensor, classes: int) -> None:
        """Add samples."""
        self.sums = F.pad(self.sums, (0, classes - self.sums.shape[1]))
        for part, labels in zip(x.split(BLOCK), y.split(BLOCK), strict=True):
            z = self.hidden(part)
            self.gram += z.T @ z
            self.sums += z.T @ F.one_hot(labels, classes).double()
        mirror(self.gram)

    def solve(self, targets: Tensor, ridge: float) -> None:
        """Compute theta for targets `[classes, dim]`."""
        self.theta = ridge_solution(self.gram, self.sums @ targets, ridge)

    def __call__(self, x: Tensor) -> Tensor:
        """Projected features of unit length, `[n, dim]`."""
        return F.normalize(self.hidden(x) @ self.theta, dim=1)


def ridge_solution(gram: Tensor, products: Tensor, ridge: float) -> Tensor:
    """(G + r I)^-1 B, row-major like a loaded one: a matrix product rounds differently for another memory layout."""
    strong = gram.clone()
    strong.diagonal().add_(ridge)
    return torch.cholesky_solve(products, torch.linalg.cholesky(strong)).contiguous()


class ContrastiveClassifier:
    """Contrastive projections and the ridge classifier behind them; `draws()` gives the generator for its draws."""

    def __init__(
        self, randoms: list[Tensor], outer: Tensor, config: AnaCPConfig, draws: Callable[[], torch.Generator]
    ) -> None:
        self.heads = [Projection(random) for random in randoms]
        self.outer, self.config, self.draws = outer, config, draws
        self.statistics = ClassStatistics.empty(len(outer), outer.device)
        self.weights = torch.zeros(outer.shape[1], 0, dtype=torch.float64, device=outer.device)
        self.temperature = 1.0

    def learn(self, z: Tensor, y: Tensor, generator: torch.Generator) -> None:
        """Add a task."""
        self.update(z, y)

    def update(self, z: Tensor, y: Tensor) -> None:
        """Add samples; the result is the same as if all had come at once, up to the draws."""
        x = F.normalize(z.double(), dim=1)
        statistics = self.statistics.add(x, y)
        self.statistics = statistics._replace(scatter=mirror(statistics.scatter))
        for head in self.heads:
            head.add(x, y, len(statistics.counts))
        self._solve()

    def forget(self, c: int) -> None:
        """Drop a class; its part of Gram matrices and covariance stays, as background for the others."""
        self.statistics = self.statistics.without(c)
        for head in self.heads:
            head.sums = without_row(head.sums.T, c).T.contiguous()
        self._solve()

    def _solve(self) -> None:
        """Compute targets, projections and classifier from the sums."""
        config, means = self.config, self.statistics.means
        root, inverse = self._roots()
        targets = spread_means(means, (root, inverse), config.spread, config.recolour)
        for head in self.heads:
            head.solve(targets, config.ridge)
        generator, classes = self.draws(), len(means)
        number = torch.arange(classes, device=means.device)
        x, y = means.repeat_interleave(config.draws, 0), number.repeat_interleave(config.draws)
        h = self._hidden(x + torch.randn(x.shape, generator=generator).to(x) @ root)
        self.weights = ridge_solution(h.T @ h, h.T @ F.one_hot(y, classes).double(), config.ridge)
        x, y = means.repeat_interleave(CHECKS, 0), number.repeat_interleave(CHECKS)
        predicted = self._hidden(x + torch.randn(x.shape, generator=generator).to(x) @ root) @ self.weights
        self.temperature = best_temperature(predicted, y)

    def _roots(self) -> tuple[Tensor, Tensor]:
        """S^(1/2) and S^(-1/2) of the pooled covariance."""
        covariance = self.statistics.scatter / self.statistics.seen.clamp_min(1)
        values, vectors = torch.linalg.eigh(covariance)
        spreads = (values.clamp_min(0) + FLOOR).sqrt()
        return (vectors * spreads) @ vectors.T, (vectors / spreads) @ vectors.T

    def embedded(self, x: Tensor) -> Tensor:
        """Contrastive features of features `[n, dim]` of unit length."""
        return torch.stack([head(x) for head in self.heads]).mean(dim=0)

    def _hidden(self, x: Tensor) -> Tensor:
        """The classifier's random features."""
        outer = self.outer.double()
        return torch.cat([F.gelu(self.embedded(part) @ outer) for part in in_blocks(x, BLOCK)])

    def log_probabilities(self, z: Tensor) -> Tensor:
        """Softmax of the regression at the fitted temperature."""
        predicted = self._hidden(F.normalize(z.double(), dim=1)) @ self.weights
        return (predicted / self.temperature).log_softmax(dim=1)

    def state(self) -> dict[str, Tensor]:
        """All tensors, Gram matrices and scatter as one triangle each; with all that was solved for."""
        found = self.statistics._replace(scatter=packed(self.statistics.scatter))._asdict()
        found |= {"outer": self.outer, "weights": self.weights}
        found["temperature"] = torch.tensor(self.temperature, dtype=torch.float64)
        for h, head in enumerate(self.heads):
            own = {"random": head.random, "gram": packed(head.gram), "sums": head.sums, "theta": head.theta}
            found |= {f"{h}.{name}": part for name, part in own.items()}
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned; the random projections are in place."""
        parts = {name: state[name] for name in ClassStatistics._fields}
        self.statistics = ClassStatistics(**parts | {"scatter": unpacked(parts["scatter"], len(self.outer))})
        self.weights, self.temperature = state["weights"], float(state["temperature"])
        for h, head in enumerate(self.heads):
            own = under_prefix(f"{h}.", state)
            head.gram, head.sums, head.theta = unpacked(own["gram"], len(head.gram)), own["sums"], own["theta"]


@register
class AnaCP(ClosedFormMethod):
    """A ridge classifier over analytic contrastive features."""

    name = "anacp"
    summary = "class means pushed apart by regressions in closed form, then a ridge classifier on draws; no replay"
    paper = (
        "Momeni, Mazumder and Liu, AnaCP: Toward Upper-Bound Continual Learning via Analytic Contrastive Projection, "
        "NeurIPS 2025"
    )
    keeps = "three Gram matrices of random features, a mean and three sums a class, one covariance"
    cost = "training on the first task alone, then one forward pass an image, once; one an answer"
    config_class = AnaCPConfig
    config: AnaCPConfig

    def new_classifier(self, z: Tensor) -> ContrastiveClassifier:
        """A classifier whose number of random features suits the first task."""
        shape = z.shape[1], self.config.random_features or features_for(len(z), PUBLISHED)
        purposes = [f"projection {h}" for h in range(self.config.heads)] + ["classifier"]
        *randoms, outer = (torch.randn(shape, generator=self.generator(purpose)).to(z.device) for purpose in purposes)
        return ContrastiveClassifier(randoms, outer, self.config, self.draw_generator)

    def stored_classifier(self, tensors: dict[str, Tensor]) -> ContrastiveClassifier:
        """The classifier that was stored."""
        randoms = [tensors[f"{h}.random"] for h in range(self.config.heads)]
        found = ContrastiveClassifier(randoms, tensors["outer"], self.config, self.draw_generator)
        found.load(tensors)
        return found

    def draw_generator(self) -> torch.Generator:
        """The generator of the draws from class Gaussians."""
        return self.generator("draws")
