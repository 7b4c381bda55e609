"""Labels that look wrong, and classes that look alike: every image against all others (leave-one-out).

A ridge regression of the labels on the encoder's features predicts each image from all others in closed form. Its
nearest neighbours vote, too. A label is suspected where both agree on another class, and the ridge is sure.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

STRENGTHS = tuple(10.0**e for e in range(-4, 3))  # of the ridge, in units of the mean diagonal
TEMPERATURES = tuple(2.0 ** (e / 2) for e in range(-14, 1))
NEIGHBOURS = 5
SURE = 0.6  # probability of the other class from which a label is suspected
DOUBTED = 0.1  # and the largest that its own class may have
OFTEN = 0.1  # share of two classes' images that are taken for the other from which the classes look alike
BLOCK = 2048


@dataclass(frozen=True)
class LeaveOneOut:
    """Predictions of every image by all others: class probabilities, and the share of neighbours of each class."""

    labels: Tensor  # [n]
    probabilities: Tensor  # [n, classes]
    votes: Tensor  # [n, classes]

    @property
    def predicted(self) -> Tensor:
        """The most probable class of every image."""
        return self.probabilities.argmax(dim=1)

    @property
    def right(self) -> Tensor:
        """Whether each image is predicted as labelled."""
        return self.predicted == self.labels

    def suspects(self) -> list[tuple[int, int, float]]:
        """Images whose label looks wrong: row, likely class, its probability; the most certain first."""
        own = self.labels.unsqueeze(1)
        best, likely = self.probabilities.max(dim=1)
        mine = self.probabilities.gather(1, own).squeeze(1)
        more = self.votes.gather(1, likely.unsqueeze(1)) > self.votes.gather(1, own)
        wrong = (likely != self.labels) & (best >= SURE) & (mine <= DOUBTED) & more.squeeze(1)
        rows = torch.nonzero(wrong).squeeze(1)
        order = best[rows].argsort(descending=True, stable=True)
        return [(int(i), int(likely[i]), float(best[i])) for i in rows[order]]

    def confusion(self) -> Tensor:
        """Number of images by labelled class (rows) and predicted class (columns)."""
        classes = self.probabilities.shape[1]
        table = torch.zeros(classes, classes, dtype=torch.long)
        return table.index_put_((self.labels, self.predicted), torch.ones_like(self.labels), accumulate=True)

    def alike(self) -> list[tuple[int, int, int, int]]:
        """Pairs of classes that are often taken for each other: both classes, images confused, images of both."""
        table = self.confusion()
        counts = table.sum(dim=1)
        both = table + table.T
        pairs = [
            (i, j, int(both[i, j]), int(counts[i] + counts[j]))
            for i, j in torch.nonzero(torch.triu(both, diagonal=1)).tolist()
        ]
        often = [pair for pair in pairs if pair[2] > 1 and pair[2] >= OFTEN * pair[3]]
        return sorted(often, key=lambda pair: -pair[2] / pair[3])


def leave_one_out(z: Tensor, labels: Tensor, classes: int) -> LeaveOneOut:
    """Predict every image of features `z` (of unit length) by all others; each class counts the same.

    A class without images takes no part: its columns are 0, and the others are as if it did not exist.
    """
    present, numbers = labels.unique(return_inverse=True)
    target = F.one_hot(numbers, len(present)).double()
    weights = _balanced(numbers, len(present))
    best = min((_ridge(z, target, weights, strength) for strength in STRENGTHS), key=lambda p: _entropy(p, numbers)[0])
    probabilities = (best / _entropy(best, numbers)[1]).softmax(dim=1)
    empty = probabilities.new_zeros(len(labels), classes)
    return LeaveOneOut(
        labels, empty.index_copy(1, present, probabilities), empty.index_copy(1, present, _votes(z, target))
    )


def ridge_weights(z: Tensor, labels: Tensor, classes: int, strength: float) -> Tensor:
    """The ridge classifier on features `z`, `[dim + 1, classes]`; each class counts the same."""
    target, weights = F.one_hot(labels, classes).double(), _balanced(labels, classes)
    x = extended(z)
    found: Tensor = torch.linalg.solve(_system(x, weights, strength), (x.T * weights) @ target)
    return found


def extended(z: Tensor) -> Tensor:
    """Features with a constant, for the intercept."""
    return torch.cat([z, torch.ones_like(z[:, :1])], dim=1)


def _balanced(labels: Tensor, classes: int) -> Tensor:
    counts = labels.bincount(minlength=classes).clamp_min(1)
    return (1 / counts.double())[labels] * len(labels) / int((labels.bincount(minlength=classes) > 0).sum())


def _system(x: Tensor, weights: Tensor, strength: float) -> Tensor:
    gram = (x.T * weights) @ x
    ridge = torch.full((len(gram),), strength * float(gram.diagonal()[:-1].mean()), dtype=gram.dtype)
    ridge[-1] = 1e-6 * float(gram[-1, -1])  # the intercept is hardly shrunk
    return gram + ridge.diag()


def _ridge(z: Tensor, target: Tensor, weights: Tensor, strength: float) -> Tensor:
    """Every row predicted by the weighted ridge regression of all others, in closed form."""
    x = extended(z)
    inverse = torch.linalg.inv(_system(x, weights, strength))
    leverage = weights * ((x @ inverse) * x).sum(dim=1)
    predicted = x @ (inverse @ ((x.T * weights) @ target))
    own = leverage.clamp_max(1 - 1e-6).unsqueeze(1)
    rest: Tensor = (predicted - own * target) / (1 - own)
    return rest


def _entropy(predicted: Tensor, labels: Tensor) -> tuple[float, float]:
    """The smallest mean cross-entropy over temperatures, and the temperature."""
    return min((float(F.cross_entropy(predicted / t, labels)), t) for t in TEMPERATURES)


def _votes(z: Tensor, target: Tensor) -> Tensor:
    """The share of each image's nearest others that have each class, weighted against frequent classes."""
    count = min(NEIGHBOURS, len(z) - 1)
    if count < 1:
        return torch.zeros_like(target)
    votes = []
    for start in range(0, len(z), BLOCK):
        near = z[start : start + BLOCK] @ z.T
        near[torch.arange(len(near)), torch.arange(start, start + len(near))] = -torch.inf
        votes.append(target[near.topk(count, dim=1).indices].sum(dim=1))
    found = torch.cat(votes) / target.sum(dim=0).clamp_min(1)
    return found / found.sum(dim=1, keepdim=True).clamp_min(1e-12)
