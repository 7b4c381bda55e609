"""VOS: unlikely points of the classes' Gaussians in feature space stand for images of other tasks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from scipy.special import gammainccinv
from torch import Tensor

from tpl.engine import IGNORED
from tpl.methods.bank.techniques.base import Technique
from tpl.methods.bank.techniques.shared import mean_over

SAMPLES = 10_000  # points of a class, the least likely of which is its virtual outlier
RIDGE = 1e-4  # added to the covariance's diagonal
WEIGHT = 0.1  # of the uncertainty loss
CERTAIN = 1 - 1e-6  # erfinv is infinite at 1


class VOS(Technique):
    """Cross-entropy, and a logistic regression of real against virtual features on their energy.

    The least likely of many points of a Gaussian is the one with the greatest Mahalanobis norm. Direction and norm of a
    point are independent, so it is any point, stretched: from a norm that is sqrt(dim), give or take 0.7, to the
    median of the greatest of `SAMPLES` norms, each chi-distributed. No point but the outlier itself is drawn.

    Points of the shared covariance need no factor of it: with n kept features z_i of classes y_i, the vector
    `sum_i e_i (z_i - mu_{y_i}) / sqrt(n) + sqrt(RIDGE) e'` has covariance `S + RIDGE * I` for standard normal e, e'.
    """

    name = "vos"
    summary = "unlikely points of the classes' Gaussians as virtual outliers"
    paper = "Du et al., VOS: Learning What You Don't Know by Virtual Outlier Synthesis, ICLR 2022"
    splits = False

    queue_size = 200  # latest features kept of every class; nothing is synthesised before all are there

    def __init__(self, own: int, dim: int, batch: int, device: torch.device) -> None:
        super().__init__(own, dim, batch, device)
        kept = own * self.queue_size
        self.queue = torch.zeros(kept + 1, dim, device=device)  # the last row takes what is not to be kept
        self.seen = torch.zeros(own, dtype=torch.long, device=device)
        self.classes = torch.arange(own, device=device)
        # One set of normal numbers serves all classes: each takes them turned on by one queue.
        turns = self.classes.unsqueeze(1) * self.queue_size + torch.arange(self.numbers, device=device)
        self.turns = turns % self.numbers
        self.stretch = math.sqrt(2 * gammainccinv(dim / 2, math.log(2) / SAMPLES) / dim)
        self.scale = torch.ones((), device=device, requires_grad=True)
        self.offset = torch.zeros((), device=device, requires_grad=True)

    @property
    def numbers(self) -> int:
        """One for every feature vector that is kept and one for every dimension."""
        return self.own * self.queue_size + self.dim

    def parameters(self) -> list[Tensor]:
        """The logistic regression's slope and offset."""
        return [self.scale, self.offset]

    def loss(self, z: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """Cross-entropy + weight * uncertainty loss, once every class's queue is full."""
        self.keep(z.detach(), labels)
        logits, virtual = F.linear(z, weight, bias), F.linear(self.virtual(draws), weight, bias)
        uncertainty = mean_over(F.softplus(-self._real(logits)), labels != IGNORED)
        uncertainty = uncertainty + F.softplus(self._real(virtual)).mean()
        full = (self.seen >= self.queue_size).all()
        return F.cross_entropy(logits, labels, ignore_index=IGNORED) + WEIGHT * full * uncertainty

    def _real(self, logits: Tensor) -> Tensor:
        """The log-odds of being real, from the energy -logsumexp f."""
        return self.scale * logits.logsumexp(dim=1) + self.offset

    @torch.no_grad()
    def keep(self, z: Tensor, labels: Tensor) -> None:
        """Write features over the oldest ones of their classes."""
        member = labels.unsqueeze(1) == self.classes
        count = member.long().cumsum(dim=0)
        label = labels.clamp_min(0)
        rank = (count * member).sum(dim=1) - 1  # among the batch's rows of its class
        place = label * self.queue_size + (self.seen[label] + rank) % self.queue_size
        latest = rank >= count[-1][label] - self.queue_size  # no place is written twice
        last = len(self.queue) - 1
        self.queue.index_copy_(0, torch.where((labels != IGNORED) & latest, place, last), z)
        self.seen += count[-1]

    @torch.no_grad()
    def virtual(self, draws: Tensor) -> Tensor:
        """One virtual outlier of every class, `[own, dim]`."""
        features = self.queue[:-1].view(self.own, self.queue_size, self.dim)
        means = features.mean(dim=1)
        deviations = (features - means.unsqueeze(1)).flatten(0, 1)
        normal = (math.sqrt(2) * torch.erfinv((2 * draws - 1).clamp(-CERTAIN, CERTAIN)))[self.turns]
        spread = normal[:, : -self.dim] @ deviations / math.sqrt(len(deviations))
        return means + self.stretch * (spread + math.sqrt(RIDGE) * normal[:, -self.dim :])
