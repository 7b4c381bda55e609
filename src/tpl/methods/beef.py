"""BEEF: bi-compatible class-incremental learning by energy-based expansion and fusion (Wang et al., ICLR 2023).

Every task gets a feature extractor phi_t of its own, which starts from the first task's. It is trained alone, without
the old ones, by a classifier that has one output for each new class and one for each OLD TASK (a backward prototype,
trained on remembered images), so that it is compatible with earlier tasks:

    CE([b_1 / 1.7, .., b_{t-1} / 1.7, f_1, f_2, ..], y'),   y' = the task of an old image, the class of a new one

To be compatible with later tasks, it also has an energy output for each class (forward prototypes), for images that
look like class y but are none of it. Their negatives x are the images rotated by 180 degrees and moved a few gradient
steps to where the energy outputs are less probable:

    x <- x - 0.01 grad_x log P(x is none of the classes),   P = sum of softmax([logits | energies]) over the energies

The logit of their own class (or task) is set to 0, and the energy output of their class is the target:

    + 0.01 CE([logits without y' | energies], energy of y)

Fusion: with all extractors frozen, one scale and one shift for every old task i are fitted on a class-balanced set, and
the new extractor contributes to the old classes' logits, equally to all classes of a task:

    old class c of task i:  old logit + (a_i b_i + s_i),     new class:  f_c

A sum of linear functions is linear: the result is one classifier over all features, which contains the old one.

Bugs of the public code that are fixed here: it zeroes a class's logit for the whole batch, in the columns of all labels
in it; and fusion replaces the old biases by the new ones instead of adding them. Adapted: an extractor is adapters and
layer norms over one frozen trunk. Every negative lowers its own log P; the public code takes the logarithm of P added
up over the whole batch, so that its steps shrink as batches grow. The negatives' random noise (1e-3, below the
resolution of bf16 for a pixel) is left out, so they are the same in every run. They cost `negative_steps` + 1 further
passes a step; with `energy_weight=0` there are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.config import option
from tpl.engine import IGNORED, Callback, Recipe, Samples
from tpl.methods.base import register, task_of_class
from tpl.methods.parts.expansion import ExpandedNetwork, ExpansionMethod, Head
from tpl.methods.parts.network import CrossEntropy
from tpl.methods.parts.rehearsal import RehearsalConfig, balanced, fit_rows
from tpl.stream import Task


@dataclass(frozen=True)
class BEEFConfig(RehearsalConfig):
    """BEEF's options beyond those of training and memory."""

    energy_weight: float = option(
        0.01, "weight of the energy loss; 0 leaves it out, and its passes", minimum=0, group="loss"
    )
    negative_steps: int = option(
        3, "steps in which negatives are moved to where energy outputs are less probable", minimum=0, group="loss"
    )
    negative_lr: ClassVar[float] = 0.01  # how far each of them goes, in normalised pixels
    alignment: ClassVar[float] = 1.7  # old tasks' logits are divided by this in training
    fusion_epochs: int = option(
        60, "passes over the balanced set that fuse old and new answers", minimum=0, group="classifier"
    )
    fusion_lr: ClassVar[float] = 0.05  # learning rate of that at first; it falls to zero


@register
class BEEF(ExpansionMethod):
    """Extractors trained one by one, each with outputs for older tasks, fused by a scale and a shift a task."""

    name = "beef"
    summary = "a new extractor for every task, trained alone with an energy term, then fused with the old, with replay"
    paper = (
        "Wang et al., BEEF: Bi-Compatible Class-Incremental Learning via Energy-Based Expansion and Fusion, ICLR 2023"
    )
    keeps = "a class-balanced memory, and an extractor a task"
    cost = "new and remembered images, and four more passes for negatives; a pass an extractor and answer"
    from_scratch = True
    splits = True
    config_class = BEEFConfig
    config: BEEFConfig

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Expand, train the new extractor alone, fuse, store images."""
        network, known, old = self.network, len(self.classes_), self.old_samples()
        if known:
            network.expand(self.generator("columns"))
            network.restart(network.frozen[0])
        new = Samples(samples.pixels, samples.labels + known)
        owner = task_of_class(self.task_classes_).to(self.compute.device)
        objective = BiCompatible(network, owner, len(task.classes), self.config, self.generator("heads"))
        body = [p for n, p in network.named_parameters() if not n.startswith("head")]
        self.fit(new, callback, objective, old, trainable=[*body, *objective.parameters()])
        backward, forward = objective.backward.detached(), objective.new.detached()
        scale, shift = self.fused(backward, forward, owner, new, old)
        network.load_head(*merged(network, backward, forward, owner, scale, shift))
        self.remember(task, samples)

    def fused(
        self, backward: Head, forward: Head, owner: Tensor, new: Samples, old: Samples | None
    ) -> tuple[Tensor, Tensor]:
        """Scale and shift of every old task's backward prototype; 1 and 0 without stored images."""
        config, network = self.config, self.network
        scale = torch.zeros_like(backward.bias, requires_grad=True)  # minus 1: weight decay, if any, leads back to 1
        shift = torch.zeros_like(backward.bias, requires_grad=True)
        if old is not None and config.fusion_epochs:
            generator = self.generator("fusion")
            chosen = balanced(new, old, generator)
            with torch.no_grad():
                z = self.features(chosen.pixels)
                past, newest = z[:, : -network.dim], z[:, -network.dim :]
                before = F.linear(past, network.head_weight[:, : -network.dim], network.head_bias)
                prior, own = backward(newest), forward(newest)

            def loss(rows: Tensor) -> Tensor:
                added = ((1 + scale) * prior[rows] + shift)[:, owner]
                logits = torch.cat([before[rows] + added, own[rows]], dim=1)
                return F.cross_entropy(logits, chosen.labels[rows])

            recipe = config.part(Recipe).replace(lr=config.fusion_lr, schedule="cosine", epochs=config.fusion_epochs)
            fit_rows(recipe, [scale, shift], len(chosen), loss, generator)
        return 1 + scale.detach(), shift.detach()


