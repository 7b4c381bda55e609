"""A-GEM: a step may not make old images worse, on average (Chaudhry et al., ICLR 2019).

With g the gradient of the loss on new images and r that on a random batch of stored ones:

    g <- g - (g.r / r.r) r    where g.r < 0,    else g as it is

All trainable parameters make one vector. Where the two agree the memory changes nothing; where they do not, what is
left of g is at a right angle to r. Stored images are never trained on themselves, so accuracy on old classes is low by
design when all classes compete in one head.

Traps of public codes that are avoided: a memory of one batch a task instead of an equal share of the budget (here every
class has the same share); gradients written into parameters that are frozen.

Adapted: adapters, norms and the growing head are what is trained. Published training is plain SGD; the frame's momentum
acts on the projected gradients, so a step can still carry on what earlier ones began (`momentum=0` gives the published
rule). The memory batch is as large as that of new images.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.engine import Callback, Samples
from tpl.methods.base import register
from tpl.methods.parts.network import CrossEntropy, Network
from tpl.methods.parts.rehearsal import RehearsalMethod
from tpl.stream import Task


class ProjectedGradient(CrossEntropy):
    """Cross-entropy of the new images, along a gradient that does not point against the stored ones."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self.reference: Sequence[Tensor] = ()

    def losses(self, images: Tensor, labels: Tensor, progress: Tensor, draws: Tensor) -> Tensor:
        """The loss of the batch's first half; the gradient of the second, replayed one is kept beside it."""
        # In one pass: batch norms must see in training what statistics they answer by, both halves together.
        (fresh, stored), (new, old) = self.network(images).chunk(2), labels[0].chunk(2)
        self.reference = torch.autograd.grad(F.cross_entropy(stored, old), self.parameters, retain_graph=True)
        return F.cross_entropy(fresh, new).unsqueeze(0)

    def after_backward(self, progress: Tensor) -> None:
        """Take out of the gradient what points against the stored images."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        assert len(gradients) == len(self.reference)
        project(gradients, self.reference)


def project(gradients: Sequence[Tensor], reference: Sequence[Tensor]) -> None:
    """Make `gradients`, read as one vector, stand at no obtuse angle to `reference`; in place, without a branch."""
    dot = torch.stack([(g * r).sum() for g, r in zip(gradients, reference, strict=True)]).sum()
    length = torch.stack([r.square().sum() for r in reference]).sum()
    against = torch.where(dot < 0, dot / length.clamp_min(torch.finfo(length.dtype).tiny), 0)
    for g, r in zip(gradients, reference, strict=True):
        g.sub_(against * r)


@register
class AGEM(RehearsalMethod):
    """One network whose steps are turned away from what harms stored images."""

    name = "agem"
    summary = "A-GEM: fine-tuning whose gradients may not point against those of stored images"
    paper = "Chaudhry et al., Efficient Lifelong Learning with A-GEM, ICLR 2019"
    keeps = "a class-balanced memory of images"
    cost = "new and remembered images, a backward pass each; one pass an answer"
    from_scratch = True

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Train on the new images, watched over by the stored ones; then store some of the new."""
        new, old = self.grow(task, samples), self.old_samples()
        self.fit(new, callback, ProjectedGradient(self.network) if old is not None else None, old)
        self.remember(task, samples)
