"""OpenMax: probability of an unknown class, by the extremes of every class's distances."""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.scores.base import Score

FAR = 1000  # location of the Weibull, in spreads of the tail below its smallest distance
NEVER = (1.0, 0.0, torch.inf)  # shape, location, scale of a Weibull that no distance reaches


class OpenMax(Score):
    """S(x) = -P(unknown), from logits that the unknown class has taken its share of.

    d_c = || f - m_c ||, m_c the mean logits of the samples correctly classified as c; a Weibull is fitted to the
    `tail` largest d_c. Of the class with the i-th largest logit, i <= `alpha`, the share
    w_c = (alpha + 1 - i) / alpha * Weibull_c(d_c) goes to the unknown class:

        f_c <- f_c (1 - w_c),   f_unknown = sum_c w_c f_c,   P = softmax over c + 1 classes.

    `alpha` is at most the number of classes. A class that is never recognised is described by all its samples; where
    its distances are too few or too alike for a Weibull, those of all classes together stand in.
    """

    name = "openmax"
    summary = "probability of no unknown class, by extreme values"
    paper = "Bendale and Boult, Towards open set deep networks, CVPR 2016"

    means_: Tensor
    weibull_: Tensor

    def __init__(self, alpha: int = 3, tail: int = 20) -> None:
        self.alpha, self.tail = alpha, tail

    def fit_features(self, z: Tensor, logits: Tensor, y: Tensor, others: Tensor | None = None) -> Self:
        """Mean logits `[c, c]` and shape, location and scale of the Weibull `[3, c]` per class."""
        logits = logits.double()
        classes = logits.shape[1]
        own = F.one_hot(y, classes).bool()
        recognised = own & (logits.argmax(dim=1) == y).unsqueeze(1)
        of_class = torch.where(recognised.any(dim=0), recognised, own).T
        counts = of_class.sum(dim=1)
        self.means_ = of_class.double() @ logits / counts.clamp_min(1).unsqueeze(1)
        distances = [torch.linalg.vector_norm(logits[of_class[c]] - self.means_[c], dim=1) for c in range(classes)]
        together = fit_weibull(torch.cat(distances), self.tail) or NEVER
        rows = [(fit_weibull(d, self.tail) or together) if len(d) else NEVER for d in distances]
        self.weibull_ = torch.tensor(rows, dtype=torch.float64, device=logits.device).T.contiguous()
        return self

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """Minus the softmax of the unknown class."""
        logits = logits.double()
        alpha = min(self.alpha, logits.shape[1])
        ranks = logits.argsort(dim=1, descending=True, stable=True)[:, :alpha]
        weights = torch.arange(alpha, 0, -1, dtype=torch.float64, device=logits.device) / alpha
        shares = torch.zeros_like(logits).scatter(1, ranks, weights.expand_as(ranks)) * self._extremeness(logits)
        revised = torch.cat([logits * (1 - shares), (logits * shares).sum(dim=1, keepdim=True)], dim=1)
        return -revised.softmax(dim=1)[:, -1]

    def _extremeness(self, logits: Tensor) -> Tensor:
        """Weibull_c(d_c) = 1 - exp(-((d_c - location) / scale)^shape), `[n, c]`."""
        shape, location, scale = self.weibull_
        distances = torch.cdist(logits, self.means_, compute_mode="donot_use_mm_for_euclid_dist")
        relative = (distances - location).clamp_min(0) / scale
        return -torch.expm1(-(shape * relative.log()).exp())


def fit_weibull(distances: Tensor, tail: int) -> tuple[float, float, float] | None:
    """Shape, location and scale by maximum likelihood on the largest distances; none where they do not differ.

    As in libMR, which OpenMax was published with, the location is fixed far below the tail (a free one has no maximum).
    In units of the tail's spread the fit is the same problem for logits of any size.
    """
    from scipy.stats import weibull_min  # a second to import, for one score

    largest = distances.sort(descending=True).values[:tail].cpu()
    if len(largest) < 2 or bool(largest[0] - largest[-1] <= 1e-9 * largest[0]):
        return None
    low, spread = float(largest[-1]), float(largest[0] - largest[-1])
    shape, _, scale = weibull_min.fit((largest.numpy() - low) / spread + FAR, floc=0)
    return float(shape), low - FAR * spread, float(scale) * spread
