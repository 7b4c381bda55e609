"""iCaRL: binary distillation for the features, the nearest mean of remembered images for the answer.

Features. Every class has a sigmoid of its own. The target of a new class's output is 1 on its own images and 0 on all
others; that of an old class's output is the old network's output, on new and remembered images alike:

    loss = mean over images of sum_c BCE(sigmoid(f_c), t_c),   t_c = sigmoid(old f_c) for old c, [y = c] for new c

Memory. Images are chosen by herding: one by one, such that the mean of the chosen stays closest to the class's mean.

Prediction. The head is not used. A class is represented by its remembered images: mu_c is the mean of their features,
each of length 1, normalised to length 1 again. The class with the nearest mu_c is predicted; the probabilities are
softmax(-|z - mu_c|^2). They rank the classes, and are flat: distances between unit vectors differ little.

Differences from public codes: some train with a softmax, which is another method, or average the loss over the classes
too, so that it shrinks as classes are added (the paper adds it up). Here means are recomputed after every task, and
herding never takes an image twice.
Adapted to adapters: rate and epochs are the benchmark's, not a ResNet's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.config import option
from tpl.engine import IGNORED, Callback, Compute, Samples, masked_mean
from tpl.errors import TplError
from tpl.memory import FEATURE_POLICIES, POLICIES
from tpl.methods.base import register
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
        group="memory",
    )


class BinaryDistillation(CrossEntropy):
    """One sigmoid a class: new classes are trained on labels, old ones on the old network's outputs."""

    def __init__(self, network: Network, teacher: Network | None) -> None:
        super().__init__(network)
        self.teacher = teacher
        self.classes = torch.arange(len(network.head_bias), device=network.head_bias.device)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Binary cross-entropies, added up over classes; the mean over the rows that count."""
        with torch.no_grad():
            before = None if self.teacher is None else self.teacher(images)
        logits = self.network(images)
        rows = F.binary_cross_entropy_with_logits(logits, self.targets(labels, before), reduction="none")
        return masked_mean(rows.sum(dim=1), labels != IGNORED)

    def targets(self, labels: Tensor, before: Tensor | None) -> Tensor:
        """The target of every output, given the old network's logits `before`, if there is one."""
        target = (labels.unsqueeze(1) == self.classes).float()
        return target if before is None else torch.cat([before.sigmoid(), target[:, before.shape[1] :]], dim=1)


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
    extra_state = ("means_",)

    def __init__(self, encoder: Encoder, config: ICaRLConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.means_ = torch.zeros(0, encoder.dim, dtype=torch.float64, device=compute.device)

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Train with the old network as teacher, choose exemplars, and compute their means."""
        classes = len(self.classes_) + len(task.classes)
        if self.memory.budget < classes:
            raise TplError(
                f"iCaRL predicts by remembered images and needs one of every class: {classes} classes do not fit into "
                f"a memory of {self.memory.budget}. Raise --memory."
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
    """The normalised mean of each class's normalised features, `[classes, dim]`, float64."""
    z = F.normalize(features.double(), dim=1)
    member = (labels.unsqueeze(1) == torch.arange(classes, device=labels.device)).double()
    return F.normalize(member.mT @ z / member.sum(dim=0).unsqueeze(1), dim=1)
