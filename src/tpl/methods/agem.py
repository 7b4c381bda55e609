"""A-GEM: a step may not increase the average loss on old images (Chaudhry et al., ICLR 2019).

With g the gradient of the loss on new images and r that on a random batch of stored ones:

    g <- g - (g.r / r.r) r    where g.r < 0,    else g as it is

All trainable parameters form one vector. Where the two gradients agree the memory changes nothing; where they do not,
the projected g is orthogonal to r. The network is never trained on stored images themselves, so accuracy on old classes
is low by design when all classes compete in one head.

Bugs of public codes that are avoided: a memory of one batch a task instead of an equal share of the budget (here every
class has the same share); gradients written into frozen parameters.

Adapted: adapters, norms and the growing head are trained. Published training is plain SGD; momentum acts on the
projected gradients here, so a step can still continue in the direction of earlier ones (`momentum=0` gives the
published rule). The memory batch is as large as that of new images.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.engine import Callback, Samples
from tpl.methods.base import register
from tpl.methods.parts.network import CrossEntropy, Network
from tpl.methods.parts.rehearsal import ExemplarConfig, RehearsalMethod
from tpl.stream import Task


class ProjectedGradient(CrossEntropy):
    """Cross-entropy of the new images, along a gradient that does not point against the stored ones."""

    def __init__(self, network: Network, together: bool = False) -> None:
        """`together`: the network has batch norms, whose statistics in training are of both halves of a batch."""
        super().__init__(network)
        self.together = together
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self.reference: Sequence[Tensor] = ()

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of the batch's first half; the gradient of the second, replayed half is stored as `reference`.

        Each of the two gradients has a forward pass: a compiled network's backward pass overwrites the activations.
        """
        new, old = labels.chunk(2)
        self.reference = torch.autograd.grad(F.cross_entropy(self._half(images, 1), old), self.parameters)
        return F.cross_entropy(self._half(images, 0), new)

    def _half(self, images: Tensor, number: int) -> Tensor:
        """Logits of one half of a batch."""
        logits: Tensor = self.network(images if self.together else images.chunk(2)[number])
        return logits.chunk(2)[number] if self.together else logits

    def after_backward(self, progress: Tensor) -> None:
        """Remove the component of the gradient that would increase the loss on stored images."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        assert len(gradients) == len(self.reference)
        project(gradients, self.reference)


def project(gradients: Sequence[Tensor], reference: Sequence[Tensor]) -> None:
    """Project `gradients`, as one vector, to a dot product >= 0 with `reference`; in place, without a branch."""
    dot = torch.stack([(g * r).sum() for g, r in zip(gradients, reference, strict=True)]).sum()
    length = torch.stack([r.square().sum() for r in reference]).sum()
    against = torch.where(dot < 0, dot / length.clamp_min(torch.finfo(length.dtype).tiny), 0)
    for g, r in zip(gradients, reference, strict=True):
        g.sub_(against * r)


@register
class AGEM(RehearsalMethod):
    """One network whose gradients are projected so that they do not harm stored images."""

    name = "agem"
    summary = "A-GEM: fine-tuning whose gradients may not point against those of stored images"
    paper = "Chaudhry et al., Efficient Lifelong Learning with A-GEM, ICLR 2019"
    keeps = "a class-balanced memory of images"
    cost = "new and remembered images, a backward pass each; one pass an answer"
    config_class = ExemplarConfig
    from_scratch = True

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Train on the new images with projected gradients; then store some of them."""
        new, old = self.grow(task, samples), self.old_samples()
        objective = ProjectedGradient(self.network, self.encoder.batch_norms) if old is not None else None
        self.fit(new, callback, objective, old)
        self.remember(task, samples)
