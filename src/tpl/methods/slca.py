"""SLCA: a slow learner with classifier alignment (Zhang et al., ICCV 2023).

The whole pre-trained trunk is trained with every task, but slowly: its learning rate is a hundredth of the head's. So
features hardly drift. The loss is cross-entropy over the new classes alone; rows of old classes rest. After training,
a class is kept as a Gaussian N(mu_c, Sigma_c) of its features. From the second task on, the head is then aligned: a
copy of it is trained on draws from the Gaussians of all classes, equally many of each, by

    cross-entropy of l / (tau m),    m = mean over tasks t of |l_t|

with l_t the logits of task t's classes and tau = `logit_norm` (0: plain cross-entropy). Predictions come from the
aligned copy; the next task goes on with the head as it was trained. No replay of images.

As in the public code, which the published numbers come from: five epochs of 256 draws a class at the head's rate with a
cosine schedule, weight decay, 1e-4 added to every variance, and means of older tasks' classes drawn a little towards
zero (`oldest_mean` 0.9; the paper's text does not have it, which is 1). The published rate falls to a tenth for the
last tenth of the epochs; here it stays, or falls by `schedule=cosine`. `train=adapters` is not as published: adapters
instead of the trunk learn slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.config import option
from tpl.engine import Callback, Compute, GatedSGD, Recipe, Samples
from tpl.methods.base import register
from tpl.methods.parts.network import NetworkConfig, NetworkMethod
from tpl.nets import Encoder, WholeViT, as_vit
from tpl.scores.distances import without_row
from tpl.stream import Task

FLOOR = 1e-4  # added to the variance of every direction
TINY = 1e-7  # added to the length of logits


@dataclass(frozen=True)
class SLCAConfig(NetworkConfig):
    """SLCA's options, beside those of training; the learning rate is the head's."""

    weight_decay: float = option(5e-4, "weight decay of SGD", minimum=0, group="training")
    train: str = option(
        "trunk", "trunk: all of the encoder's weights; adapters: adapters in it", ("trunk", "adapters"), group="encoder"
    )
    trunk_rate: float = option(
        0.01, "learning rate of all but the head, as a share of the head's", above=0, group="training"
    )
    align_epochs: int = option(5, "epochs of draws that the head is aligned on", minimum=1, group="alignment")
    align_draws: int = option(256, "draws of every class in such an epoch", minimum=1, group="alignment")
    logit_norm: float = option(0.1, "temperature of normalised logits; 0: plain logits", minimum=0, group="alignment")
    oldest_mean: float = option(
        0.9, "factor of the oldest tasks' means, rising to 1 for the newest task's", above=0, group="alignment"
    )


class Head(NamedTuple):
    """A linear classifier."""

    weight: Tensor
    bias: Tensor


class Gaussians(NamedTuple):
    """One Gaussian a class: N(mu, L L^T)."""

    means: Tensor  # [classes, dim], float64
    roots: Tensor  # the lower triangles L, row by row, [classes, dim (dim + 1) / 2], float64

    @classmethod
    def of(cls, z: Tensor, y: Tensor, classes: int) -> Gaussians:
        """The Gaussians of features `[n, dim]`, each with at least one sample."""
        groups = [z[y == c].double() for c in range(classes)]
        means = torch.stack([group.mean(dim=0) for group in groups])
        floor = FLOOR * torch.eye(z.shape[1]).to(means)
        deviations = [group - mean for group, mean in zip(groups, means, strict=True)]
        covariances = torch.stack([d.T @ d / max(len(d) - 1, 1) + floor for d in deviations])
        rows, columns = torch.tril_indices(*floor.shape, device=z.device)
        return cls(means, torch.linalg.cholesky(covariances)[:, rows, columns])

    def joined(self, other: Gaussians) -> Gaussians:
        """These classes, then others."""
        return Gaussians(torch.cat([self.means, other.means]), torch.cat([self.roots, other.roots]))

    def draw(self, count: int, shrink: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """`count` float32 draws of every class in random order, with their class; means are multiplied by `shrink`."""
        classes, dim = self.means.shape
        rows, columns = torch.tril_indices(dim, dim, device=self.means.device)
        roots = self.means.new_zeros(classes, dim, dim, dtype=torch.float32)
        roots[:, rows, columns] = self.roots.float()
        noise = torch.randn(classes, count, dim, generator=generator).to(roots.device)
        drawn = noise @ roots.mT + (self.means * shrink.unsqueeze(1)).float().unsqueeze(1)
        order = torch.randperm(classes * count, generator=generator).to(roots.device)
        labels = torch.arange(classes, device=roots.device).repeat_interleave(count)
        return drawn.flatten(0, 1)[order], labels[order]


def aligned(
    head: Head, gaussians: Gaussians, sizes: Sequence[int], config: SLCAConfig, generator: torch.Generator
) -> Head:
    """A copy of a head, trained on draws from the classes' Gaussians; `sizes` are the tasks' numbers of classes."""
    copy = Head(*(nn.Parameter(part.detach().clone()) for part in head))
    optimiser = GatedSGD(copy, config.lr, config.momentum, config.weight_decay, config.nesterov)
    fall = config.replace(schedule="cosine")
    ages = torch.tensor([(t + 1) / len(sizes) for t, size in enumerate(sizes) for _ in range(size)])
    shrink = (config.oldest_mean + (1 - config.oldest_mean) * ages.double()).to(gaussians.means.device)
    for epoch in range(config.align_epochs):
        optimiser.scale_rate(fall.rate_at(epoch / config.align_epochs))
        inputs, labels = gaussians.draw(config.align_draws, shrink, generator)
        for z, y in zip(inputs.split(config.align_draws), labels.split(config.align_draws), strict=True):
            logits = normalised(F.linear(z, *copy), sizes, config.logit_norm)
            optimiser.zero_grad(set_to_none=True)
            F.cross_entropy(logits, y).backward()
            optimiser.step()
    return Head(copy.weight.detach(), copy.bias.detach())


def normalised(logits: Tensor, sizes: Sequence[int], temperature: float) -> Tensor:
    """Logits divided by the temperature and by the mean length of the tasks' own logits; temperature 0: as they are."""
    if not temperature:
        return logits
    lengths = [torch.linalg.vector_norm(part, dim=1) + TINY for part in logits.split(list(sizes), dim=1)]
    return logits / (temperature * torch.stack(lengths).mean(dim=0).unsqueeze(1))


