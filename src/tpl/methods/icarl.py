"""iCaRL: binary distillation for the features, the nearest mean of remembered images for the answer.

Features. Every class has a sigmoid of its own. A new class's output is asked for 1 on its own images and 0 on all
others; an old class's output is asked for what the network before this task said, on new and remembered images alike:

    loss = mean over images of sum_c BCE(sigmoid(f_c), t_c),   t_c = sigmoid(old f_c) for old c, [y = c] for new c

Memory. Images are chosen by herding: one by one, such that the mean of the chosen stays closest to the class's mean.

Answer. The head is not asked. A class is its remembered images: mu_c is the mean of their features, each of length 1,
brought to length 1 again. An image belongs to the class with the nearest mu_c; the probabilities are
softmax(-|z - mu_c|^2). They rank the classes, and are flat: distances between unit vectors differ little.

Traps avoided: some public codes train with softmax instead, which makes another method of it, or average the loss over
the classes too, so that it fades as classes come (the paper adds it up). Means follow the network and the memory after
every task; herding never takes an image twice.
Adapted to adapters: rate and epochs are the benchmark's, not a ResNet's; a step has as many remembered as new images,
where the paper shuffles both together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.config import option
from tpl.engine import Callback, Compute, Samples
from tpl.errors import TplError
from tpl.memory import FEATURE_POLICIES, POLICIES
from tpl.methods.base import register
from tpl.methods.parts.distill import mean_of, rows_that_count
from tpl.methods.parts.network import CrossEntropy, Network
from tpl.methods.parts.rehearsal import RehearsalConfig, RehearsalMethod
from tpl.nets import Encoder
from tpl.stream import Task


@dataclass(frozen=True)
class ICaRLConfig(RehearsalConfig):
    """iCaRL's options."""

    memory_policy: str = option(
        "herding",
        "which images of a class are kept; herding: those whose mean feature stays closest to the class's",
        (*POLICIES, *FEATURE_POLICIES),
    )


class BinaryDistillation(CrossEntropy):
    """One sigmoid a class: new classes learn from labels, old ones from the network as it was."""

    def __init__(self, network: Network, teacher: Network | None) -> None:
        super().__init__(network)
        self.teacher = teacher
        self.numbers = torch.arange(len(network.head_bias), device=network.head_bias.device)

    def losses(self, images: Tensor, labels: Tensor, progress: Tensor, draws: Tensor) -> Tensor:
        """Binary cross-entropies, added up over classes; the mean over the rows that count."""
        with torch.no_grad():
            before = None if self.teacher is None else self.teacher(images)
        logits = self.network(images)
        rows = F.binary_cross_entropy_with_logits(logits, self.targets(labels[0], before), reduction="none")
        return mean_of(rows.sum(dim=1), rows_that_count(labels[0])).unsqueeze(0)

    def targets(self, labels: Tensor, before: Tensor | None) -> Tensor:
        """What every output is asked for, given the old network's logits `before`, if there was one."""
        wanted = (labels.unsqueeze(1) == self.numbers).float()
        return wanted if before is None else torch.cat([before.sigmoid(), wanted[:, before.shape[1] :]], dim=1)


@register
class ICaRL(RehearsalMethod):
    """Features by rehearsal and distillation, classified by the nearest mean of exemplars."""

    name = "icarl"
    summary = "replay with distillation of every old output; answers by the nearest mean of remembered images"
    paper = "Rebuffi et al., iCaRL: Incremental Classifier and Representation Learning, CVPR 2017"
    keeps = "herded images and their mean features"
    cost = "new and remembered images, each through the network and a frozen copy; one pass an answer"
    from_scratch = True
    splits = True
    config_class = ICaRLConfig
    config: ICaRLConfig
    beside = ("means_",)

    def __init__(self, encoder: Encoder, config: ICaRLConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.means_ = torch.zeros(0, encoder.dim, dtype=torch.float64, device=compute.device)

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Train with the network as it was for a teacher, choose exemplars, and take their means."""
        classes = len(self.classes_) + len(task.classes)
        if self.memory.budget < classes:
            raise TplError(
                f"iCaRL answers by remembered images and needs one of every class: {classes} classes do not fit into a "
                f"memory of {self.memory.budget}. Raise --memory."
            )
        teacher = self.network.copy() if self.classes_ else None
        new = self.grow(task, samples)
        self.fit(new, callback, BinaryDistillation(self.network, teacher), self.old_samples())
        self.remember(task, samples)
        old = self.old_samples()
        assert old is not None
        self.means_ = class_means(self.features(old.pixels), old.labels, classes)

    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """Softmax of the negative squared distances to the classes' means."""
        z = F.normalize(self.features(pixels).double(), dim=1)
        return (2 * z @ self.means_.mT).log_softmax(dim=1)  # unit vectors: -|z - mu|^2 = 2 <z, mu> - 2

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Drop the class's output, images and mean."""
        super().remove_class(task, own, number)
        self.means_ = torch.cat([self.means_[:number], self.means_[number + 1 :]])


def class_means(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The mean of each class's features of unit length, brought to unit length, `[classes, dim]`, float64."""
    z = F.normalize(features.double(), dim=1)
    member = (labels.unsqueeze(1) == torch.arange(classes, device=labels.device)).double()
    return F.normalize(member.mT @ z / member.sum(dim=0).unsqueeze(1), dim=1)
