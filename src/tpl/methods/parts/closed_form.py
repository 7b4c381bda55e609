"""Two classifiers in closed form over a frozen encoder's features, multiplied: exact in any order, without training.

    P(class | z) ~ P_lda(class | z)^2 * P_ridge(class | z)

`P_lda` is linear discriminant analysis of unit features with a shrunk covariance, `P_ridge` ridge regression on random
features (`parts.ridge`). Both follow from sums over samples, so tasks in any order give the result of all data at once,
and the sums of two models can be added. Temperatures, the ridge's strength and how far the covariance is shrunk are
chosen by leave-one-out, in closed form: each stored feature vector is classified by all other samples; of many vectors,
500 decide. Some feature vectors of every class are stored for that, all of them while there are few; which ones does
not depend on the order of arrival.

Leave-one-out also calibrates the unknown score, pooled over classes. An image looks known if its features point to a
class's mean, are near to it under the covariance, and the ridge regression is sure of a class.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.methods.parts.added_ridge import add_sums
from tpl.methods.parts.ridge import (
    STRENGTHS,
    RandomRidge,
    RidgeConfig,
    Trial,
    coarse_to_fine,
    cross_entropies,
    leave_one_out,
)
from tpl.scores.calibration import graded_p_values
from tpl.scores.distances import ClassStatistics, mirror, oas_share, packed, unpacked, without_row

RANDOM_FEATURES = 1024  # unless the option says otherwise: equal for all models, so that their sums can be added
STORED = 2000  # feature vectors of all classes together
# Chosen on sets of photos under several encoders, with 3, 10 and 30 photos a class: docs/photos.md.
LDA_EXPONENT = 2.0
KNOWN_WEIGHTS = 1.0, 2.0, 1.0  # of the cosine, the distance and the ridge regression in the unknown score
SHRUNK_AT_LEAST = 0.0, 0.5, 0.7, 0.85, 1.0  # shares of the identity in the covariance; 1: nearest class mean
SHARPNESS: tuple[float, ...] = tuple(2.0 ** (e / 4) for e in range(-40, 9))  # inverse temperatures
USUAL = 0.1, 0.1, 0.5  # inverse temperature of LDA, temperature of the ridge, inverse temperature of the product
PRIOR = 0.25  # nats that half or twice the usual inverse temperature costs; the penalty is quadratic in log2
RULES = RidgeConfig(ridge_criterion="error")
START, START_OF_MANY = STRENGTHS[5], STRENGTHS[8]  # of the search for the ridge's strength: few samples, and many
MANY = 100  # samples
CHOSEN_ON = 500  # samples at most, each left out, that decide what is to be chosen
FEW_MORE = 0.1  # share of the samples there were: so many more do not change what was chosen on `CHOSEN_ON`
SAME_SUMS = 1e-9  # relative difference of sums over the same samples
SMALLEST = 1e-6  # of what remains of a sample's own influence
SAME_PICTURE = 1e-9  # 1 - cosine of the features of a picture, computed twice among different others


class CentredRidge(RandomRidge):
    """Ridge regression with an intercept: random features and targets are centred, which the same sums suffice for."""

    @property
    def centre(self) -> Tensor:
        """The mean of all random features."""
        return self.sums.sum(dim=1) / self.counts.sum().clamp_min(1)

    @property
    def shares(self) -> Tensor:
        """The mean of all targets: every class's share of the samples."""
        return self.counts / self.counts.sum().clamp_min(1)

    def _penalty(self, strength: float) -> float:
        """What is added to the diagonal: the strength in units of the mean variance."""
        diagonal = self.gram.diagonal()
        spread = float((diagonal - self.counts.sum() * self.centre.square()).mean())
        least = SMALLEST * float(diagonal.mean())  # equal samples leave nothing but rounding
        return strength * (max(spread, least) or 1.0)

    def _factor(self, strength: float) -> Tensor | None:
        centre = self.centre
        return _cholesky(self.gram - self.counts.sum() * torch.outer(centre, centre), self._penalty(strength))

    def _weights(self, factor: Tensor) -> Tensor:
        return torch.cholesky_solve(self.sums - torch.outer(self.centre, self.counts), factor).contiguous()

    def outputs(self, hidden: Tensor, weights: Tensor) -> Tensor:
        """Outputs for random features, given the classifier."""
        return (hidden - self.centre) @ weights + self.shares

    def influence(self, hidden: Tensor, factor: Tensor) -> Tensor:
        """The weight of each sample in its own output, through the intercept as well."""
        return super().influence(hidden - self.centre, factor) + 1 / self.counts.sum()

    def _inner_products(self, hidden: Tensor) -> Tensor | None:
        """Of the centred samples, `[n, n]`, if they are all samples of the sums and few: n equations then suffice."""
        few = 2 * len(hidden) <= hidden.shape[1] and len(hidden) == int(self.counts.sum())
        if not few or not torch.isclose(hidden.square().sum(), self.gram.trace(), rtol=SAME_SUMS):
            return None  # of a class that was removed, the Gram matrix keeps its part
        centred = hidden - self.centre
        return centred @ centred.T

    def _attempts(self, hidden: Tensor, y: Tensor, inside: bool) -> Callable[[float], Trial | None]:
        products = self._inner_products(hidden) if inside else None
        if products is None:
            return super()._attempts(hidden, y, inside)
        centred, target = hidden - self.centre, F.one_hot(y, self.classes).double() - self.shares

        def attempt(strength: float) -> Trial | None:
            factor = _cholesky(products, self._penalty(strength))
            if factor is None:
                return None
            weights = (centred.T @ torch.cholesky_solve(target, factor)).contiguous()
            return self._trial(hidden, y, weights, self._influence_of_few(factor, strength))

        return attempt

    def _influence_of_few(self, factor: Tensor, strength: float) -> Tensor:
        """`influence`, with K the inner products: the diagonal of K (K + penalty I)^-1 = I - penalty (K + ...)^-1."""
        inverse = torch.cholesky_inverse(factor).diagonal()
        return 1 - self._penalty(strength) * inverse + 1 / self.counts.sum()

    def left_out(self, z: Tensor, y: Tensor) -> Tensor:
        """Outputs for samples that are part of the sums, each by the regression of all others."""
        hidden = self.hidden(z)
        products = self._inner_products(hidden)
        factor = None if products is None else _cholesky(products, self._penalty(self.strength))
        if factor is None:
            return super().left_out(z, y)
        target = F.one_hot(y, self.classes).double()
        return leave_one_out(self.outputs(hidden, self.weights), self._influence_of_few(factor, self.strength), target)


