"""What more images would bring: the error of a closed-form classifier on a quarter, a half and all of them.

Errors usually fall by a power of the number of images, so each doubling divides them by about the same factor. The
factor is measured on random subsets, several times, and applied once more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import quantiles

import torch
from torch import Tensor

from tpl.advice.labels import extended, ridge_weights

SHARES = (0.25, 0.5, 1.0)
APART = 0.2  # of every class, to measure on
REPEATS = 20
DRAWS = 199  # of the interval
STRENGTH = 0.1  # of the ridge
FEWEST = 5  # images of a class that a learning curve needs


@dataclass(frozen=True)
class Outlook:
    """Accuracy now, and what to expect with twice the images: about three in four times between `low` and `high`."""

    now: float
    doubled: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        """The outlook as JSON."""
        return {"now": self.now, "doubled": self.doubled, "low": self.low, "high": self.high}


def outlook(z: Tensor, labels: Tensor, classes: int, now: float, seed: int = 0) -> Outlook | None:
    """The accuracy to expect with twice the images of every class, given the accuracy `now`; None with too few."""
    counts = labels.bincount(minlength=classes)
    if classes < 2 or int(counts.min()) < FEWEST:
        return None
    draw = torch.Generator().manual_seed(seed)
    errors = torch.tensor([_errors(z, labels, classes, draw) for _ in range(REPEATS)], dtype=torch.float64)
    tested = REPEATS * sum(max(round(APART * int(count)), 1) for count in counts)
    expected = 1 - (1 - now) * 2 ** -_slope(errors.mean(dim=0), tested)
    spread = math.sqrt((now * (1 - now) * len(labels) + 0.25) / (len(labels) + 1) / len(labels))
    samples = []
    for noise in torch.randn(DRAWS, generator=draw, dtype=torch.float64).tolist():  # of today's accuracy
        drawn = errors[torch.randint(REPEATS, (REPEATS,), generator=draw)].mean(dim=0)
        samples.append(1 - min(max(1 - now + spread * noise, 0), 1) * 2 ** -_slope(drawn, tested))
    low, *_, high = quantiles(samples, n=10)
    return Outlook(now, expected, low, high)


def _errors(z: Tensor, labels: Tensor, classes: int, draw: torch.Generator) -> list[float]:
    """Errors on images set apart, of classifiers of a quarter, half and all of the others."""
    order = torch.rand(len(labels), generator=draw, dtype=torch.float64)
    place = torch.zeros(len(labels), dtype=torch.float64)  # rank within the class, from 0 to 1
    test = torch.zeros(len(labels), dtype=torch.bool)
    for c in range(classes):
        own = torch.nonzero(labels == c).squeeze(1)
        own = own[order[own].argsort()]
        apart = max(round(APART * len(own)), 1)
        test[own[:apart]] = True
        place[own[apart:]] = torch.arange(len(own) - apart, dtype=torch.float64) / (len(own) - apart)
    found = []
    for share in SHARES:
        train = ~test & (place < share)
        weights = ridge_weights(z[train], labels[train], classes, STRENGTH)
        found.append(float(((extended(z[test]) @ weights).argmax(dim=1) != labels[test]).double().mean()))
    return found


def _slope(errors: Tensor, tested: int) -> float:
    """The exponent b of error ~ images^-b, between 0 and 1; half an error is added, so that none is not infinite."""
    y = [math.log((float(error) * tested + 0.5) / (tested + 1)) for error in errors]
    x = [math.log(share) for share in SHARES]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    top = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return min(max(-top / sum((a - mean_x) ** 2 for a in x), 0.0), 1.0)
