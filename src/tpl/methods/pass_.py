"""PASS: prototypes with noise stand in for old classes, and rotations make features that last (Zhu et al., CVPR 2021).

Each image is shown in four rotations, and class y rotated by k times 90 degrees is a class of its own, 4y + k. So the
network learns more features than the first classes need. Of each old class the mean feature mu_c is stored. With z
the features, z_old those of the network before the task, and u = logits / temperature, a step's loss is

    CE(u(z), 4y + k) + prototype_weight * CE(u(mu_c + r e), 4c) + distill_weight * ||z - z_old|| / ||z_old||

over the rotated batch, as many drawn old classes c as images, and noise e from N(0, 1). The size r of the noise is the
root mean variance of the first task's features around their class means, fixed after it. The last term has norms of
the whole batch, not a mean over images. Inference uses the unrotated classes 4c alone. No replay of images.

Adapted to adapters: they, the layer norms and the head are trained by the toolkit's SGD, where the paper has Adam at
0.001. Adam is invariant to the size of gradients, SGD is not: at the published temperature 0.1 and prototype weight 10,
steps are a hundred times too long, so both defaults are 1 (chosen on held-out digits). The distance of features is
divided by their length: its slope does not fade as the distance does, so its weight has to fit the scale of features
and the size of a batch, and a ViT's features are 40 to 60 long (measured by the distance itself, ViT-tiny's steps
overshot, and all images ended at one point). The published weight 10 then comes to what held-out digits asked for. The
old network is a copy of adapters, norms and head. Rotations work at any image size (a public code has 32 pixels built
in), and each is a pass through the encoder: four times the cost of fine-tuning. As many prototypes a step as the batch
has images is the original's rule; a public code draws none while there are fewer old classes than new ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.config import option
from tpl.engine import IGNORED, Callback, Compute, Samples
from tpl.methods.base import register
from tpl.methods.parts.network import CrossEntropy, Network, NetworkConfig, NetworkMethod
from tpl.nets import Encoder
from tpl.scores.distances import class_means
from tpl.stream import Task

ROTATIONS = 4  # by 0, 90, 180 and 270 degrees
NEAREST_0, NEAREST_1 = 2.0**-25, 1 - 2.0**-24  # a normal number is infinite at 0 and 1


@dataclass(frozen=True)
class PASSConfig(NetworkConfig):
    """PASS's options. Published, for Adam: temperature 0.1, both weights 10, the distance not divided by the length."""

    temperature: float = option(
        1.0, "what logits are divided by; 0.1 as published lets SGD diverge", above=0, group="loss"
    )
    prototype_weight: float = option(
        1.0, "weight of the loss on old classes' noisy prototypes (published: 10)", minimum=0, group="loss"
    )
    distill_weight: float = option(
        10.0, "weight of the distance to the old network's features, by their length", minimum=0, group="loss"
    )


def rotated(images: Tensor) -> Tensor:
    """All images, then all rotated by 90, 180 and 270 degrees: `[4 n, 3, size, size]`."""
    return torch.cat([torch.rot90(images, k, (2, 3)) for k in range(ROTATIONS)])


def rotated_labels(labels: Tensor) -> Tensor:
    """The labels 4y + k of `rotated` images; ignored rows stay ignored."""
    return torch.cat([torch.where(labels == IGNORED, IGNORED, ROTATIONS * labels + k) for k in range(ROTATIONS)])