class Discriminant:
    """Linear discriminant analysis with a covariance that is shrunk towards a multiple of the identity.

    By how much, the oracle approximating estimate says; by `least` in any case.
    """

    def __init__(self, statistics: ClassStatistics, least: float = 0.0) -> None:
        self.counts, self.means = statistics.counts, statistics.means
        freedom = max(int(statistics.seen) - len(self.counts), 1)
        covariance = statistics.spread() / freedom
        share = oas_share(covariance, freedom).clamp_min(least)
        self.share = float(share)
        even = share * covariance.trace() / len(covariance)
        mixed = (1 - share) * covariance
        mixed.diagonal().add_(even.clamp_min(SMALLEST / len(covariance)))
        self.inverse = torch.cholesky_inverse(torch.linalg.cholesky(mixed))
        self.weights = (self.means @ self.inverse).contiguous()  # [classes, dim]
        self.offsets = -0.5 * (self.weights * self.means).sum(dim=1)
        self.own = float((1 - share) / freedom)  # weight of one squared deviation in the covariance

    def logits(self, x: Tensor) -> Tensor:
        """log P(x | class) up to a term that all classes share."""
        return F.linear(x, self.weights, self.offsets)

    def nearness(self, x: Tensor) -> Tensor:
        """log P(x | class) with that term, up to a constant: half the negative squared Mahalanobis distance."""
        return self.logits(x) - 0.5 * ((x @ self.inverse) * x).sum(dim=1, keepdim=True)

    def left_out(self, x: Tensor, y: Tensor) -> Tensor:
        """Nearness of samples that are part of the sums, as if each of them were not; each class has another sample.

        A sample's own deviation d leaves its class's mean and, as a rank-one term, the covariance A. With n samples of
        the class and k = n / (n - 1) times the weight of a deviation,

            (A - k d d^T)^-1 = A^-1 + k A^-1 d d^T A^-1 / (1 - k d^T A^-1 d).
        """
        count = self.counts[y]
        deviations = x - self.means[y]
        turned = deviations @ self.inverse
        k = self.own * count / (count - 1)
        rest = (1 - k * (turned * deviations).sum(dim=1)).clamp_min(SMALLEST)
        along = (turned * x).sum(dim=1, keepdim=True) - turned @ self.means.T
        squared = -2 * self.nearness(x) + (k / rest).unsqueeze(1) * along.square()
        own = F.one_hot(y, len(self.counts)).bool()
        return -0.5 * torch.where(own, squared * (count / (count - 1)).square().unsqueeze(1), squared)


