"""Small tasks for techniques: noisy pictures of a few patterns, a linear network, a head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.engine import IGNORED
from tpl.methods.bank.bank import Technique
from tpl.methods.bank.techniques import TECHNIQUES, VOS

CPU = torch.device("cpu")
SIDE = 6
PIXELS = 3 * SIDE * SIDE


class SmallVOS(VOS):
    """VOS with queues that fill within a few steps."""

    queue_size = 20


EVERY = list(TECHNIQUES)


def make(name: str, own: int, dim: int, batch: int) -> Technique:
    kind = SmallVOS if name == "vos" else TECHNIQUES[name]
    return kind(own, dim, batch, CPU)


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_batch(technique: Technique, seed: int = 0, ignored: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Images, labels and draws of one step; the last rows of either half may be ignored."""
    g, batch = random(seed), technique.batch
    labels = torch.arange(batch) % technique.own
    labels[batch - ignored :] = IGNORED
    if technique.outliers:
        labels = torch.cat([labels, torch.where(labels == IGNORED, IGNORED, technique.own)])
    images = torch.randn(len(labels), 3, SIDE, SIDE, generator=g)
    return images, labels, torch.rand(technique.numbers, generator=g)


def some_network(technique: Technique, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A linear network `[dim, pixels]`, a head and its bias, all to be trained."""
    g = random(seed)
    shapes = (technique.dim, PIXELS), (technique.own, technique.dim), (technique.own,)
    scales = PIXELS**-0.5, technique.dim**-0.5, 0.1
    network, weight, bias = (
        (scale * torch.randn(shape, generator=g)).requires_grad_() for shape, scale in zip(shapes, scales, strict=True)
    )
    return network, weight, bias


def step_loss(
    technique: Technique, images: Tensor, labels: Tensor, draws: Tensor, network: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """What a training step does: mixed images, features, loss."""
    z = F.linear(technique.mixed(images, labels, draws).flatten(1), network)
    return technique.loss(z, weight, bias, labels, draws)
