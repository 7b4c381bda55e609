"""AFC: class-incremental learning by adaptive feature consolidation (Kang et al., CVPR 2022).

A new task may change features that old classes do not need, and should keep those that they do. A channel c of a stage
is important if the loss L depends on it. After a task, over its images and the remembered ones,

    I_c = mean over images of sum over positions (dL / da_c)^2,    scaled to mean 1 in every stage

and the next task is penalised for changing it (a: squared activations, of unit length over positions):

    loss = L + 4 sqrt(classes / new classes) * mean over stages and channels of I_c ||a_c - a_c before||

L is PODNet's: a class has 10 proxies, its similarity s to a feature is the mean of their cosines weighted by their own
softmax, and the right class must win by a margin (eta is learned):

    L = [ - eta (s_y - 0.6) + log sum over j != y of exp(eta s_j) ]_+

New proxies are the centres of a k-means on the class's features; old ones are frozen. Then the proxies alone are
trained a little more, on a class-balanced set.

Bugs of the public code that are fixed here: its margin is subtracted from every class, which has no effect, and the
right class, meant to be left out of the sum, stays in it as exp(0). With an effective margin, L falls with eta until
classes are 0.6 apart, and eta would become negative; so the margin gives eta no gradient. Adapted: stages are the
outputs of a few transformer blocks, positions are tokens, channels those of the residual stream. The first task's
proxies come from k-means too, as features are good from the start with a pretrained trunk. eta starts at
`logit_scale`, not 1: a cosine's gradient is small beside that of a linear head, and there are fewer and smaller steps
here than 160 epochs at rate 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.config import option
from tpl.engine import IGNORED, Callback, Compute, Samples, masked_mean
from tpl.methods.base import register
from tpl.methods.parts.network import CrossEntropy, Network
from tpl.methods.parts.rehearsal import RehearsalConfig, RehearsalMethod, balanced
from tpl.nets import Encoder, as_vit
from tpl.stream import Task

LLOYD_STEPS = 20
BLOCK = 64  # images whose gradients are held at a time
NEVER = -1e4  # a logit whose softmax is zero


@dataclass(frozen=True)
class AFCConfig(RehearsalConfig):
    """AFC's options beyond those of training and memory."""

    memory_policy: str = option(
        "herding", "which images of a class are kept", ("random", "first", "herding"), group="memory"
    )
    proxies: int = option(10, "proxies of a class", minimum=1, group="classifier", maximum=256)
    margin: ClassVar[float] = 0.6  # how much more similar the right class has to be
    logit_scale: float = option(10.0, "eta at first (published: 1)", above=0, group="classifier")
    consolidation_weight: float = option(4.0, "weight of what is charged for changed features", minimum=0, group="loss")
    stages: ClassVar[int] = 4  # blocks whose outputs are consolidated, evenly spaced, the last among them
    balanced_epochs: float = option(
        0.125, "passes of the balanced training, as a share of epochs (20 of 160)", minimum=0, group="training"
    )
    balanced_lr: ClassVar[float] = 0.5  # its learning rate, as a share of lr (0.05 of 0.1 published)


