"""Ridge classifiers that were learned apart, in one: their sums are added.

The Gram matrix and the class sums are sums over samples. Two classifiers on the same random features of the same input
therefore add up to the classifier that has learned all samples, to rounding. For other random features, the samples
themselves are needed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.methods.parts.ridge import BLOCK, RandomRidge
from tpl.scores.distances import mirror


def same_features(a: RandomRidge, b: RandomRidge) -> bool:
    """Whether two classifiers have the same random features, if their inputs are the same."""
    pairs = zip(a.projections, b.projections, strict=False)
    return len(a.projections) == len(b.projections) and all(torch.equal(x, y.to(x)) for x, y in pairs)


def add_sums(a: RandomRidge, b: RandomRidge) -> None:
    """Add the sums of `b`, whose classes follow those of `a`; `finish` computes the classifier."""
    a.gram = mirror(a.gram + b.gram.to(a.gram))
    a.sums = torch.cat([a.sums, b.sums.to(a.sums)], dim=1)
    a.counts = torch.cat([a.counts, b.counts.to(a.counts)])


def add_samples(a: RandomRidge, z: Tensor, y: Tensor, counts: Tensor) -> None:
    """Add samples of new classes, `y` counting from 0 among them; `finish` computes the classifier.

    A class with fewer samples than its `counts` says is estimated: each sample stands for several.
    """
    weights = counts / y.bincount(minlength=len(counts)).clamp_min(1)
    sums = torch.zeros(len(a.gram), len(counts), dtype=torch.float64, device=a.gram.device)
    for part, labels in zip(z.split(BLOCK), y.split(BLOCK), strict=True):
        h = a.hidden(part)
        weighted = h * weights[labels].unsqueeze(1)
        a.gram = a.gram + weighted.T @ h
        sums += weighted.T @ F.one_hot(labels, len(counts)).double()
    mirror(a.gram)
    a.sums, a.counts = torch.cat([a.sums, sums], dim=1), torch.cat([a.counts, counts.to(a.counts)])


def finish(a: RandomRidge, known: Tensor, labels: Tensor) -> None:
    """Compute the classifier; ridge and temperature are chosen on `known` samples, which are part of the sums."""
    if len(labels):
        a.learn_whole(known[:0], labels[:0], known, labels)
    else:
        a.update(known[:0], labels[:0])
