"""HAL: replay, and a learned image per old class whose prediction should not change (Chaudhry et al., AAAI 2021).

Anchoring. With L the cross-entropy of new and replayed images, and a the anchors of old classes:

    ahead = theta - rate * grad L(theta)                   the step that replay alone would take
    theta <- theta - rate * (grad L + lambda * grad_ahead mean (f_ahead(a) - f_theta(a))^2)

Anchors. When a task ends, each of its classes gets the image that would be forgotten most: one that the network
theta classifies well, and theta', the same network after an epoch on the memory of earlier tasks, does not:

    a = argmin CE(f_theta(a), y) - CE(f_theta'(a), y) + gamma * |z(a) - mean z|^2

z are the features, and their mean over the task's images keeps the anchor among them: without that term, or with a
weak one, an anchor stays the noise that it starts from, which neither network knows. (The first task has no earlier
one: there theta' is trained on the task's own stored images.)

Bugs of public codes that are avoided: with f_ahead(a) as a constant, the gradient at theta pulls the anchors'
predictions towards where the step would move them, so that they change more instead of less; here f_theta(a) is the
constant and the gradient is taken at the look-ahead weights (the derivative of `ahead` itself, a Hessian, is left out).
The look-ahead changes neither the weights nor the optimiser's momentum. Fine-tuning on the memory is a real epoch, not
one batch.

Adapted: the mean feature is that of all the task's images under the finished network, not a running one over the last
batches. Anchors are images (whole grey levels, saved with the model, on top of the memory's budget, and counted with
it). They start as noise, as published, and move by steps whose length falls to zero, whatever the gradient's, which is
tiny on the pixels of a large image. A step looks at as many anchors as it has new images, all in turn: every task's
steps then have the same shapes, which are compiled once. The memory is class-balanced, not a ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from tpl.config import option
from tpl.engine import Callback, Compute, Samples, no_callback
from tpl.methods.base import register
from tpl.methods.parts.network import CrossEntropy, Network
from tpl.methods.parts.rehearsal import BALANCED, UNION, RehearsalConfig, RehearsalMethod
from tpl.nets import Encoder
from tpl.store import State
from tpl.stream import Task

ANCHORS = "memory.anchors"  # their name in the state: images, not parameters


@dataclass(frozen=True)
class HALConfig(RehearsalConfig):
    """HAL's options."""

    anchor_weight: float = option(0.1, "lambda: weight of the anchors' look-ahead movement", minimum=0, group="anchors")
    anchor_mean: float = option(
        0.1, "gamma: how much an anchor's features stay near their task's mean", minimum=0, group="anchors"
    )
    anchor_steps: int = option(100, "steps in which an anchor is made", minimum=1, group="anchors")
    anchor_rate: ClassVar[float] = 4.0  # how far the first of them moves a pixel, in grey levels, root mean square
    replay_batches: str = option(
        BALANCED,
        "balanced: as many remembered images come on top of the new ones of every step (as published); union: new and "
        "remembered images are shuffled together",
        (UNION, BALANCED),
        group="memory",
    )


class Anchoring(CrossEntropy):
    """Cross-entropy of new and replayed images, with gradients that keep the anchors' predictions."""

    def __init__(
        self, network: Network, anchors: Tensor, normalise: Callable[[Tensor], Tensor], config: HALConfig
    ) -> None:
        super().__init__(network)
        self.anchors, self.normalise = anchors, normalise
        self.weight, self.rate = config.anchor_weight, config.lr
        self.rows = torch.arange(config.batch_size, device=anchors.device) % len(anchors)
        self.moving = {name: p for name, p in network.named_parameters() if p.requires_grad}

    def after_backward(self, progress: Tensor) -> None:
        """Look ahead along the gradient, and add the gradient that brings the anchors' predictions back from there."""
        images = self.normalise(self.anchors[self.rows])
        with torch.no_grad():
            before = self.network(images)
            ahead = {name: p if p.grad is None else p - self.rate * p.grad for name, p in self.moving.items()}
        weights = {name: p.detach().requires_grad_() for name, p in ahead.items()}
        movement = (functional_call(self.network, weights, (images,)) - before).square().mean()
        back = torch.autograd.grad(self.weight * movement, list(weights.values()))
        for p, gradient in zip(self.moving.values(), back, strict=True):
            assert p.grad is not None
            p.grad.add_(gradient)

    def after_step(self) -> None:
        """Move on to the next anchors."""
        self.rows.add_(len(self.rows)).remainder_(len(self.anchors))


