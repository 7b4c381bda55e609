"""FOSTER: feature boosting and compression (Wang et al., ECCV 2022).

Boosting: as in gradient boosting, a new extractor phi learns the residual of the old, frozen network. One classifier H
takes old and new features, a second one A the new features alone, and H is distilled from the old network's classifier
on the old classes:

    loss = CE(H([old | phi]) / w, y) + CE(A(phi), y) + KD(H's old classes, old network's answers; T = 2)

A class with n images in an epoch counts by its effective number of images. Dividing the logits by

    w_c = (1 - b) / (1 - b^n_c),  scaled to mean 1,   b = 0.96

makes the many images of new classes weigh less against the few remembered ones. Compression: a single network that
starts from the old one is then distilled from both together, on the same images, with targets that favour old classes:

    p_c ~ softmax(teacher / T)_c * w_c (b = 0.97),     loss = - T^2 sum_c p_c log softmax(student / T)_c

It replaces the old network, so that the model never grows by more than head rows.

With 20 stored images of an old class and 500 of a new one, w is 1.79 times as large for the old class. (With
`replay_batches=balanced`, n is how often an epoch shows the class: that is the imbalance which w is to correct.)

What differs from public codes: one has the number of images a class written into it for one data set; here they are
counted. The compression has the factor T^2, which keeps its gradients as large as those of cross-entropy: public code
does without, in 130 epochs at a rate of 0.1, but in a few epochs at a small rate the student then falls short of its
teacher on the new classes. "Extractors" are adapters and layer norms over one frozen trunk, and both phases take the
method's learning rate and schedule. The TPL paper's size of FOSTER suggests that its authors kept the expanded network;
here it is compressed, as published.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.config import option
from tpl.engine import IGNORED, Callback, Samples, masked_mean
from tpl.methods.base import register
from tpl.methods.parts.distill import soft_cross_entropy
from tpl.methods.parts.expansion import ExpandedNetwork, Extractor, Head
from tpl.methods.parts.network import CrossEntropy, Network
from tpl.methods.parts.rehearsal import RehearsalConfig, RehearsalMethod
from tpl.stream import Task


@dataclass(frozen=True)
class FOSTERConfig(RehearsalConfig):
    """FOSTER's options beyond those of training and memory."""

    boosting_beta: ClassVar[float] = 0.96  # b while boosting, below 1; 0: all classes count the same
    compression_beta: ClassVar[float] = 0.97  # b while compressing, below 1
    temperature: float = option(2.0, "temperature of both distillations", above=0, group="loss")
    distill_weight: float = option(
        1.0, "weight of keeping what the old network says of old classes", minimum=0, group="loss"
    )
    compression: float = option(
        0.75, "passes of the compression, as a share of epochs (130 of 170 published)", above=0, group="training"
    )


@register
class FOSTER(RehearsalMethod):
    """Boost the old network with a new extractor, then compress both into one."""

    name = "foster"
    summary = "a new extractor learns what the old network leaves over; both are then distilled into one, with replay"
    paper = "Wang et al., FOSTER: Feature Boosting and Compression for Class-Incremental Learning, ECCV 2022"
    keeps = "a class-balanced memory of images"
    cost = "boosting with two extractors, then a compression with three; one pass an answer"
    from_scratch = True
    splits = True
    config_class = FOSTERConfig
    config: FOSTERConfig

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Boost, compress, store images; the first task is plain training."""
        old = self.old_samples()
        if not self.classes_:
            self.fit(self.grow(task, samples), callback)
        else:
            teacher = self.boosted(task, samples, old, callback)
            self.compress(teacher, self.grow(task, samples), old, callback)
        self.remember(task, samples)

    def boosted(self, task: Task, samples: Samples, old: Samples | None, callback: Callback) -> ExpandedNetwork:
        """The network with a second extractor, trained for old and new classes."""
        config, known = self.config, len(self.classes_)
        network = expanded(self.network, self.config, self.generator("columns"))
        network.grow(len(task.classes), self.generator("boosted head"))
        new = Samples(samples.pixels, samples.labels + known)
        weights = effective_weights(config.times_shown(new, old, len(network.head_bias)), config.boosting_beta)
        objective = Boosting(network, self.network.copy(), weights, config, self.generator("auxiliary"))
        trainable = [*network.parameters(), *objective.head]
        self.fit(new, callback, objective, old, name="boosting", trainable=trainable)
        return network.requires_grad_(False).eval()

    def compress(self, teacher: ExpandedNetwork, new: Samples, old: Samples | None, callback: Callback) -> None:
        """Distil both extractors into the single network, whose head has grown."""
        config = self.config
        weights = effective_weights(config.times_shown(new, old, len(teacher.head_bias)), config.compression_beta)
        recipe = config.replace(epochs=max(1, round(config.compression * config.epochs)))
        objective = Compression(self.network, teacher, weights, config.temperature)
        self.fit(new, callback, objective, old, recipe, "compression")


def expanded(network: Network, config: FOSTERConfig, generator: torch.Generator) -> ExpandedNetwork:
    """A copy of the network with a second extractor that starts from the first one."""
    twin = ExpandedNetwork(network.trunk[0], config, network.compute, generator)
    twin.restart(Extractor.of(network))
    twin.load_head(network.head_weight, network.head_bias)
    twin.expand(generator)
    return twin


def effective_weights(counts: Tensor, beta: float) -> Tensor:
    """(1 - b) / (1 - b^n) of every class, scaled to mean 1; a class without images counts as if it had one."""
    weights = (1 - beta) / (1 - beta ** counts.double().clamp_min(1))
    return (weights / weights.mean()).float()


class Boosting(CrossEntropy):
    """The loss of the expanded network."""

    network: ExpandedNetwork

    def __init__(
        self,
        network: ExpandedNetwork,
        old: Network,
        weights: Tensor,
        config: FOSTERConfig,
        generator: torch.Generator,
    ) -> None:
        super().__init__(network)
        self.old, self.weights, self.config = old, weights, config
        self.head = Head.new(len(network.head_bias), network, generator)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Balanced cross-entropy, that of the new extractor alone, and distillation on the old classes."""
        z, dim, known = self.network.features(images), self.network.dim, len(self.old.head_bias)
        logits = self.network.logits(z)
        taught = self.old.logits(z[:, :dim])  # the old network is the first extractor with its own head
        kept = soft_cross_entropy(logits[:, :known], taught, self.config.temperature)
        loss = F.cross_entropy(logits / self.weights, labels) + F.cross_entropy(self.head(z[:, dim:]), labels)
        return loss + self.config.distill_weight * masked_mean(kept, labels != IGNORED)


class Compression(CrossEntropy):
    """Balanced distillation of the expanded network into a single one."""

    def __init__(self, student: Network, teacher: ExpandedNetwork, weights: Tensor, temperature: float) -> None:
        super().__init__(student)
        self.teacher, self.weights, self.temperature = teacher, weights, temperature

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Balanced distillation on one batch."""
        with torch.no_grad():
            taught = self.teacher(images)
        rows = balanced_distillation(self.network(images), taught, self.weights, self.temperature)
        return masked_mean(rows, labels != IGNORED)


def balanced_distillation(student: Tensor, teacher: Tensor, weights: Tensor, temperature: float) -> Tensor:
    """- T^2 sum_c p_c log softmax(student / T)_c of every row; p is the teacher's softmax times the weights, scaled."""
    # Weights inside a softmax are shifts of its logits: softmax(t / T) w / sum = softmax(t / T + log w).
    return temperature**2 * soft_cross_entropy(student, teacher + temperature * weights.log(), temperature)