@register
class SLCA(NetworkMethod):
    """One network that learns slowly, and a head aligned on class Gaussians."""

    name = "slca"
    summary = "the whole trunk trained at a hundredth of the head's rate, head re-aligned on class Gaussians; no replay"
    paper = (
        "Zhang et al., SLCA: Slow Learner with Classifier Alignment for Continual Learning on a Pre-trained Model, "
        "ICCV 2023"
    )
    keeps = "a mean and a covariance a class"
    cost = "one pass an image and epoch through a trunk whose weights have gradients; one an answer"
    splits = True
    config_class = SLCAConfig
    config: SLCAConfig
    extra_state = ("aligned_weight", "aligned_bias", "means", "roots")

    def __init__(self, encoder: Encoder, config: SLCAConfig, compute: Compute, seed: int = 0) -> None:
        if config.train == "trunk":
            encoder = WholeViT(as_vit(encoder).to(compute.device))
        super().__init__(encoder, config, compute, seed)
        self.aligned_weight, self.aligned_bias = self.trained_head
        empty = torch.zeros(0, encoder.dim * (encoder.dim + 1) // 2, dtype=torch.float64, device=compute.device)
        self.means, self.roots = empty[:, : encoder.dim].contiguous(), empty

    @property
    def trained_head(self) -> Head:
        """The head as training left it."""
        return Head(self.network.head_weight.detach(), self.network.head_bias.detach())

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Train on the new classes alone, keep their Gaussians, and align the head."""
        network, old = self.network, self.trained_head
        network.load_head(old.weight[:0], old.bias[:0])
        network.grow(len(task.classes), self.generator("head"))
        self.fit(samples, callback)
        network.load_head(*(torch.cat(parts) for parts in zip(old, self.trained_head, strict=True)))
        new = Gaussians.of(self.features(samples.pixels), samples.labels, len(task.classes))
        self.means, self.roots = gaussians = Gaussians(self.means, self.roots).joined(new)
        head, sizes = self.trained_head, [len(classes) for classes in (*self.task_classes_, task.classes)]
        if len(sizes) > 1:
            head = aligned(head, gaussians, sizes, self.config, self.generator("alignment"))
        self.aligned_weight, self.aligned_bias = head.weight.clone(), head.bias.clone()

    def optimiser(self, recipe: Recipe, parameters: Sequence[Tensor]) -> GatedSGD:
        """The recipe's optimiser, with a slower rate for all but the head."""
        found = recipe.optimiser(parameters)
        head = {id(self.network.head_weight), id(self.network.head_bias)}
        (group,) = found.param_groups
        slow = [p for p in parameters if id(p) not in head]
        group["params"] = [p for p in parameters if id(p) in head]
        found.add_param_group({"params": slow, "lr": self.config.trunk_rate * recipe.lr})
        return found

    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """Softmax of the aligned head over all classes so far."""
        network = self.network
        head = self.aligned_weight, self.aligned_bias
        logits = self._logits(pixels, *head, network.norms, *network.adapters.weights)
        return logits.double().log_softmax(dim=1)

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Drop the class's Gaussian and its rows of both heads."""
        super().remove_class(task, own, number)
        for name in self.extra_state:
            setattr(self, name, without_row(getattr(self, name), number))
