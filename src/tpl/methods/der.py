"""DER: dynamically expandable representation (Yan et al., CVPR 2021).

Every task gets a feature extractor of its own; the old ones are frozen, and a classifier H reads all their features
side by side. The new extractor phi_t starts from the one before. It is trained with a second, auxiliary classifier A on
its features alone, which tells the new classes from each other and, as one more class, from everything old:

    loss = CE(H([phi_1 .. phi_t]), y) + CE(A(phi_t), y'),   y' = 0 for every old class, 1, 2, ... for the new ones

so that phi_t learns what the others do not know yet. New images outnumber remembered ones, and the classifier's new
rows grow longer than its old ones. After training they are scaled back (weight alignment):

    W_new <- W_new * mean ||w_old|| / mean ||w_new||

What differs from public codes: the official one trains the classifier anew on a balanced set instead of aligning it;
alignment is what the widely used re-implementation does, and needs no further training. Learned masks that prune the
extractors are in the paper, but were never released, and are not here. With adapters an extractor is two adapters a
block and the layer norms, a tenth of the trunk's size; the trunk is shared and frozen. Public code joins new and
remembered images in one shuffled set; here, as for all methods, a step has equally many of both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.config import option
from tpl.engine import Listener, Samples
from tpl.methods.base import register
from tpl.methods.parts.expansion import ExpandedNetwork, ExpansionMethod, Head
from tpl.methods.parts.network import CrossEntropy
from tpl.methods.parts.rehearsal import RehearsalConfig
from tpl.stream import Task


@dataclass(frozen=True)
class DERConfig(RehearsalConfig):
    """DER's options beyond those of training and memory."""

    auxiliary: float = option(1.0, "weight of the auxiliary loss", minimum=0)
    align: bool = option(True, "whether the classifier's new rows are scaled to the length of its old ones")


@register
class DER(ExpansionMethod):
    """One frozen extractor a task, and one classifier over all of them."""

    name = "der"
    summary = "a new feature extractor for every task, one classifier over all, weights aligned, with replay"
    paper = "Yan et al., DER: Dynamically Expandable Representation for Class Incremental Learning, CVPR 2021"
    keeps = "a class-balanced memory, and an extractor a task"
    cost = "new and remembered images through every task's extractor; as many passes an answer"
    splits = True
    config_class = DERConfig
    config: DERConfig

    def learn_task(self, task: Task, samples: Samples, listen: Listener) -> None:
        """Expand, train the new extractor and the classifier, align, remember."""
        known, network = len(self.classes_), self.network
        if known:
            network.expand(self.generator("columns"))
        new = self.grow(task, samples)
        if known:
            objective = AuxiliaryLoss(network, known, self.config.auxiliary, self.generator("auxiliary"))
            trainable = [*network.parameters(), *objective.head]
            self.fit(new, listen, objective, self.old_samples(), trainable=trainable)
        else:
            self.fit(new, listen)
        if known and self.config.align:
            with torch.no_grad():
                network.head_weight.copy_(aligned(network.head_weight, known))
        self.remember(task, samples)


class AuxiliaryLoss(CrossEntropy):
    """Cross-entropy of the classifier over all extractors, and of the auxiliary one over the newest."""

    network: ExpandedNetwork

    def __init__(self, network: ExpandedNetwork, known: int, weight: float, generator: torch.Generator) -> None:
        super().__init__(network)
        self.known, self.weight = known, weight
        self.head = Head.new(len(network.head_bias) - known + 1, network, generator)

    def losses(self, images: Tensor, labels: Tensor, progress: Tensor, draws: Tensor) -> Tensor:
        """Both on one batch."""
        features = self.network.features(images)
        entropy = F.cross_entropy(self.network.logits(features), labels[0])
        newest = self.head(features[:, -self.network.dim :])
        return (entropy + self.weight * F.cross_entropy(newest, auxiliary_labels(labels[0], self.known))).unsqueeze(0)


def auxiliary_labels(labels: Tensor, known: int) -> Tensor:
    """0 for every one of the `known` old classes, 1, 2, ... for the new ones; rows without a label stay so."""
    return torch.where(labels < 0, labels, (labels - known + 1).clamp_min(0))


def aligned(weight: Tensor, known: int) -> Tensor:
    """A classifier's rows, with the new ones as long on average as the `known` old ones."""
    lengths = weight.norm(dim=1)
    return torch.cat([weight[:known], weight[known:] * (lengths[:known].mean() / lengths[known:].mean())])