def make_anchors(
    start: Tensor,
    classes: Tensor,
    now: Network,
    later: Network,
    mean: Tensor,
    normalise: Callable[[Tensor], Tensor],
    config: HALConfig,
) -> Tensor:
    """One uint8 image a class, from float pixels `start`, that `now` classifies well and `later` does not."""
    pixels = start
    for left in range(config.anchor_steps, 0, -1):
        pixels = pixels.detach().requires_grad_()
        images = normalise(pixels)
        z = now.features(images)
        forgetting = F.cross_entropy(later(images), classes, reduction="sum")
        known = F.cross_entropy(now.logits(z), classes, reduction="sum")
        loss = known - forgetting + config.anchor_mean * (z - mean).square().sum()
        (gradient,) = torch.autograd.grad(loss, pixels)
        length = gradient.square().mean(dim=(1, 2, 3), keepdim=True).sqrt()
        rate = config.anchor_rate * left / config.anchor_steps
        step = rate * gradient / length.clamp_min(torch.finfo(length.dtype).tiny)
        pixels = (pixels.detach() - step).clamp(0, 255)
    return pixels.round().to(torch.uint8)


@register
class HAL(RehearsalMethod):
    """Replay that keeps the predictions of learned anchor images."""

    name = "hal"
    summary = "HAL: replay, and a learned anchor image per class whose prediction must not move"
    paper = "Chaudhry et al., Using Hindsight to Anchor Past Knowledge in Continual Learning, AAAI 2021"
    keeps = "a class-balanced memory and one learned image a class"
    cost = "new, remembered and anchor images, the latter twice; anchors made after a task; one pass an answer"
    from_scratch = True
    splits = True
    config_class = HALConfig
    config: HALConfig

    def __init__(self, encoder: Encoder, config: HALConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        size = self.preprocess.height, self.preprocess.width
        self.anchors = torch.zeros(0, 3, *size, dtype=torch.uint8, device=compute.device)

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Train with replay and anchors; then store some images, and make the new classes' anchors."""
        new, old = self.grow(task, samples), self.old_samples()
        anchored = Anchoring(self.network, self.anchors, self.normalise, self.config) if len(self.anchors) else None
        self.fit(new, callback, anchored, old)
        self.remember(task, samples)
        self.anchors = torch.cat([self.anchors, self.new_anchors(len(task.classes), samples, old)])

    def new_anchors(self, classes: int, samples: Samples, old: Samples | None) -> Tensor:
        """Anchors of the newest classes, given the images of their task and those stored before it."""
        now, later = self.network.copy(), self.fine_tuned(old or self.old_samples())
        mean = self.features(samples.pixels).mean(dim=0)
        numbers = torch.arange(classes, device=self.compute.device) + len(self.classes_)
        shape = classes, *self.anchors.shape[1:]
        start = 255 * torch.rand(shape, generator=self.generator("anchors")).to(self.compute.device)
        made = [
            make_anchors(part, own, now, later, mean, self.normalise, self.config)
            for part, own in zip(
                start.split(self.config.batch_size), numbers.split(self.config.batch_size), strict=True
            )
        ]
        return torch.cat(made)

    def fine_tuned(self, memory: Samples | None) -> Network:
        """A copy of the network after one more epoch on the memory's images alone."""
        before = self.network.copy().state_dict()
        if memory is not None:
            self.fit(memory, no_callback, recipe=self.config.replace(epochs=1), name="hindsight")
        later = self.network.copy()
        self.network.load_state_dict(before)
        return later

    @property
    def memory_bytes(self) -> int:
        """Size of the memory's images and of the anchors."""
        return super().memory_bytes + self.anchors.nbytes

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Drop the class's row of the head, its images and its anchor."""
        super().remove_class(task, own, number)
        self.anchors = torch.cat([self.anchors[:number], self.anchors[number + 1 :]])

    def state(self) -> State:
        """The network and the anchors."""
        found = super().state()
        return State(found.shared | {ANCHORS: self.anchors}, found.tasks)

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""
        super().load_state(State({k: v for k, v in state.shared.items() if k != ANCHORS}, state.tasks))
        self.anchors = state.shared[ANCHORS].to(self.compute.device)