class ProxyNetwork(Network):
    """A network whose classes are proxies `[classes, proxies, dim]`, with the importances of its stages' channels.

    There is no bias between angles: `head_bias` stays zero, and counts the classes.
    """

    importance: Tensor

    def __init__(self, encoder: Encoder, config: AFCConfig, compute: Compute, generator: torch.Generator) -> None:
        super().__init__(encoder, config, compute, generator)
        blocks = len(as_vit(encoder).vit.blocks)
        wanted = min(config.stages, blocks)
        self.stage_ends = [blocks * (i + 1) // wanted - 1 for i in range(wanted)]
        self.head_weight = nn.Parameter(torch.zeros(0, config.proxies, encoder.dim))
        self.head_bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(config.logit_scale))
        self.register_buffer("importance", torch.ones(wanted, encoder.dim))
        self.to(compute.device)

    def grow(self, outputs: int, generator: torch.Generator) -> None:
        """Add proxies for new classes, to be filled in."""
        shape = outputs, *self.head_weight.shape[1:]
        self.head_weight = nn.Parameter(torch.cat([self.head_weight.detach(), self.head_weight.new_zeros(shape)]))
        bias = torch.cat([self.head_bias, self.head_bias.new_zeros(outputs)])
        self.head_bias = nn.Parameter(bias, requires_grad=False)

    def logits(self, features: Tensor) -> Tensor:
        """eta times the similarities."""
        return self.scale * similarities(features, self.head_weight)

    def margin_losses(self, features: Tensor, labels: Tensor, margin: float) -> Tensor:
        """L of every row. The margin has no gradient to eta: it would make eta negative, and invert all predictions."""
        return margin_losses(self.logits(features), labels, self.scale.detach() * margin)

    def staged(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Features of normalised images, and the activations `[n, tokens, dim]` of every stage."""
        outputs: list[Tensor] = []
        encoder, weights = self.trunk[0], self.adapters.weights
        features: Tensor = encoder(images, self.norms, weights, dtype=self.compute.dtype, watch=outputs.append)
        return features, [outputs[i] for i in self.stage_ends]


@register
class AFC(RehearsalMethod):
    """One network whose features are consolidated by how much old classes need them."""

    name = "afc"
    summary = "features held still by their importance to old classes, proxy classifier, herded replay"
    paper = "Kang et al., Class-Incremental Learning by Knowledge Distillation with Adaptive Feature Consolidation, CVPR 2022"  # noqa: E501
    keeps = "herded images and an importance a channel"
    cost = "new and remembered images, each through the network and a frozen copy; one pass an answer"
    splits = True
    config_class = AFCConfig
    config: AFCConfig
    network: ProxyNetwork

    def new_network(self) -> ProxyNetwork:
        """A network without classes."""
        return ProxyNetwork(self.encoder, self.config, self.compute, self.generator("adapters", task=0))

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Place proxies, train with consolidation, balance the proxies, estimate importances, store images."""
        config, known, old = self.config, len(self.classes_), self.old_samples()
        teacher = self.network.copy() if known else None
        new = self.grow(task, samples)
        self.place_proxies(samples, known)
        self.fit(new, callback, Consolidation(self.network, config.margin, teacher, config.consolidation_weight), old)
        epochs = math.ceil(config.balanced_epochs * config.epochs)
        if old is not None and epochs:
            recipe = config.replace(epochs=epochs, lr=config.balanced_lr * config.lr)
            chosen, proxies = balanced(new, old, self.generator("balance")), self.network.head_weight
            objective = Consolidation(self.network, config.margin)
            self.fit(chosen, callback, objective, None, recipe, "balancing", [proxies])
        seen = [new] if old is None else [new, old]
        self.network.importance.copy_(importances(self.network, seen, config.margin, self.normalise))
        self.remember(task, samples)

    @torch.no_grad()
    def place_proxies(self, samples: Samples, known: int) -> None:
        """Set the new classes' proxies to cluster centres of their images' current features."""
        units, generator = F.normalize(self.features(samples.pixels), dim=1), self.generator("proxies")
        for c in range(len(self.network.head_bias) - known):
            self.network.head_weight[known + c] = centres(units[samples.labels == c], self.config.proxies, generator)

    @torch.no_grad()
    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """Softmax of eta times the similarities, in float64: independent of the batch."""
        z, network = self.features(pixels), self.network
        logits = network.scale.double() * similarities(z.double(), network.head_weight.double())
        return logits.log_softmax(dim=1)


class Consolidation(CrossEntropy):
    """The margin loss, and a penalty for features that differ from a teacher's.

    With a teacher, the proxies of its classes are frozen.
    """

    network: ProxyNetwork

    def __init__(
        self, network: ProxyNetwork, margin: float, teacher: ProxyNetwork | None = None, weight: float = 0.0
    ) -> None:
        super().__init__(network)
        self.margin, self.teacher = margin, teacher
        classes, known = len(network.head_bias), len(teacher.head_bias) if teacher is not None else 0
        self.weight = weight * math.sqrt(classes / (classes - known))

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """The margin loss and the consolidation term of one batch."""
        counted = labels != IGNORED
        features, stages = self.network.staged(images)
        loss = masked_mean(self.network.margin_losses(features, labels, self.margin), counted)
        if self.teacher is not None:
            with torch.no_grad():
                _, before = self.teacher.staged(images)
            loss = loss + self.weight * masked_mean(changes(stages, before, self.teacher.importance), counted)
        return loss

    @torch.no_grad()
    def after_step(self) -> None:
        """Restore the old proxies, which momentum and weight decay may have moved."""
        if self.teacher is not None:
            old = self.teacher.head_weight
            self.network.head_weight[: len(old)].copy_(old)


def similarities(features: Tensor, proxies: Tensor) -> Tensor:
    """Similarities of features `[n, dim]` to classes `[classes, proxies, dim]`: `[n, classes]`, in [-1, 1]."""
    unit, centres = F.normalize(features, dim=1), F.normalize(proxies, dim=2)
    cosines: Tensor = (unit @ centres.flatten(0, 1).T).unflatten(1, proxies.shape[:2])
    return (cosines.softmax(dim=2) * cosines).sum(dim=2)


def margin_losses(logits: Tensor, labels: Tensor, margin: Tensor | float) -> Tensor:
    """How much the right class of every row lacks to exceed the others' logsumexp by the margin; at least 0."""
    place = labels.clamp_min(0).unsqueeze(1)
    right, others = logits.gather(1, place).squeeze(1), logits.scatter(1, place, NEVER)
    return F.relu(others.logsumexp(dim=1) - (right - margin))


def changes(stages: Sequence[Tensor], before: Sequence[Tensor], importance: Tensor) -> Tensor:
    """The mean change of each image's activations `[n, tokens, dim]` over stages and channels, by importance."""
    changed = []
    for now, then, weights in zip(stages, before, importance, strict=True):
        a, b = (F.normalize(part.float().square(), dim=1) for part in (now, then))
        changed.append((weights * torch.linalg.vector_norm(a - b, dim=1)).mean(dim=1))
    return torch.stack(changed).mean(dim=0)


def importances(
    network: ProxyNetwork, seen: Sequence[Samples], margin: float, normalise: Callable[[Tensor], Tensor]
) -> Tensor:
    """How much the loss depends on the channels of every stage, `[stages, dim]`, 1 on average in each."""
    total = torch.zeros_like(network.importance)
    for samples in seen:
        for pixels, labels in zip(samples.pixels.split(BLOCK), samples.labels.split(BLOCK), strict=True):
            if network.trunk[0].fused and (missing := BLOCK - len(labels)):  # another size would be compiled again
                pixels = torch.cat([pixels, pixels.new_zeros(missing, *pixels.shape[1:])])
                labels = F.pad(labels, (0, missing), value=IGNORED)
            features, stages = network.staged(normalise(pixels.to(total.device)))
            lost = network.margin_losses(features, labels, margin)[labels != IGNORED]
            # A sum over images, none of which enters another's loss: every row has its own image's gradient.
            slopes = torch.autograd.grad(lost.sum(), stages)
            total += torch.stack([slope.float().square().sum(dim=(0, 1)) for slope in slopes])
    mean = total.mean(dim=1, keepdim=True)
    return torch.where(mean > 0, total / mean, 1.0)  # where no loss is left, all channels are equally important


def centres(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """The centres of a k-means, `[count, dim]`; an empty cluster keeps its initial point."""
    order = torch.randperm(len(points), generator=generator)
    found = points[order[torch.arange(count) % len(points)].to(points.device)]
    for _ in range(LLOYD_STEPS):
        member = F.one_hot(torch.cdist(points, found).argmin(dim=1), count).to(points)
        sizes = member.sum(dim=0).unsqueeze(1)
        found = torch.where(sizes > 0, (member.T @ points) / sizes.clamp_min(1), found)
    return found
