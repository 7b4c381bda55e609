"""OOD scores from the logits of a task's own classes."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.scores.base import Score
from tpl.scores.distances import class_means

SMALLEST_P = 1e-12  # a smaller probability counts as this one, in KL matching
FAR = 1000  # location of the Weibull, in spreads of the tail below its smallest distance
NEVER = (1.0, 0.0, torch.inf)  # shape, location, scale of a Weibull that no distance reaches


class LogitScore(Score):
    """A score without anything to fit."""

    def fit_features(self, z: Tensor, logits: Tensor, y: Tensor, others: Tensor | None = None) -> Self:
        """Nothing to fit."""
        return self


class MaxLogit(LogitScore):
    """MLS: max_c f_c."""

    name = "mls"
    summary = "maximum logit"
    paper = "Hendrycks et al., Scaling Out-of-Distribution Detection for Real-World Settings, ICML 2022"

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """max_c f_c."""
        return logits.double().amax(dim=1)


class MaxSoftmax(LogitScore):
    """MSP: max_c softmax(f)_c (Hendrycks and Gimpel, 2016)."""

    name = "msp"
    summary = "maximum softmax probability"
    paper = "Hendrycks and Gimpel, A Baseline for Detecting Misclassified and Out-of-Distribution Examples, ICLR 2017"

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """max_c softmax(f)_c."""
        return logits.double().softmax(dim=1).amax(dim=1)


class Energy(LogitScore):
    """EBO: log sum_c exp f_c (Liu et al., 2020), at temperature 1."""

    name = "ebo"
    summary = "free energy of the logits"
    paper = "Liu et al., Energy-based Out-of-distribution Detection, NeurIPS 2020"

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """logsumexp_c f_c."""
        return torch.logsumexp(logits.double(), dim=1)


class GradNorm(LogitScore):
    """S(x) = || d/dW sum_c -log softmax(f)_c ||_1, over the weight of the head.

    The gradient is the outer product of C softmax(f) - 1 and z, so no backward pass is needed:
    S(x) = || C softmax(f) - 1 ||_1 * || z ||_1.
    """

    name = "gradnorm"
    summary = "size of the head's gradient towards a uniform prediction"
    paper = "Huang et al., GradNorm, NeurIPS 2021"

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """|| C p - 1 ||_1 * || z ||_1."""
        slope = logits.shape[1] * logits.double().softmax(dim=1) - 1
        return slope.abs().sum(dim=1) * z.double().abs().sum(dim=1)


class KLMatching(Score):
    """S(x) = -min_c KL(p || d_c), p = softmax(f), d_c the mean p of training samples predicted as class c.

    A class that is never predicted has all its probability on itself.
    """

    name = "klm"
    summary = "divergence from the nearest class's typical prediction"
    paper = "Hendrycks et al., Scaling out-of-distribution detection, ICML 2022"

    templates_: Tensor

    def fit_features(self, z: Tensor, logits: Tensor, y: Tensor, others: Tensor | None = None) -> Self:
        """A template d_c per class, `[c, c]`."""
        p = logits.double().softmax(dim=1)
        counts, means = class_means(p, p.argmax(dim=1), p.shape[1])
        certain = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)
        self.templates_ = torch.where(counts.unsqueeze(1) > 0, means, certain).clamp_min(SMALLEST_P)
        return self

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """-min_c sum_k p_k (log p_k - log d_ck)."""
        p = logits.double().softmax(dim=1).clamp_min(SMALLEST_P)
        divergence = (p * p.log()).sum(dim=1, keepdim=True) - p @ self.templates_.log().T
        return -divergence.amin(dim=1)


class Odin(LogitScore):
    """S(x) = max_c softmax(f(x') / T)_c, where x' = `perturb` of x.

    A score has no access to images: the caller passes the logits of x' in place of features.
    All values lie close to 1 / c, so they are comparable in float64 only.
    """

    name = "odin"
    summary = "tempered softmax of the perturbed image"
    paper = "Liang et al., ODIN, ICLR 2018"
    perturbs: ClassVar[bool] = True  # whether `score_features` expects the logits of a perturbed image as features

    def __init__(self, temperature: float = 1000.0, epsilon: float = 0.0014) -> None:
        self.temperature, self.epsilon = temperature, epsilon

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """max_c softmax(z / T)_c with `z` the logits of the perturbed image; those of the clean one are not used."""
        return (z.double() / self.temperature).softmax(dim=1).amax(dim=1)


def perturb(images: Tensor, gradient: Tensor, epsilon: float, std: Tensor) -> Tensor:
    """x' = x - epsilon * sign(gradient) / std, for normalised images `[n, channels, h, w]`.

    `gradient` is that of CE(f / T, predicted class) with respect to the images, `std` the deviation per channel that
    they were divided by, `[channels]` or anything that broadcasts: `epsilon` is in units of pixel values from 0 to 1.
    """
    if std.ndim == 1:
        std = std.view(-1, 1, 1)
    return images - epsilon * gradient.sign() / std.to(images)


class OpenMax(Score):
    """S(x) = -P(unknown), by the extreme values of every class's distances.

    d_c = || f - m_c ||, m_c the mean logits of the samples correctly classified as c; a Weibull is fitted to the
    `tail` largest d_c. Of the class with the i-th largest logit, i <= `alpha`, the share
    w_c = (alpha + 1 - i) / alpha * Weibull_c(d_c) goes to the unknown class:

        f_c <- f_c (1 - w_c),   f_unknown = sum_c w_c f_c,   P = softmax over c + 1 classes.

    `alpha` is at most the number of classes. A class that is never recognised is described by all its samples; where
    its distances are too few or too similar for a Weibull, those of all classes together are used.
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
    """Shape, location and scale by maximum likelihood on the largest distances; None where they do not differ.

    The location is fixed far below the tail, as in libMR, which OpenMax was published with: a free one has no maximum.
    In units of the tail's spread the fit is the same problem for logits of any size.
    """
    from scipy.stats import weibull_min  # a second to import, for one score

    largest = distances.sort(descending=True).values[:tail].cpu()
    if len(largest) < 2 or bool(largest[0] - largest[-1] <= 1e-9 * largest[0]):
        return None
    low, spread = float(largest[-1]), float(largest[0] - largest[-1])
    shape, _, scale = weibull_min.fit((largest.numpy() - low) / spread + FAR, floc=0)
    return float(shape), low - FAR * spread, float(scale) * spread