def merged(
    network: ExpandedNetwork, backward: Head, forward: Head, owner: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """One classifier over all extractors, equal to the sum of the old one, the prototypes and the new one.

    Old classes keep their columns, and take the newest extractor's features by their task's scaled prototype; new
    classes take the newest extractor's alone.
    """
    before = network.dim * len(network.frozen)
    kept = network.head_weight.detach()[:, :before]
    added = scale.unsqueeze(1) * backward.weight
    top = torch.cat([kept, added[owner]], dim=1)
    bottom = torch.cat([forward.weight.new_zeros(len(forward.weight), before), forward.weight], dim=1)
    bias = network.head_bias.detach() + (scale * backward.bias + shift)[owner]
    return torch.cat([top, bottom]), torch.cat([bias, forward.bias])


class BiCompatible(CrossEntropy):
    """The loss of the newest extractor; `owner` is the task of every old class."""

    network: ExpandedNetwork

    def __init__(
        self, network: ExpandedNetwork, owner: Tensor, classes: int, config: BEEFConfig, generator: torch.Generator
    ) -> None:
        super().__init__(network)
        self.config = config
        tasks = int(owner.max()) + 1 if len(owner) else 0
        self.backward = Head.new(tasks, network, generator)
        self.new = Head.new(classes, network, generator)
        self.forward = Head.new(len(owner) + classes, network, generator)
        self.column = torch.cat([owner, tasks + torch.arange(classes, device=owner.device)])  # of every class

    def parameters(self) -> list[Tensor]:
        """The parameters of all heads; without an energy loss the forward prototypes are not used."""
        return [*self.backward, *self.new, *(self.forward if self.config.energy_weight else ())]

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy over old tasks and new classes, and the energy loss on negatives."""
        z = self.network.newest_features(images)
        logits = torch.cat([self.backward(z) / self.config.alignment, self.new(z)], dim=1)
        loss = F.cross_entropy(logits, self.columns_of(labels))
        if self.config.energy_weight:
            loss = loss + self.config.energy_weight * self.energy_loss(self.negatives(images), labels)
        return loss

    def columns_of(self, labels: Tensor) -> Tensor:
        """The target output of each label: an old class's task, or the new class."""
        return torch.where(labels < 0, labels, self.column[labels.clamp_min(0)])

    def outputs(self, features: Tensor) -> Tensor:
        """Logits of old tasks and new classes."""
        return torch.cat([self.backward(features), self.new(features)], dim=1)

    def negatives(self, images: Tensor) -> Tensor:
        """The images rotated by 180 degrees and moved to where the energy outputs are less probable."""
        x = images.flip(-1, -2)
        for _ in range(self.config.negative_steps):
            x = x.detach().requires_grad_()
            z = self.network.newest_features(x)
            energies = self.forward(z)
            everything = torch.cat([self.outputs(z), energies], dim=1)
            log_p = energies.logsumexp(dim=1) - everything.logsumexp(dim=1)
            (gradient,) = torch.autograd.grad(log_p.sum(), x)
            x = x - self.config.negative_lr * gradient
        return x.detach()

    def energy_loss(self, negatives: Tensor, labels: Tensor) -> Tensor:
        """The target of a negative is the energy output of its class; the logit of the class itself is set to 0."""
        z = self.network.newest_features(negatives)
        logits, place = self.outputs(z), self.column[labels.clamp_min(0)].unsqueeze(1)
        zeroed = logits.scatter(1, place, 0.0)
        target = torch.where(labels == IGNORED, labels, labels + logits.shape[1])
        return F.cross_entropy(torch.cat([zeroed, self.forward(z)], dim=1), target)
