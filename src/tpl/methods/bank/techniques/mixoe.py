"""MixOE: boxes of other tasks' images are pasted into copies of the new ones; the more, the less sure the answer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.engine import IGNORED
from tpl.methods.bank.techniques.base import Technique
from tpl.methods.bank.techniques.shared import box, mean_over, to_uniform

ALPHA = 0.1  # the share that a new image keeps is drawn from Beta(alpha, 1), whose quantiles are u^(1 / alpha)
WEIGHT = 1.0  # of the mixtures' term


class MixOE(Technique):
    """The new images as they are and, in the outliers' rows, mixtures of both: row i's with the i-th outlier."""

    name = "mixoe"
    summary = "images of earlier tasks pasted into new ones, labels mixed with the uniform distribution"
    paper = (
        "Zhang et al., Mixture Outlier Exposure: Towards Out-of-Distribution Detection in Fine-grained Environments, "
        "WACV 2023"
    )
    outliers = True

    size = (0, 0)  # of the images that were mixed last: `loss` is not shown them

    @property
    def numbers(self) -> int:
        """The box's share and centre."""
        return 3

    def box(self, draws: Tensor) -> Tensor:
        """Where a step's mixtures show the outlier, `[h, w]`."""
        return box(self.size, 1 - draws[:1] ** (1 / ALPHA), draws[1:3])

    def mixed(self, images: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """New images as they are, outliers only in a box within a new image."""
        self.size = (images.shape[2], images.shape[3])
        shown = self.box(draws) | ~self._mixture(labels)[:, None, None, None]
        return torch.where(shown, images, images.roll(len(labels) // 2, 0))

    def loss(self, z: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """CE on the new images + weight * CE to lambda * one-hot + (1 - lambda) / C on the mixtures."""
        logits, mixture = F.linear(z, weight, bias), self._mixture(labels)
        targets = torch.where(mixture, labels.roll(len(labels) // 2), labels)
        new = (labels != IGNORED) & (labels != self.own)
        entropies = F.cross_entropy(
            logits, torch.where(new | mixture, targets, IGNORED), ignore_index=IGNORED, reduction="none"
        )
        pasted = self.box(draws).float().mean()
        mixed = torch.lerp(entropies, to_uniform(logits), pasted)
        return mean_over(entropies, new) + WEIGHT * mean_over(mixed, mixture)

    def _mixture(self, labels: Tensor) -> Tensor:
        """Rows of outliers whose new image, half a batch before them, counts: there are none in the first task."""
        partner = labels.roll(len(labels) // 2)
        return (labels == self.own) & (partner != IGNORED) & (partner != self.own)
