"""What tests of rehearsing methods share: networks that say what they are told, and methods that do not train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.engine import IGNORED, Callback, Objective, Recipe, Samples
from tpl.methods.parts.network import NetworkMethod
from tpl.stream import ArrayImages, Task

LABELS = torch.tensor([4, 0, 3, IGNORED, 2])  # five classes, and a row that only fills up


class Says(nn.Module):
    """A network whose logits are the images it is shown, times a factor and cut to its classes."""

    def __init__(self, classes: int, factor: float = 1.0) -> None:
        super().__init__()
        self.head_bias = torch.zeros(classes)
        self.factor = factor

    def forward(self, images: Tensor) -> Tensor:
        return self.factor * images[:, : len(self.head_bias)]


def loss_of(objective: Objective, logits: Tensor, labels: Tensor) -> float:
    """What an objective over networks that repeat what they see makes of these logits."""
    nothing = torch.zeros(())
    (loss,) = objective.losses(logits, labels.unsqueeze(0), nothing, nothing).tolist()
    return float(loss)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Independent of torch's."""
    e = np.exp(logits)
    return np.asarray(e / e.sum())


def kl(p: np.ndarray, q: np.ndarray) -> float:
    """KL(p || q), term by term."""
    return float(sum(a * np.log(a / b) for a, b in zip(p, q, strict=True)))


def some_logits(rows: int = 5, classes: int = 5) -> Tensor:
    return 2 * torch.randn(rows, classes, generator=torch.Generator().manual_seed(1))


class Fit(NamedTuple):
    """How a training was asked for, and the head as it found it."""

    samples: Samples
    replay: Samples | None
    objective: Any
    recipe: Recipe
    name: str
    trainable: list[Tensor] | None
    head: Tensor


def spy(method: NetworkMethod, monkeypatch: Any, change: Callable[[NetworkMethod], None]) -> list[Fit]:
    """Note every training instead of doing it; `change` stands for what it would have done."""
    seen: list[Fit] = []

    def fit(
        samples: Samples,
        callback: Callback,
        objective: Any = None,
        replay: Samples | None = None,
        recipe: Recipe | None = None,
        name: str = "training",
        trainable: list[Tensor] | None = None,
    ) -> None:
        head = method.network.head_weight.detach().clone()
        seen.append(Fit(samples, replay, objective, recipe or method.config, name, trainable, head))
        change(method)

    monkeypatch.setattr(method, "fit", fit)
    return seen


@torch.no_grad()
def move_head(method: NetworkMethod) -> None:
    """A training that leaves its mark."""
    method.network.head_weight += 1


def tiny_task(number: int, classes: int = 2, per_class: int = 6) -> Task:
    """A few noisy pictures of classes that nobody has seen."""
    pixels = np.random.default_rng(number).integers(0, 256, (classes * per_class, 32, 32, 3), dtype=np.uint8)
    names = tuple(f"{number}-{c}" for c in range(classes))
    return Task(f"task {number}", names, ArrayImages(pixels, np.arange(len(pixels)) % classes))


def tiny_learner(method: str, **options: Any) -> Learner:
    return Learner(
        method, SMALL_VIT, device="cpu", **({"latent": 2, "epochs": 1, "batch_size": 8, "memory": 8} | options)
    )
