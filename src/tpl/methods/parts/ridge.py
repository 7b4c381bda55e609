"""Ridge regression on random features, learned exactly, one task at a time: RanPAC's classifier.

    h = relu(z R),   G = sum h h^T,   C = sum h y^T,   W = (G + lambda I)^-1 C

G and C are sums over samples, so they do not depend on the order of tasks, and no old sample is needed again.

Features may come from several networks (views), each with random features of its own. A view that is added later has no
sums over old samples; `add_view` estimates them by regression on the views known so far.

Regression takes a class with few samples for an unlikely one. With `logit_adjustment`, log n_c is
subtracted from the logits (Menon et al., 2021), which changes nothing where all n_c are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.config import Config, option
from tpl.scores.distances import in_blocks, mirror, packed, unpacked

BLOCK = 2048  # samples projected at a time
SMALLEST, LARGEST = 1024, 10_000  # random features: with fewer, small problems lose points and large ones stay small
SMALLEST_REST = 1e-6  # lower bound of 1 - h_i, for a sample that nearly determines its own prediction
HELD_OUT = 0.2  # of a task, to choose ridge and temperature on, as published
STRENGTHS = tuple(10.0**e for e in range(-8, 2))  # of the ridge, in units of G's mean diagonal
TEMPERATURES = tuple(2.0 ** (e / 8) for e in range(-72, 17))
MOST_CELLS = 8_000_000  # samples times classes that temperatures are compared on
CELLS_AT_ONCE = 1_000_000  # of all temperatures together: few samples take one call instead of dozens
STRIDE = 4  # of a coarse search, over temperatures for one: the entropy has one minimum
# Of `add_view`, chosen on held-out images of CIFAR-100: see docs/beyond-evidence.md.
MAP_STRENGTH = 0.1  # ridge of the map to a new view, in units of the mean diagonal
SHRINKAGE = 10  # stored samples of a class at which half of their mean residual is believed

Found = TypeVar("Found")


@dataclass(frozen=True)
class RidgeConfig(Config):
    """Options of the ridge."""

    random_features: int = option(
        0,
        "random features; 0: by the first task's size, at most 10 000, or 20 000 where each view has its own",
        minimum=0,
        group="ridge classifier",
        maximum=32768,
    )
    ridge_criterion: str = option(
        "entropy",
        "what the ridge's strength is chosen by: cross-entropy first, or (error) squared error alone, as published",
        ("entropy", "error"),
        group="ridge classifier",
    )
    logit_adjustment: bool = option(True, "answer as if all classes had equally many images", group="ridge classifier")


class Fit(NamedTuple):
    """A temperature, and every sample's cross-entropy at it."""

    entropies: Tensor
    temperature: float


class Trial:
    """What one ridge strength predicts for samples that are held out, or left out one by one."""

    def __init__(self, weights: Tensor, predicted: Tensor, target: Tensor, fit: Callable[[Tensor], Fit]) -> None:
        self.weights, self.predicted, self._fit = weights, predicted, fit
        self.error = float((predicted - target).square().mean())

    @cached_property
    def fit(self) -> Fit:
        """The temperature with the smallest mean cross-entropy: it takes longer than all the rest."""
        return self._fit(self.predicted)


def features_for(samples: int, most: int = LARGEST) -> int:
    """The number of random features for a first task of `samples` samples: four times as many, within bounds."""
    return min(max(4 * samples, SMALLEST), most)