class Calibration(NamedTuple):
    """What follows from stored vectors, each of them left out."""

    left_out: Tensor  # log P of their classes, [n, classes]
    typical: Tensor  # means and deviations of the unknown score's three parts, [2, 3]
    known_scores: Tensor  # how well known they look; sorted


class ClosedForm:
    """Discriminant analysis times ridge regression, with an unknown score; `parts.first_task.Classifier`."""

    def __init__(self, projection: Tensor) -> None:
        device = projection.device
        self.ridge = CentredRidge([projection], RULES)
        self.statistics = ClassStatistics.empty(len(projection), device)  # of unit features
        self.features = torch.zeros(0, len(projection), device=device)  # stored vectors, class by class
        self.labels = torch.zeros(0, dtype=torch.long, device=device)
        self.shrunk = SHRUNK_AT_LEAST[0]  # the least share of the identity in the covariance
        self.sharpness = USUAL[0]  # inverse temperature of the discriminant analysis
        self.sureness = USUAL[2]  # inverse temperature of the product, which would be too sure of itself
        self.chosen_with = 0.0  # samples there were when the three above and the ridge's strength were chosen
        self.discriminant: Discriminant | None = None
        self._calibration: Calibration | None = None  # computed when it is asked for

    @classmethod
    def drawn(cls, dim: int, width: int, generator: torch.Generator, device: torch.device) -> Self:
        """A classifier without classes; `width` 0 stands for the usual number of random features."""
        return cls(torch.randn(dim, width or RANDOM_FEATURES, generator=generator).to(device))

    @property
    def classes(self) -> int:
        """Classes seen."""
        return len(self.statistics.counts)

    def learn(self, z: Tensor, y: Tensor, generator: torch.Generator | None = None) -> None:
        """Add samples; labels may include new classes. The sums are the same as if all had come at once.

        What is chosen by leave-one-out stays, if there are many samples, until there are a tenth more of them.
        """
        found = self.statistics.add(_unit(z), y)
        self.statistics = found._replace(scatter=mirror(found.scatter))
        self._store(z, y)
        if len(self.labels) > CHOSEN_ON and int(self.statistics.seen) <= (1 + FEW_MORE) * self.chosen_with:
            self.ridge.update(z, y)
            self.discriminant, self._calibration = Discriminant(self.statistics, self.shrunk), None
        else:
            self._fit(z, y)

    def update(self, z: Tensor, y: Tensor) -> None:
        """Add more samples of known classes."""
        self.learn(z, y)

    def merge(self, other: ClosedForm) -> None:
        """Add the sums of a classifier with the same random features, whose classes follow these."""
        self.statistics = self.statistics.joined(other.statistics)
        add_sums(self.ridge, other.ridge)
        count = self.classes - other.classes
        self._store(other.features.to(self.features), other.labels.to(self.labels) + count)
        self._fit(self.features[:0], self.labels[:0])

    def forget(self, c: int) -> None:
        """Remove a class and its stored vectors.

        While all samples are stored, nothing of the class is left: the sums are computed anew. Later its part of the
        covariance and of the Gram matrix, which are pooled over classes, stays.
        """
        whole = int(self.statistics.seen) == len(self.labels)
        kept = self.labels != c
        features, labels = self.features[kept], self.labels[kept]
        labels = labels - (labels > c).long()
        if whole and len(labels):
            self._start_again()
            self.learn(features, labels)
            return
        self.statistics, self.features, self.labels = self.statistics.without(c), features, labels
        self.ridge.sums = torch.cat([self.ridge.sums[:, :c], self.ridge.sums[:, c + 1 :]], dim=1)
        self.ridge.counts = without_row(self.ridge.counts, c)
        self._fit(self.features[:0], self.labels[:0])

    def _start_again(self) -> None:
        """Drop all samples and classes."""
        projection = self.ridge.projections[0]
        self.ridge = CentredRidge([projection], RULES)
        self.statistics = ClassStatistics.empty(len(projection), projection.device)
        self.features, self.labels = self.features[:0], self.labels[:0]

    def new_pictures(self, z: Tensor, y: Tensor) -> Tensor:
        """A mask of the samples that are no repetition: of a stored sample of their class, or of one before them."""
        found = torch.ones(len(y), dtype=torch.bool, device=y.device)
        for c in y.unique().tolist():
            rows = torch.nonzero(y == c).squeeze(1)
            x, stored = _unit(z[rows]), _unit(self.features[self.labels == c])
            repeated = (x @ stored.T > 1 - SAME_PICTURE).any(dim=1)
            if len(rows) <= STORED:  # else more comparisons than it is worth
                repeated |= (x @ x.T > 1 - SAME_PICTURE).tril(-1).any(dim=1)
            found[rows[repeated]] = False
        return found

    def _store(self, z: Tensor, y: Tensor) -> None:
        """Keep the same number of vectors of every class: those with the smallest checksums, whatever their order."""
        z, y = torch.cat([self.features, z.to(self.features)]), torch.cat([self.labels, y])
        labels, keys = y.cpu().numpy(), np.array([zlib.crc32(row.tobytes()) for row in z.cpu().numpy()], dtype=np.int64)
        order = np.lexsort((keys, labels))  # class by class, the smallest checksum first
        counts = np.bincount(labels)
        rank = np.arange(len(order)) - np.repeat(counts.cumsum() - counts, counts)
        kept = order[rank < max(STORED // max(self.classes, 1), 2)]
        rows = torch.from_numpy(kept).to(y.device)
        self.features, self.labels = z[rows].contiguous(), y[rows].contiguous()

    # Leave-one-out

    def _rows(self) -> Tensor:
        """Stored vectors that can be left out: their class has another sample."""
        return torch.nonzero(self.statistics.counts[self.labels] > 1).squeeze(1)

    def _fit(self, z: Tensor, y: Tensor) -> None:
        """Add samples to the ridge regression, then choose its strength and all temperatures by leave-one-out."""
        rows = self._rows()
        count = min(len(rows), CHOSEN_ON)
        some = rows[torch.arange(count, device=rows.device) * len(rows) // max(count, 1)]  # of all classes, evenly
        known, labels = self.features[some], self.labels[some]
        self.ridge.strength, self.ridge.temperature = START_OF_MANY if len(rows) > MANY else START, USUAL[1]
        predicted = None
        if self.classes > 1 and len(some):
            predicted = self.ridge.learn_whole(z, y, known, labels)
        else:
            self.ridge.update(z, y)
        if predicted is None:
            predicted = self.ridge.left_out(known, labels)
        x = _unit(known)
        self.discriminant = self._choose(x, labels)
        logits = self.discriminant.left_out(x, labels)
        if self.classes > 1 and len(some):
            self.sureness = 1.0
            self.sureness, _ = _sharpness(self._joined(logits, predicted), labels, USUAL[2])
        self.chosen_with = float(self.statistics.seen)
        # Few samples are left out already; of many, not all may be needed.
        self._calibration = self._calibrated(rows, logits, predicted) if len(some) == len(rows) else None

    @property
    def calibration(self) -> Calibration:
        """What follows from stored vectors, each left out in turn."""
        if self._calibration is None:
            assert self.discriminant is not None
            rows = self._rows()
            z, y = self.features[rows], self.labels[rows]
            self._calibration = self._calibrated(
                rows, self.discriminant.left_out(_unit(z), y), self.ridge.left_out(z, y)
            )
        return self._calibration

    @property
    def smallest_share(self) -> float:
        """The smallest share of known samples that can be counted: one of all that can be left out, and a new one."""
        return 1 / (1 + len(self._rows()))

    def _calibrated(self, rows: Tensor, logits: Tensor, predicted: Tensor) -> Calibration:
        """The calibration, given both classifiers' outputs for stored vectors that are left out."""
        z, y = self.features[rows], self.labels[rows]
        parts = _largest(self._cosines(z, y), logits, predicted) if len(rows) else logits.new_zeros(1, 3)
        deviations = parts.std(dim=0, correction=0)
        typical = torch.stack([parts.mean(dim=0), torch.where(deviations > 0, deviations, 1.0)])
        known = (_known(parts, typical) if len(rows) else parts[:0, 0]).sort().values
        return Calibration(self._joined(logits, predicted), typical, known)

    def _choose(self, x: Tensor, y: Tensor) -> Discriminant:
        """Set how far the covariance is shrunk and the temperature, by unit features that are left out."""
        self.shrunk, self.sharpness, self.sureness = SHRUNK_AT_LEAST[0], USUAL[0], USUAL[2]
        tried = {self.shrunk: Discriminant(self.statistics, self.shrunk)}
        if not len(x) or self.classes < 2:
            return tried[self.shrunk]
        more = [least for least in SHRUNK_AT_LEAST if least > tried[self.shrunk].share]  # others change nothing
        tried |= {least: Discriminant(self.statistics, least) for least in more}
        found = {least: _sharpness(each.left_out(x, y), y, USUAL[0]) for least, each in tried.items()}
        self.shrunk = max(found, key=lambda least: found[least][1])
        self.sharpness, _ = found[self.shrunk]
        return tried[self.shrunk]

    def measured(self) -> tuple[Tensor, Tensor]:
        """The classes of stored vectors, and log P(class) for each by all other samples, `[n, classes]`."""
        return self.labels[self._rows()], self.calibration.left_out

    # Answers

    def log_probabilities(self, z: Tensor) -> Tensor:
        """log P(class) of features, `[n, classes]`, float64."""
        assert self.discriminant is not None
        return self._joined(self.discriminant.logits(_unit(z)), self.ridge.predicted(z))

    def _joined(self, logits: Tensor, predicted: Tensor) -> Tensor:
        lda = (self.sharpness * logits).log_softmax(dim=1)
        product = LDA_EXPONENT * lda + self.ridge.log_softmax(predicted)
        return (self.sureness * product).log_softmax(dim=1)

    def unknown_scores(self, z: Tensor) -> Tensor:
        """1 - p of every sample: of known ones, about a share `a` reach 1 - a, as stored vectors do when left out.

        With n stored vectors, scores above n / (n + 1) are extrapolated: the further out, the higher.
        """
        assert self.discriminant is not None
        parts = _largest(self._cosines(z), self.discriminant.nearness(_unit(z)), self.ridge.predicted(z))
        _, typical, known_scores = self.calibration
        return 1 - graded_p_values(_known(parts, typical), known_scores)

    def _cosines(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        """Cosines to every class's mean; with `y`, samples that are part of the means are left out of them."""
        x, means = _unit(z), self.statistics.means
        cosines = x @ F.normalize(means, dim=1).T
        if y is None or not len(y):
            return cosines
        rest = self.statistics.counts[y].unsqueeze(1) * means[y] - x
        own = (F.normalize(rest, dim=1) * x).sum(dim=1, keepdim=True)
        return torch.where(F.one_hot(y, len(means)).bool(), own, cosines)

    # Storage

    def state(self, whole: bool = False) -> dict[str, Tensor]:
        """Sums, stored vectors, and what was chosen by leave-one-out; of the Gram matrix a triangle, or all."""
        found = {f"ridge.{name}": part for name, part in self.ridge.state(whole).items()}
        found |= {f"unit.{name}": part for name, part in self.statistics._asdict().items()}
        found["unit.scatter"] = packed(self.statistics.scatter)
        chosen = torch.tensor([self.sharpness, self.sureness, self.shrunk, self.chosen_with], dtype=torch.float64)
        return found | {"features": self.features, "labels": self.labels, "sharpness": chosen}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Self:
        """The classifier that `state` came from."""
        ridge = {name.removeprefix("ridge."): part for name, part in state.items() if name.startswith("ridge.")}
        found = cls(ridge["projection"])
        found.ridge = CentredRidge.from_state(ridge, RULES)
        parts = {name: state[f"unit.{name}"] for name in ClassStatistics._fields}
        parts["scatter"] = unpacked(parts["scatter"], len(ridge["projection"]))
        found.statistics = ClassStatistics(**parts)
        found.features, found.labels = state["features"], state["labels"]
        # Classifiers of earlier versions have two or three numbers.
        chosen = state["sharpness"].tolist()
        found.sharpness, found.sureness, shrunk, chosen_with = chosen + [SHRUNK_AT_LEAST[0], 0.0][len(chosen) - 2 :]
        found.shrunk, found.chosen_with = min(max(shrunk, 0.0), 1.0), chosen_with
        found.discriminant = Discriminant(found.statistics, found.shrunk)
        return found


def _cholesky(matrix: Tensor, penalty: float) -> Tensor | None:
    """The Cholesky factor with a penalty on the diagonal; None where that is too small for rounding."""
    ridge = matrix.clone()
    ridge.diagonal().add_(penalty)
    factor, failed = torch.linalg.cholesky_ex(ridge)
    return None if bool(failed) else factor


def _largest(cosines: Tensor, nearness: Tensor, predicted: Tensor) -> Tensor:
    """Over classes, of each: `[n, 3]`."""
    return torch.stack([part.amax(dim=1) for part in (cosines, nearness, predicted)], dim=1)


def _known(parts: Tensor, typical: Tensor) -> Tensor:
    """How well known samples look: a weighted sum of the parts, each in units of its spread over stored vectors."""
    scaled = (parts - typical[0]) / typical[1]
    return scaled @ torch.tensor(KNOWN_WEIGHTS, dtype=scaled.dtype, device=scaled.device)


def same_features(a: ClosedForm, b: ClosedForm) -> bool:
    """Whether two classifiers have the same random features, so that their sums can be added."""
    mine, others = a.ridge.projections[0], b.ridge.projections[0]
    return mine.shape == others.shape and torch.equal(mine, others.to(mine))


def _sharpness(logits: Tensor, y: Tensor, usual: float) -> tuple[float, float]:
    """The most likely inverse temperature of logits of samples that were left out, and its log-likelihood.

    With few samples it is near the usual one.
    """

    def best(values: tuple[float, ...]) -> tuple[int, tuple[float, float]]:
        likelihoods = -cross_entropies(logits, [1 / value for value in values], y).sum(dim=1)
        penalties = [PRIOR * math.log2(value / usual) ** 2 for value in values]
        posterior = likelihoods - torch.tensor(penalties, dtype=likelihoods.dtype).to(likelihoods)
        place = int(posterior.argmax())
        return place, (values[place], float(posterior[place]))

    return coarse_to_fine(SHARPNESS, best)


def _unit(z: Tensor) -> Tensor:
    return F.normalize(z.double(), dim=1)
