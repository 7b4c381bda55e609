"""AFC: class-incremental learning by adaptive feature consolidation (Kang et al., CVPR 2022).

A new task may move features that old classes do not need, and should leave alone those they do. How much the loss L
depends on a channel c of a stage tells which these are. After a task, over its images and the remembered ones,

    I_c = mean over images of sum over positions (dL / da_c)^2,    scaled to mean 1 in every stage

and the next task is charged for what it changes there (a: squared activations, of unit length over positions):

    loss = L + 4 sqrt(classes / new classes) * mean over stages and channels of I_c ||a_c - a_c before||

L is PODNet's: a class has 10 proxies, its similarity s to a feature is the mean of their cosines weighted by their own
softmax, and the right class must win by a margin (eta is learned):

    L = [ - eta (s_y - 0.6) + log sum over j != y of exp(eta s_j) ]_+

New proxies are the centres of a k-means on the class's features; old ones stand still. Then the proxies alone are
trained a little more, on a class-balanced set.

Traps of the public code that are not here: its margin is subtracted from every class, which does nothing at all, and
the right class, meant to be left out of the sum, stays in it as exp(0). With a margin that counts, L falls as eta does
until classes are 0.6 apart, and eta would end below zero; so the margin gives eta no gradient. Adapted: stages are the
outputs of a few transformer blocks, positions are tokens, channels those of the residual stream. The first task's
proxies come from k-means too, as features are good from the start with a pretrained trunk. eta starts at `scale`, not
1: a cosine's gradient is small beside that of a linear head, and there are fewer and smaller steps here than 160 epochs
at rate 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.config import option
from tpl.engine import IGNORED, Callback, Compute, Samples
from tpl.methods.base import register
from tpl.methods.parts.balanced import balanced
from tpl.methods.parts.distill import mean_of
from tpl.methods.parts.network import CrossEntropy, Network
from tpl.methods.parts.rehearsal import RehearsalConfig, RehearsalMethod
from tpl.nets import Encoder, as_vit
from tpl.stream import Task

LLOYD_STEPS = 20
BLOCK = 64  # images whose gradients are held at a time
NEVER = -1e4  # a logit that no softmax sees


@dataclass(frozen=True)
class AFCConfig(RehearsalConfig):
    """AFC's options beyond those of training and memory."""

    memory_policy: str = option("herding", "which images of a class are kept", ("random", "first", "herding"))
    proxies: int = option(10, "proxies of a class", minimum=1)
    margin: float = option(0.6, "how much more similar the right class has to be", minimum=0)
    scale: float = option(10.0, "eta at first (published: 1)", above=0)
    consolidation: float = option(4.0, "weight of what is charged for changed features", minimum=0)
    stages: int = option(4, "blocks whose outputs are consolidated, evenly spaced, the last among them", minimum=1)
    balanced_epochs: float = option(
        0.125, "passes of the balanced training, as a share of epochs (20 of 160)", minimum=0
    )
    balanced_lr: float = option(0.5, "its learning rate, as a share of lr (0.05 of 0.1 published)", above=0)


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
        self.scale = nn.Parameter(torch.tensor(config.scale))
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
        """L of every row. The margin does not pull at eta: it would drive it below zero, and turn all answers round."""
        return margin_losses(self.logits(features), labels, self.scale.detach() * margin)

    def staged(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Features of normalised images, and the activations `[n, tokens, dim]` of every stage on the way there."""
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
        """Place proxies, train with consolidation, balance the proxies, weigh the channels, remember."""
        config, known, old = self.config, len(self.classes_), self.old_samples()
        teacher = self.network.copy() if known else None
        new = self.grow(task, samples)
        self.place_proxies(samples, known)
        self.fit(new, callback, Consolidation(self.network, config.margin, teacher, config.consolidation), old)
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
        """Put the new classes' proxies where the network sees their images now."""
        units, generator = F.normalize(self.features(samples.pixels), dim=1), self.generator("proxies")
        for c in range(len(self.network.head_bias) - known):
            self.network.head_weight[known + c] = centres(units[samples.labels == c], self.config.proxies, generator)

    @torch.no_grad()
    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """Softmax of eta times the similarities, in float64: how many images share the product makes no difference."""
        z, network = self.features(pixels), self.network
        logits = network.scale.double() * similarities(z.double(), network.head_weight.double())
        return logits.log_softmax(dim=1)


class Consolidation(CrossEntropy):
    """The margin loss, and what is charged for features that differ from a teacher's.

    With a teacher, the proxies of the classes it knows stand still.
    """

    network: ProxyNetwork

    def __init__(
        self, network: ProxyNetwork, margin: float, teacher: ProxyNetwork | None = None, weight: float = 0.0
    ) -> None:
        super().__init__(network)
        self.margin, self.teacher = margin, teacher
        classes, known = len(network.head_bias), len(teacher.head_bias) if teacher is not None else 0
        self.weight = weight * math.sqrt(classes / (classes - known))

    def losses(self, images: Tensor, labels: Tensor, progress: Tensor, draws: Tensor) -> Tensor:
        """Both on one batch."""
        counted = labels[0] != IGNORED
        features, stages = self.network.staged(images)
        loss = mean_of(self.network.margin_losses(features, labels[0], self.margin), counted)
        if self.teacher is not None:
            with torch.no_grad():
                _, before = self.teacher.staged(images)
            loss = loss + self.weight * mean_of(changes(stages, before, self.teacher.importance), counted)
        return loss.unsqueeze(0)

    @torch.no_grad()
    def after_step(self) -> None:
        """Old proxies back, whatever momentum and weight decay did to them."""
        if self.teacher is not None:
            old = self.teacher.head_weight
            self.network.head_weight[: len(old)].copy_(old)


def similarities(features: Tensor, proxies: Tensor) -> Tensor:
    """How similar features `[n, dim]` are to classes `[classes, proxies, dim]`: `[n, classes]`, in [-1, 1]."""
    unit, centres = F.normalize(features, dim=1), F.normalize(proxies, dim=2)
    cosines: Tensor = (unit @ centres.flatten(0, 1).T).unflatten(1, proxies.shape[:2])
    return (cosines.softmax(dim=2) * cosines).sum(dim=2)


def margin_losses(logits: Tensor, labels: Tensor, margin: Tensor | float) -> Tensor:
    """How far the right class of every row is from winning by the margin over the others together; 0 if it does."""
    place = labels.clamp_min(0).unsqueeze(1)
    right, others = logits.gather(1, place).squeeze(1), logits.scatter(1, place, NEVER)
    return F.relu(others.logsumexp(dim=1) - (right - margin))


def changes(stages: Sequence[Tensor], before: Sequence[Tensor], importance: Tensor) -> Tensor:
    """What each image's activations `[n, tokens, dim]` differ by, the mean over stages and channels by importance."""
    charged = []
    for now, then, weights in zip(stages, before, importance, strict=True):
        a, b = (F.normalize(part.float().square(), dim=1) for part in (now, then))
        charged.append((weights * torch.linalg.vector_norm(a - b, dim=1)).mean(dim=1))
    return torch.stack(charged).mean(dim=0)


def importances(
    network: ProxyNetwork, seen: Sequence[Samples], margin: float, normalise: Callable[[Tensor], Tensor]
) -> Tensor:
    """How much the loss depends on the channels of every stage, `[stages, dim]`, 1 on average in each."""
    total = torch.zeros_like(network.importance)
    for samples in seen:
        for pixels, labels in zip(samples.pixels.split(BLOCK), samples.labels.split(BLOCK), strict=True):
            if network.trunk[0].fused and (missing := BLOCK - len(labels)):  # it is compiled anew for every other size
                pixels = torch.cat([pixels, pixels.new_zeros(missing, *pixels.shape[1:])])
                labels = F.pad(labels, (0, missing), value=IGNORED)
            features, stages = network.staged(normalise(pixels.to(total.device)))
            lost = network.margin_losses(features, labels, margin)[labels != IGNORED]
            # A sum over images, none of which enters another's loss: every row has its own image's gradient.
            slopes = torch.autograd.grad(lost.sum(), stages)
            total += torch.stack([slope.float().square().sum(dim=(0, 1)) for slope in slopes])
    mean = total.mean(dim=1, keepdim=True)
    return torch.where(mean > 0, total / mean, 1.0)  # without any loss left, no channel is more important than another


def centres(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """The centres of a k-means, `[count, dim]`; those that no point is nearest to stay at the point they began at."""
    order = torch.randperm(len(points), generator=generator)
    found = points[order[torch.arange(count) % len(points)].to(points.device)]
    for _ in range(LLOYD_STEPS):
        member = F.one_hot(torch.cdist(points, found).argmin(dim=1), count).to(points)
        sizes = member.sum(dim=0).unsqueeze(1)
        found = torch.where(sizes > 0, (member.T @ points) / sizes.clamp_min(1), found)
    return found
