"""GD: global distillation from the old network and from a specialist of the new task, without unlabelled images.

With `prev`, `new` and `seen` for the old, the new and all classes, T = 2:

1. A specialist C: a copy of the network, trained on the new task's classes alone. On new images cross-entropy over
`new`; on remembered ones KL(uniform || softmax_new(C)), so that it is not confident about other classes.
2. The network: cross-entropy over `seen`, on new and remembered images, and on all of them

    + |prev| / |seen| T^2 KL(softmax_prev(P / T) || softmax_prev(f / T))  (P: as it was before)
    + |new|  / |seen| T^2 KL(softmax_new(C / T)  || softmax_new(f / T))

Global means: one softmax over all old classes, where EEIL has one for each task.
3. The same loss for the head alone, at a tenth of the rate. In the cross-entropy an image now weighs
1 / (|seen| * its class's share of the images), so that all classes weigh the same.

The paper's third teacher, an ensemble of P and C, is for external unlabelled images, which no method here uses. Adapted
to adapters: the benchmark's rate and epochs, for the specialist too. The rate of (3) falls along a cosine, not in two
steps. With `replay_batches=balanced`, the shares behind the weights of (3) are those of the images in the steps, which
show old classes more often than their stored images are many. The first task is plain training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from tpl.config import option
from tpl.engine import IGNORED, Callback, Samples, masked_mean, no_callback
from tpl.errors import TplError
from tpl.methods.base import register
from tpl.methods.parts.distill import Distillation, class_slices
from tpl.methods.parts.network import CrossEntropy, Network
from tpl.methods.parts.rehearsal import UNION, BalancingConfig, RehearsalMethod
from tpl.stream import Task


@dataclass(frozen=True)
class GDConfig(BalancingConfig):
    """GD's options."""

    temperature: float = option(2.0, "temperature of distillation", above=0, group="loss")
    confidence_weight: float = option(
        1.0, "weight of the specialist's loss on remembered images", minimum=0, group="loss"
    )


class Specialist(CrossEntropy):
    """Cross-entropy over the classes from `first` on, and a uniform prediction for images of other classes."""

    def __init__(self, network: Network, first: int, confidence: float) -> None:
        super().__init__(network)
        self.first, self.confidence = first, confidence

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy over the new classes on their images; KL(uniform || softmax) over them on the others."""
        log_p, mine = self.network(images)[:, self.first :].log_softmax(dim=1), labels >= self.first
        right = F.nll_loss(log_p, (labels - self.first).masked_fill(~mine, IGNORED), reduction="none")
        confident = -log_p.mean(dim=1) - math.log(log_p.shape[1])
        return masked_mean(right, mine) + self.confidence * masked_mean(confident, ~mine & (labels != IGNORED))


@register
class GD(RehearsalMethod):
    """Replay with distillation from the old network and from a specialist of the new task."""

    name = "gd"
    summary = "replay with distillation from the old network and from a specialist of the new task"
    paper = "Lee et al., Overcoming Catastrophic Forgetting with Unlabeled Data in the Wild, ICCV 2019"
    keeps = "a class-balanced memory of images"
    cost = "a specialist first, then the network with two teachers, then its head; one pass an answer"
    from_scratch = True
    splits = True
    config_class = GDConfig
    config: GDConfig

    def check_splits(self) -> None:
        """Refuse shuffled unions: processes then have unequal shares of the remembered rows."""
        super().check_splits()
        if self.config.replay_batches == UNION:
            raise TplError(
                "The specialist of 'gd' has one loss for new images and one for remembered ones, and several processes "
                "cannot share a shuffled union of both. Add --set replay_batches=balanced, or start one process."
            )

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Train a specialist, then the network with two teachers, then balance the head."""
        old = self.old_samples()
        new = self.grow(task, samples)
        if self.classes_:
            self._learn_with_teachers(new, old, len(task.classes), callback)
        else:
            self.fit(new, callback)
        self.remember(task, samples)

    def _learn_with_teachers(self, new: Samples, old: Samples | None, count: int, callback: Callback) -> None:
        """The three trainings of a task that brings `count` classes to old ones."""
        config, first = self.config, len(self.classes_)
        before = self.network.copy()
        self.fit(new, no_callback, Specialist(self.network, first, config.confidence_weight), old, name="specialist")
        specialist = self.network.copy()
        self.network.load_state_dict(before.state_dict())
        prev, own = class_slices([first, count])
        teachers = [(before, [prev]), (specialist, [own])]
        self.fit(new, callback, Distillation(self.network, teachers, config.temperature), old)
        balancing = config.balancing()
        if balancing is not None:
            weights = balancing_weights(config.times_shown(new, old, first + count))
            head = [self.network.head_weight, self.network.head_bias]
            objective = Distillation(self.network, teachers, config.temperature, weights)
            self.fit(new, no_callback, objective, old, balancing, "balancing", head)


def balancing_weights(shown: Tensor) -> Tensor:
    """1 / (classes * share) of every class, by its share of the images that an epoch shows."""
    share = shown / shown.sum()
    weights = (1 / (len(shown) * share)).masked_fill(share == 0, 0.0)  # a class that is never shown has no weight
    return weights.float()