def cross_entropies(outputs: Tensor, temperatures: Sequence[float], y: Tensor, offsets: Tensor | float = 0.0) -> Tensor:
    """Every sample's cross-entropy with logits `outputs / temperature - offsets`, `[temperatures, n]`."""
    found = []
    all_ = torch.tensor(temperatures, dtype=outputs.dtype, device=outputs.device)
    for some in all_.split(max(1, CELLS_AT_ONCE // max(outputs.numel(), 1))):
        logits = (outputs / some.view(-1, 1, 1) - offsets).flatten(0, 1)
        found.append(F.cross_entropy(logits, y.repeat(len(some)), reduction="none").view(len(some), -1))
    return torch.cat(found)


def coarse_to_fine(values: tuple[float, ...], best: Callable[[tuple[float, ...]], tuple[int, Found]]) -> Found:
    """What `best` finds in a part of `values` that has the best of all; it returns its place there, and the finding.

    Every few values are tried first: what is searched for must have one optimum.
    """
    near = STRIDE * best(values[::STRIDE])[0]
    return best(values[max(near - STRIDE, 0) : near + STRIDE + 1])[1]


def held_out_rows(labels: Tensor, generator: torch.Generator) -> Tensor:
    """A mask of the held-out rows: a random fifth of every class with at least five samples."""
    drawn = torch.rand(len(labels), generator=generator).to(labels.device)
    held = torch.zeros_like(labels, dtype=torch.bool)
    for c in labels.unique():
        own = torch.nonzero(labels == c).squeeze(1)
        held[own[drawn[own].argsort()[: int(HELD_OUT * len(own))]]] = True
    return held


class RandomRidge:
    """Class sums and Gram matrix of random features, and the classifier they give."""

    def __init__(self, projections: Sequence[Tensor], config: RidgeConfig) -> None:
        self.projections = list(projections)  # one a view, [dim, width]
        self.config = config
        width, device = sum(each.shape[1] for each in projections), projections[0].device
        self.sums = torch.zeros(width, 0, dtype=torch.float64, device=device)
        self.gram = self.sums.new_zeros(()).expand(width, width)  # takes no memory before there is a sample
        self.counts = self.sums[0]  # samples of each class
        self.strength = STRENGTHS[-1]
        self.temperature = 1.0
        self.weights = self.sums

    @classmethod
    def drawn_for(cls, z: Tensor, config: RidgeConfig, generator: torch.Generator) -> Self:
        """An untrained classifier with a random projection whose size suits a first task with features `z`."""
        width = config.random_features or features_for(len(z))
        return cls([torch.randn(z.shape[1], width, generator=generator).to(z.device)], config)

    @classmethod
    def drawn_for_views(
        cls, views: Sequence[Tensor], config: RidgeConfig, generator: torch.Generator, share: int
    ) -> Self:
        """The same with a projection for each view, a part of all random features: `share` views are to have them."""
        width = -(-(config.random_features or features_for(len(views[0]), 2 * LARGEST)) // share)
        return cls([_orthogonal(z.shape[1], width, generator).to(z.device) for z in views], config)

    @property
    def classes(self) -> int:
        """Classes seen."""
        return self.sums.shape[1]

    def hidden(self, z: Tensor) -> Tensor:
        """Random features, float64, of the views' features side by side; views beyond the known ones are ignored."""
        views = z.double()[:, : sum(self.dims)].split(self.dims, dim=1)
        return torch.cat([_random_features(*pair) for pair in zip(views, self.projections, strict=True)], dim=1)

    @property
    def dims(self) -> list[int]:
        """Size of every view's features."""
        return [each.shape[0] for each in self.projections]

    def learn(self, z: Tensor, y: Tensor, generator: torch.Generator) -> None:
        """Add a task; ridge and temperature are chosen on a held-out fifth of it, which is then added as well."""
        held = held_out_rows(y, generator)
        self._add(z[~held], y[~held])
        if bool(held.any()):
            if self.classes > 1:
                self._choose(z[held], y[held], inside=False)
            self._add(z[held], y[held])
        self._solve()

    def learn_whole(self, z: Tensor, y: Tensor, known: Tensor, labels: Tensor) -> Tensor | None:
        """Add a task; ridge and temperature are chosen on `known` samples of all classes, which are part of the sums.

        Each of them is predicted by the classifier of all others (leave-one-out, in closed form). Returns these
        predictions, which are those of `left_out`, if there was anything to choose.
        """
        self._add(z, y)
        chosen = self._choose(known, labels, inside=True) if self.classes > 1 else None
        if chosen is None:
            self._solve()
            return None
        self.weights = chosen.weights
        return chosen.predicted

    def update(self, z: Tensor, y: Tensor) -> None:
        """Add more samples of known classes; the result is the same as if they had been there from the start."""
        self._add(z, y)
        self._solve()

    def _add(self, z: Tensor, y: Tensor) -> None:
        if not len(y):
            return
        missing = int(y.max()) + 1 - self.classes
        if missing > 0:
            self.sums, self.counts = (F.pad(part, (0, missing)) for part in (self.sums, self.counts))
        self.counts = self.counts + y.bincount(minlength=self.classes)
        gram, sums = self.gram, self.sums.clone()  # not written to: the classifier before may still be needed
        for part, labels in zip(z.split(BLOCK), y.split(BLOCK), strict=True):
            h = self.hidden(part)
            gram = torch.addmm(gram, h.T, h) if gram is self.gram else gram.addmm_(h.T, h)
            present, own = labels.unique(return_inverse=True)  # of thousands of classes a block has few
            sums[:, present] += h.T @ F.one_hot(own, len(present)).double()
        self.gram, self.sums = mirror(gram), sums

    def add_view(self, z: Tensor, stored: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Add a view; its sums over old samples are estimated.

        Returns a linear map from the random features known before to the new view's features.
        `z` are a new task's features, not added yet, and `stored` those of samples of old classes `labels`, which are
        part of the sums; both end with the new view's. On these samples the new random features are regressed on the
        known ones, n = A^T h + r. The sums over the stored samples are then exact, those over all others

            sum n y^T = A^T sum h y^T + (mean r of the class) * count,   sum h n^T = (sum h h^T) A,
            sum n n^T = A^T (sum h h^T) A + cov(r) * count.
        """
        new = z.shape[1] - sum(self.dims)
        projection = _orthogonal(new, self.projections[0].shape[1], generator).to(z.device)
        hidden, kept = self.hidden(z), self.hidden(stored)
        fresh, exact = (_random_features(part[:, -new:].double(), projection) for part in (z, stored))
        residuals = torch.empty_like(exact)
        for half in (0, 1):  # each half by the map of the other: residuals on samples that were fitted are too small
            there = slice(1 - half, None, 2)
            partial = _ridge_map(torch.cat([hidden, kept[there]]), torch.cat([fresh, exact[there]]))
            residuals[half::2] = exact[half::2] - kept[half::2] @ partial
        features = torch.cat([z[:, -new:], stored[:, -new:]]).double()
        targets = torch.cat([torch.cat([fresh, exact]), features], dim=1)
        mapped: Tensor
        to_features: Tensor
        mapped, to_features = _ridge_map(torch.cat([hidden, kept]), targets).split([fresh.shape[1], new], dim=1)
        own = F.one_hot(labels, self.classes).double()
        shown = own.sum(dim=0)
        rest = (self.counts - shown).clamp_min(0)
        gram, sums = self.gram - kept.T @ kept, self.sums - kept.T @ own
        typical = residuals.T @ own / (shown + SHRINKAGE)
        cross = kept.T @ exact + gram @ mapped
        spread = residuals.T @ residuals / max(len(residuals), 1)
        corner = exact.T @ exact + mapped.T @ gram @ mapped + spread * rest.sum()
        self.sums = torch.cat([self.sums, exact.T @ own + mapped.T @ sums + typical * rest])
        self.gram = torch.cat([torch.cat([self.gram, cross], dim=1), torch.cat([cross.T, corner], dim=1)])
        self.projections.append(projection)
        mirror(self.gram)
        return to_features

    def _choose(self, z: Tensor, y: Tensor, inside: bool) -> Trial | None:
        """Set the ridge strength and temperature that fit these samples best. Returns what was found with them.

        `inside`: the samples are part of the sums. The search moves from the last strength to better neighbours.
        """
        attempt = self._attempts(torch.cat([self.hidden(part) for part in z.split(BLOCK)]), y, inside)
        trials: dict[float, Trial] = {}
        tried: set[float] = set()
        place = STRENGTHS.index(self.strength)
        while untried := set(STRENGTHS[max(place - 1, 0) : place + 2]) - tried:
            found = {strength: attempt(strength) for strength in untried}
            trials |= {strength: trial for strength, trial in found.items() if trial is not None}
            tried |= untried
            place = STRENGTHS.index(self._best(trials)) if trials else min(place + 1, len(STRENGTHS) - 1)
        if not trials:
            return None
        self.strength = STRENGTHS[place]
        best = trials[self.strength]
        self.temperature = best.fit.temperature
        return best

    def _attempts(self, hidden: Tensor, y: Tensor, inside: bool) -> Callable[[float], Trial | None]:
        """What one strength after the other gives on samples; None where the ridge is too weak for rounding."""

        def attempt(strength: float) -> Trial | None:
            factor = self._factor(strength)
            if factor is None:
                return None
            weights = self._weights(factor)
            return self._trial(hidden, y, weights, self.influence(hidden, factor) if inside else None)

        return attempt

    def _trial(self, hidden: Tensor, y: Tensor, weights: Tensor, influence: Tensor | None) -> Trial:
        """A classifier on samples; with their `influence` on themselves, each of them is left out."""
        predicted, target = self.outputs(hidden, weights), F.one_hot(y, self.classes).double()
        if influence is not None:
            predicted = leave_one_out(predicted, influence, target)
        return Trial(weights, predicted, target, lambda outputs: self._fit_temperature(outputs, y))

    def _fit_temperature(self, predicted: Tensor, y: Tensor) -> Fit:
        """The temperature with the smallest mean cross-entropy.

        With thousands of classes, of every few samples one: a temperature takes a pass over all classes of each.
        """
        step = -(-predicted.numel() // MOST_CELLS) or 1
        predicted, y = predicted[::step], y[::step]

        def least(temperatures: tuple[float, ...]) -> tuple[int, Fit]:
            found = cross_entropies(predicted, temperatures, y, self._offsets())
            best = int(found.mean(dim=1).argmin())
            return best, Fit(found[best], temperatures[best])

        return coarse_to_fine(TEMPERATURES, least)

    def _best(self, trials: dict[float, Trial]) -> float:
        """The strength with the smallest squared error, among those whose cross-entropy is about the smallest.

        With many classes the squared error is mostly that of zeros, and prefers a ridge so strong that the ranking of
        classes suffers. With few, all strengths may separate the classes, and cross-entropies do not differ.
        """
        if self.config.ridge_criterion == "error":
            return min(trials, key=lambda strength: trials[strength].error)
        entropies = {strength: trial.fit.entropies for strength, trial in trials.items()}
        least = min(entropies.values(), key=lambda each: float(each.mean()))
        more = {strength: each - least for strength, each in entropies.items()}
        open_ = [s for s, d in more.items() if float(d.mean()) <= float(d.std(correction=0)) * len(d) ** -0.5]
        return min(open_, key=lambda strength: trials[strength].error)

    def _solve(self) -> None:
        """Compute the classifier from the sums."""
        self.weights = self._weights(self._chosen_factor())

    def _chosen_factor(self) -> Tensor:
        """The Cholesky factor at the chosen strength."""
        factor = self._factor(self.strength)
        if factor is None:  # rounding has moved the limit since this strength was chosen
            factor = self._factor(STRENGTHS[-1])
        assert factor is not None
        return factor

    def _weights(self, factor: Tensor) -> Tensor:
        """The classifier, given the factor of G + lambda I.

        Row-major, like a loaded one: a matrix product rounds differently for another memory layout.
        """
        return torch.cholesky_solve(self.sums, factor).contiguous()

    def _factor(self, strength: float) -> Tensor | None:
        """The Cholesky factor of G + lambda I; None where the ridge is too weak for rounding."""
        ridge = self.gram.clone()
        ridge.diagonal().add_(strength * (float(ridge.diagonal().mean()) or 1.0))
        factor, failed = torch.linalg.cholesky_ex(ridge)
        return None if bool(failed) else factor

    def log_probabilities(self, z: Tensor) -> Tensor:
        """log P(class) over all classes at the fitted temperature, `[n, classes]`."""
        return self.log_softmax(self.predicted(z))

    def predicted(self, z: Tensor) -> Tensor:
        """The regression's outputs, about 1 for the right class and 0 for all others."""
        return torch.cat([self.outputs(self.hidden(part), self.weights) for part in in_blocks(z, BLOCK)])

    def outputs(self, hidden: Tensor, weights: Tensor) -> Tensor:
        """Outputs for random features, given the classifier."""
        return hidden @ weights

    def influence(self, hidden: Tensor, factor: Tensor) -> Tensor:
        """h_i, the weight of each sample of the sums in its own output: x_i^T (G + lambda I)^-1 x_i, `[n]`."""
        own: Tensor = torch.linalg.solve_triangular(factor, hidden.T, upper=False).square().sum(dim=0)
        return own

    def log_softmax(self, predicted: Tensor) -> Tensor:
        """log P(class) from the regression's outputs."""
        return self._logits(predicted, self.temperature).log_softmax(dim=1)

    def left_out(self, z: Tensor, y: Tensor) -> Tensor:
        """Outputs for samples that are part of the sums, each by the regression of all others."""
        hidden, target = self.hidden(z), F.one_hot(y, self.classes).double()
        influence = self.influence(hidden, self._chosen_factor())
        return leave_one_out(self.outputs(hidden, self.weights), influence, target)

    def _logits(self, predicted: Tensor, temperature: float) -> Tensor:
        return predicted / temperature - self._offsets()

    def _offsets(self) -> Tensor | float:
        """What is subtracted from the logits of classes with many samples."""
        return self.counts.clamp_min(1).log() if self.config.logit_adjustment else 0.0

    def forget(self, c: int) -> None:
        """Drop a class; its part of the Gram matrix stays, as background for the others."""
        kept = torch.arange(self.classes, device=self.sums.device) != c
        self.sums, self.counts = self.sums[:, kept], self.counts[kept]
        self._solve()

    def state(self, whole: bool = False) -> dict[str, Tensor]:
        """All tensors, with the classifier, since solving for it takes long; of the Gram matrix a triangle, or all."""
        chosen = [self.strength, self.temperature]
        sums = {"gram": self.gram if whole else packed(self.gram), "sums": self.sums, "counts": self.counts}
        drawn = {f"projection.{i}": each for i, each in enumerate(self.projections[1:], start=1)}
        return (
            drawn
            | {
                "projection": self.projections[0],
                "weights": self.weights,
                "chosen": torch.tensor(chosen, dtype=torch.float64),
            }
            | sums
        )

    @classmethod
    def from_state(cls, state: dict[str, Tensor], config: RidgeConfig) -> Self:
        """The classifier that `state` came from."""
        later = [f"projection.{i}" for i in range(1, len(state)) if f"projection.{i}" in state]
        ridge = cls([state["projection"], *(state[name] for name in later)], config)
        ridge.gram = state["gram"] if state["gram"].dim() == 2 else unpacked(state["gram"], len(ridge.gram))
        ridge.sums, ridge.weights = state["sums"], state["weights"]
        ridge.counts = state.get("counts", torch.ones_like(ridge.sums[0]))  # early versions did not count
        ridge.strength, ridge.temperature = state["chosen"].tolist()[:2]  # some versions kept more
        return ridge


def _orthogonal(dim: int, width: int, generator: torch.Generator) -> Tensor:
    """A random projection `[dim, width]` in groups of orthogonal columns, each distributed like a Gaussian vector.

    Orthogonal columns repeat each other less, so fewer random features do as well (Yu et al., 2016).
    """
    groups = []
    for _ in range(-(-width // dim)):
        directions = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64)).Q
        lengths = torch.randn(dim, dim, generator=generator, dtype=torch.float64).norm(dim=0)
        groups.append(directions * lengths)
    return torch.cat(groups, dim=1)[:, :width].float()


def _random_features(z: Tensor, projection: Tensor) -> Tensor:
    unit = F.normalize(z, dim=1) * z.shape[1] ** 0.5
    return F.relu(unit @ projection.double())


def _ridge_map(x: Tensor, y: Tensor) -> Tensor:
    """The ridge regression of `y` on `x`, without an intercept, by the smaller of its two equivalent systems."""
    penalty = MAP_STRENGTH * float(x.square().sum(dim=0).mean())
    dual = len(x) < x.shape[1]
    system = x @ x.T if dual else x.T @ x
    system.diagonal().add_(penalty or 1.0)
    factor = torch.linalg.cholesky(system)
    return x.T @ torch.cholesky_solve(y, factor) if dual else torch.cholesky_solve(x.T @ y, factor)


def leave_one_out(predicted: Tensor, influence: Tensor, target: Tensor) -> Tensor:
    """The prediction of each sample by the ridge regression of all others: (predicted_i - h_i y_i) / (1 - h_i)."""
    own = influence.unsqueeze(1)
    rest: Tensor = (predicted - own * target) / (1 - own).clamp_min(SMALLEST_REST)
    return rest
