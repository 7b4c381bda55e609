"""A cosine head: logits are scaled cosines between features and the head's rows.

It is trained to shape the features, which are then compared with class prototypes in the same way.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.engine import Callback, Samples
from tpl.methods.parts.network import CrossEntropy, Network, NetworkMethod
from tpl.stream import Task


class CosineCrossEntropy(CrossEntropy):
    """Cross-entropy of scaled cosines between features and the head's rows."""

    def __init__(self, network: Network, scale: Tensor) -> None:
        super().__init__(network)
        self.scale = scale

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of one batch."""
        logits = self.scale * cosines(self.network.features(images), self.network.head_weight)
        return F.cross_entropy(logits, labels)


class CosineHeadMethod(NetworkMethod):
    """A method whose network is trained under a cosine head of one task's classes, which is then dropped."""

    def train_features(self, task: Task, samples: Samples, callback: Callback) -> Tensor:
        """Train adapters, norms, cosine head and its scale on one task; returns the scale."""
        network = self.network
        scale = nn.Parameter(torch.ones((), device=self.compute.device))
        network.grow(len(task.classes), self.generator("head"))
        trainable = [p for p in network.parameters() if p is not network.head_bias]
        self.fit(samples, callback, CosineCrossEntropy(network, scale), trainable=[*trainable, scale])
        for _ in task.classes:
            network.drop(0)
        return scale.detach()


def cosines(rows: Tensor, others: Tensor) -> Tensor:
    """Cosine similarities of all pairs, `[rows, others]`."""
    return F.normalize(rows, dim=1) @ F.normalize(others, dim=1).T