def noisy(prototypes: Tensor, radius: Tensor, draws: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`count` random prototypes with noise, and their numbers, from `count * (1 + dim)` uniform draws."""
    which, uniform = draws[:count], draws[count:].view(count, -1)
    numbers = (which * len(prototypes)).long().clamp_max(len(prototypes) - 1)
    return prototypes[numbers] + radius * torch.special.ndtri(uniform.clamp(NEAREST_0, NEAREST_1)), numbers


class PassLoss(CrossEntropy):
    """Cross-entropy over rotated classes; with old classes, that over prototypes, and distillation of features."""

    def __init__(self, network: Network, teacher: Network | None, method: PASS) -> None:
        super().__init__(network)
        self.teacher, self.config = teacher, method.config
        self.prototypes, self.radius = method.prototypes.float(), method.radius.float()

    @property
    def numbers(self) -> int:
        """Random numbers a step."""
        return self.config.batch_size * (1 + self.prototypes.shape[1]) if self.teacher is not None else 0

    def shown(self, images: Tensor) -> Tensor:
        """Every image four times."""
        return rotated(images)

    def losses(self, images: Tensor, labels: Tensor, progress: Tensor, draws: Tensor) -> Tensor:
        """The loss of one batch."""
        network, config = self.network, self.config
        images, targets = rotated(images), rotated_labels(labels[0])
        z = network.features(images)
        loss = F.cross_entropy(network.logits(z) / config.temperature, targets)
        if self.teacher is not None:
            with torch.no_grad():
                before = self.teacher.features(images)
            counted = (targets != IGNORED).unsqueeze(1)
            moved = torch.linalg.vector_norm((z - before) * counted) / torch.linalg.vector_norm(before * counted)
            old, numbers = noisy(self.prototypes, self.radius, draws[0], config.batch_size)
            replayed = F.cross_entropy(network.logits(old) / config.temperature, ROTATIONS * numbers)
            loss = loss + config.prototype_weight * replayed + config.distill_weight * moved
        return loss.unsqueeze(0)


@register
class PASS(NetworkMethod):
    """One network that learns rotations too, and rehearses noisy class means."""

    name = "pass"
    summary = "rotations as classes, noisy prototypes of old classes, distilled features; no replay"
    paper = "Zhu et al., Prototype Augmentation and Self-Supervision for Incremental Learning, CVPR 2021"
    keeps = "a mean feature a class"
    cost = "four rotations, each through the network and a frozen copy; one pass an answer"
    from_scratch = True
    config_class = PASSConfig
    config: PASSConfig
    extra_state = ("prototypes", "radius")

    def __init__(self, encoder: Encoder, config: PASSConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.check_square("PASS")
        self.prototypes = torch.zeros(0, encoder.dim, dtype=torch.float64, device=compute.device)
        self.radius = torch.zeros((), dtype=torch.float64, device=compute.device)

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Train on rotations of the new classes and on noisy old prototypes; then add the new prototypes."""
        teacher = self.network.copy() if len(self.prototypes) else None
        own = self.grow(task, samples)
        objective = PassLoss(self.network, teacher, self)
        self.fit(own, callback, objective, numbers=objective.numbers)
        z = self.features(samples.pixels).double()
        counts, means = class_means(z, samples.labels, len(task.classes))
        if teacher is None:
            self.radius = spread(z - means[samples.labels], samples.labels, counts)
        self.prototypes = torch.cat([self.prototypes, means])

    def grow(self, task: Task, samples: Samples) -> Samples:
        """Add four rows a class to the head."""
        self.network.grow(ROTATIONS * len(task.classes), self.generator("head"))
        return Samples(samples.pixels, samples.labels + len(self.classes_))

    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """Softmax over the unrotated classes."""
        network = self.network
        unrotated = network.head_weight[::ROTATIONS], network.head_bias[::ROTATIONS]
        logits = self._logits(pixels, *unrotated, network.norms, *network.adapters.weights)
        return (logits.double() / self.config.temperature).log_softmax(dim=1)

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Drop the class's prototype and its rows of the head."""
        self.prototypes = self.prototypes[torch.arange(len(self.prototypes), device=self.compute.device) != number]
        for _ in range(ROTATIONS):
            self.network.drop(ROTATIONS * number)


def spread(deviations: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """The root of the variance of a feature around its class's mean, averaged over features and classes."""
    squares = counts.new_zeros(len(counts)).index_add_(0, labels, deviations.square().mean(dim=1))
    return (squares / (counts - 1).clamp_min(1)).mean().sqrt()
