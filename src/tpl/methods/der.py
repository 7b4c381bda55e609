"""DER: dynamically expandable representation (Yan et al., CVPR 2021).

Every task gets a feature extractor of its own; the old ones are frozen, and a classifier H takes all their concatenated
features. The new extractor phi_t starts from the one before. It is trained with a second, auxiliary classifier A on its
features alone, with one output for each new class and one for all old classes together:

    loss = CE(H([phi_1 .. phi_t]), y) + CE(A(phi_t), y'),   y' = 0 for every old class, 1, 2, ... for the new ones

so that phi_t learns features that the others lack. New images outnumber remembered ones, and the classifier prefers the
new classes. There are three ways to correct that after a task:

    classifier=retrained   H is initialised again and trained on a class-balanced set (the paper)
    classifier=aligned     W_new <- W_new * mean ||w_old|| / mean ||w_new||   (the widely used re-implementation)
    classifier=trained     nothing

Alignment assumes that new rows are the longer ones. With every task old rows grow by new columns, and where training is
short they are soon longer than new ones: alignment then favours the new classes even more (docs/baselines.md).

Adapted to adapters: an extractor is two adapters a block and the layer norms, a tenth of the trunk's size; the trunk is
shared and frozen. H is retrained on features divided by their mean length, so that one rate suits any encoder;
the published temperature of 5, which makes a step 25 times as short, is part of that rate. What differs from public
codes: learned masks that prune the extractors are in the paper, but were never released, and are not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.config import option
from tpl.engine import Callback, Recipe, Samples
from tpl.methods.base import register
from tpl.methods.parts.expansion import ExpandedNetwork, ExpansionMethod, Head
from tpl.methods.parts.network import CrossEntropy
from tpl.methods.parts.rehearsal import RehearsalConfig, balanced, fit_rows
from tpl.stream import Task


@dataclass(frozen=True)
class DERConfig(RehearsalConfig):
    """DER's options beyond those of training and memory."""

    auxiliary_weight: float = option(1.0, "weight of the auxiliary loss", minimum=0, group="loss")
    classifier: str = option(
        "retrained",
        "what becomes of it after a task; retrained: on a balanced set (paper); aligned: new rows are scaled to the "
        "length of old ones (public code); trained: nothing",
        ("retrained", "aligned", "trained"),
        group="classifier",
    )
    retrained_epochs: int = option(
        30, "passes over the balanced set that retrain the classifier", minimum=1, group="classifier"
    )
    retrained_lr: ClassVar[float] = 1.0  # their learning rate, for features of length 1


@register
class DER(ExpansionMethod):
    """One frozen extractor a task, and one classifier over all of them."""

    name = "der"
    summary = (
        "a new feature extractor for every task, one classifier over all, retrained on a balanced set, with replay"
    )
    paper = "Yan et al., DER: Dynamically Expandable Representation for Class Incremental Learning, CVPR 2021"
    keeps = "a class-balanced memory, and an extractor a task"
    cost = "new and remembered images through every task's extractor; as many passes an answer"
    from_scratch = True
    splits = True
    config_class = DERConfig
    config: DERConfig

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Expand, train the new extractor and the classifier, balance the classifier, store images."""
        known, network, old = len(self.classes_), self.network, self.old_samples()
        if known:
            network.expand(self.generator("columns"))
        new = self.grow(task, samples)
        if known:
            objective = AuxiliaryLoss(network, known, self.config.auxiliary_weight, self.generator("auxiliary"))
            trainable = [*network.parameters(), *objective.head]
            self.fit(new, callback, objective, old, trainable=trainable)
            self.balance(new, old, known)
        else:
            self.fit(new, callback)
        self.remember(task, samples)

    def balance(self, new: Samples, old: Samples | None, known: int) -> None:
        """Correct the classifier's preference for the new classes."""
        network, way = self.network, self.config.classifier
        if way == "aligned":
            with torch.no_grad():
                network.head_weight.copy_(aligned(network.head_weight, known))
        elif way == "retrained" and old is not None:
            network.load_head(*self.retrained(balanced(new, old, self.generator("balanced set"))))

    def retrained(self, samples: Samples) -> Head:
        """A new classifier, trained on `samples` with all extractors frozen."""
        config, network, generator = self.config, self.network, self.generator("classifier")
        z, labels = self.features(samples.pixels), samples.labels
        length = z.norm(dim=1).mean()
        z = z / length
        head = Head.new(len(network.head_bias), network, generator, len(network.extractors))
        recipe = config.part(Recipe).replace(epochs=config.retrained_epochs, lr=config.retrained_lr, schedule="cosine")
        fit_rows(recipe, head, len(labels), lambda rows: F.cross_entropy(head(z[rows]), labels[rows]), generator)
        return Head(head.weight.detach() / length, head.bias.detach())


class AuxiliaryLoss(CrossEntropy):
    """Cross-entropy of the classifier over all extractors, and of the auxiliary one over the newest."""

    network: ExpandedNetwork

    def __init__(self, network: ExpandedNetwork, known: int, weight: float, generator: torch.Generator) -> None:
        super().__init__(network)
        self.known, self.weight = known, weight
        self.head = Head.new(len(network.head_bias) - known + 1, network, generator)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Both terms on one batch."""
        features = self.network.features(images)
        entropy = F.cross_entropy(self.network.logits(features), labels)
        newest = self.head(features[:, -self.network.dim :])
        return entropy + self.weight * F.cross_entropy(newest, auxiliary_labels(labels, self.known))


def auxiliary_labels(labels: Tensor, known: int) -> Tensor:
    """0 for every one of the `known` old classes, 1, 2, ... for the new ones; rows without a label stay so."""
    return torch.where(labels < 0, labels, (labels - known + 1).clamp_min(0))


def aligned(weight: Tensor, known: int) -> Tensor:
    """A classifier's rows, with the new ones as long on average as the `known` old ones."""
    lengths = weight.norm(dim=1)
    return torch.cat([weight[:known], weight[known:] * (lengths[:known].mean() / lengths[known:].mean())])
