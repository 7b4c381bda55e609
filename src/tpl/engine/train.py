"""The training loop: a feed of batches, one objective, one gated optimiser.

A step is plain, shared by several processes, or captured as a CUDA graph.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from tpl.config import Config, option
from tpl.engine.batches import IGNORED, Batches, Feed, RotationClasses, Samples, StepInputs
from tpl.engine.compute import capture, uses_cuda_graphs, without_denormals
from tpl.engine.distributed import Processes, current
from tpl.engine.events import Callback, Event
from tpl.errors import TplError

SHORTEST_CYCLE = 8  # steps in which a mask can still be annealed
EPSILON = 1e-8  # of Adam


# Optimisers


class GatedSGD(torch.optim.Optimizer):
    """SGD with momentum, weight decay and Nesterov as torch defines them, with a gate for each weight.

    HAT protects old tasks by freezing the weights they use. Gating the gradient would not be enough, since momentum and
    weight decay would still change a protected weight. The gate multiplies the final update: a weight with gate 0 keeps
    its exact bits.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults)
        # For each parameter, where the gate is open, and the gate itself unless it is binary.
        self.gates: dict[Tensor, tuple[Tensor, Tensor | None]] = {}
        self._factor: Tensor | None = None  # on the device, where a captured step reads it

    def gate(self, parameter: Tensor, gate: Tensor) -> None:
        """Multiply every update of `parameter` by `gate`, between 0 (frozen) and 1."""
        binary = bool(((gate == 0) | (gate == 1)).all())
        self.gates[parameter] = gate > 0, None if binary else gate

    def scale_rate(self, factor: float) -> None:
        """Use `factor` times the learning rate from now on. Call it before a step is captured, then before any step."""
        if self._factor is None:
            self._factor = torch.ones((), device=self.param_groups[0]["params"][0].device)
        self._factor.fill_(factor)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad
                if group["weight_decay"]:
                    update = update.add(p, alpha=group["weight_decay"])
                if group["momentum"]:
                    update = self._momentum(p, update, group["momentum"], group["nesterov"])
                if (gate := self.gates.get(p)) is not None:
                    opened, share = gate
                    # Not a plain product: zero times an overflow would be NaN in a protected weight.
                    update = torch.where(opened, update if share is None else update * share, 0)
                self._move(p, update, group["lr"])

    def _move(self, p: Tensor, update: Tensor, lr: float) -> None:
        if self._factor is None:
            p.sub_(update, alpha=lr)
        elif p.is_cuda:  # one pass over millions of weights instead of two; on a CPU its rounding differs
            p.addcmul_(update, self._factor, value=-lr)
        else:
            p.sub_(update * self._factor, alpha=lr)

    def _momentum(self, p: Tensor, update: Tensor, momentum: float, nesterov: bool) -> Tensor:
        buffer = self.state[p].get("momentum")
        if buffer is None:
            buffer = self.state[p]["momentum"] = update.clone()
        elif p.is_cuda:  # as above
            torch.add(update, buffer, alpha=momentum, out=buffer)
        else:
            buffer.mul_(momentum).add_(update)
        return update.add(buffer, alpha=momentum) if nesterov else buffer


class Adam(GatedSGD):
    """Adam as torch defines it, with the gates and the changing rate of `GatedSGD`; its counters are on the device.

    For parameters that plain SGD hardly moves: prompts, whose gradients are tiny beside those of a head.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, lr, betas[0], weight_decay)
        self.second = betas[1]

    def _momentum(self, p: Tensor, update: Tensor, momentum: float, nesterov: bool) -> Tensor:
        state = self.state[p]
        if not state:
            state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
            state["steps"] = torch.zeros((), device=p.device)
        state["steps"].add_(1)
        state["mean"].mul_(momentum).add_(update, alpha=1 - momentum)
        state["square"].mul_(self.second).addcmul_(update, update, value=1 - self.second)
        mean = state["mean"] / (1 - momentum ** state["steps"])
        square = state["square"] / (1 - self.second ** state["steps"])
        direction: Tensor = mean / (square.sqrt() + EPSILON)
        return direction


# Recipe and objective


@dataclass(frozen=True)
class Recipe(Config):
    """How long and how fast one task is trained."""

    epochs: int = option(20, "passes over a task's training images", minimum=1, group="training")
    batch_size: int = option(
        64,
        "images a step; as many replayed ones come on top, unless they are shuffled among the new ones",
        minimum=1,
        group="training",
    )
    lr: float = option(0.005, "learning rate", above=0, group="training")
    schedule: str = option(
        "constant",
        "constant: the rate stays (paper); cosine: it falls to zero by the last step",
        ("constant", "cosine"),
        group="training",
    )
    augment: str = option(
        "none",
        "none (public code); flip: images are flipped horizontally half of the time; crop: and cropped at random",
        ("none", "flip", "crop"),
        group="augmentation",
    )
    momentum: float = option(0.9, "momentum of SGD", minimum=0, group="training")
    weight_decay: float = option(
        0.0, "weight decay of SGD: 0 by the paper's text, 5e-4 in the public code", minimum=0, group="training"
    )
    nesterov: bool = option(
        False, "Nesterov momentum: false by the paper's text, true in the public code", group="training"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not 0 < self.momentum < 1:
            raise TplError(f"Nesterov needs a momentum between 0 and 1; got {self.momentum}.")

    def optimiser(self, parameters: Sequence[Tensor]) -> GatedSGD:
        """The optimiser of this recipe."""
        return GatedSGD(parameters, self.lr, self.momentum, self.weight_decay, self.nesterov)

    def batches(
        self,
        new: Samples,
        replay: Samples | None,
        generator: torch.Generator,
        numbers: int = 0,
        whole: bool = False,
        rotations: RotationClasses | None = None,
    ) -> Batches:
        """The batches of this recipe, with `numbers` random numbers a step."""
        flip, crop = self.augment == "flip", self.augment == "crop"
        return Batches(new, replay, self.batch_size, generator, flip, numbers, crop, whole, rotations)

    def rate_at(self, done: float) -> float:
        """The factor of the learning rate after a share `done` of all steps."""
        return 1.0 if self.schedule == "constant" else 0.5 + 0.5 * math.cos(math.pi * done)


class Objective(Protocol):
    """A method's loss, and its hooks around the optimiser's step.

    `progress` is how far through the epoch a step is, from 0 up to but not including 1 (see `cycle_length`). It is
    on the device, and an objective must not branch on its value: on a GPU a step is captured once and replayed.
    """

    def losses(self, images: Tensor, labels: Tensor, progress: Tensor, draws: Tensor) -> Tensor:
        """The loss of every network, `[networks]`, on its part of a batch of normalised images.

        `labels` is `[networks, batch]`; rows labelled `IGNORED` do not count. `draws` are the step's random numbers,
        `[networks, numbers]`.
        """

    def after_backward(self, progress: Tensor) -> None:
        """Called after the backward pass, before the optimiser's step."""

    def after_step(self) -> None:
        """Called after the optimiser's step."""


class Step:
    """One training step, from row codes to updated parameters; adds its losses to `total`."""

    def __init__(
        self, objective: Objective, optimiser: GatedSGD, feed: Feed, normalise: Callable[[Tensor], Tensor]
    ) -> None:
        self.objective, self.optimiser, self.feed, self.normalise = objective, optimiser, feed, normalise
        self.total = torch.zeros(len(feed.networks), device=feed.device)

    def __call__(self, progress: Tensor, inputs: StepInputs) -> None:
        """Forward, backward, update."""
        pixels, labels = self.batch(inputs)
        self.optimiser.zero_grad(set_to_none=True)
        draws = inputs.draws[:, : self.feed.numbers]  # the rest is for the feed itself
        losses = self.objective.losses(self.normalise(pixels), labels, progress, draws)
        losses = self.backward(losses)
        self.objective.after_backward(progress)
        self.optimiser.step()
        self.objective.after_step()
        self.total += losses

    def batch(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Pixels and labels of the batch."""
        return self.feed.gather(inputs)

    def backward(self, losses: Tensor) -> Tensor:
        """Compute the gradients; returns the losses, detached."""
        losses.sum().backward()  # the networks share no parameter: each gets its own gradient
        return losses.detach()


class SharedStep(Step):
    """A training step whose batch several processes share."""

    def __init__(self, processes: Processes, *step: Any) -> None:
        super().__init__(*step)
        self.processes = processes

    def batch(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """This process's rows of the batch, as many new as replayed ones if those are equally many."""
        pixels, labels = super().batch(inputs)
        new, all_rows = inputs.new.shape[1], labels.shape[1]
        halves = [self._own(new, labels.device), new + self._own(all_rows - new, labels.device)]
        counted = torch.cat([rows < end for rows, end in zip(halves, (new, all_rows), strict=True)])
        rows = torch.cat(halves).clamp_max(all_rows - 1)  # missing rows are replaced by the last one, and do not count
        own = torch.where(counted, labels[:, rows], IGNORED)
        self.share = (own != IGNORED).sum(dim=1) / (labels != IGNORED).sum(dim=1)
        return pixels.unflatten(0, labels.shape)[:, rows].flatten(0, 1), own

    def _own(self, count: int, device: torch.device) -> Tensor:
        """Every n-th of `count` rows; the same number in every process."""
        size = self.processes.size
        return size * torch.arange(math.ceil(count / size), device=device) + self.processes.rank

    def backward(self, losses: Tensor) -> Tensor:
        """The whole batch's gradients in all processes, and its losses.

        A mean over rows is the sum of the processes' means, each times its share of the rows that count. A term that
        does not depend on rows, such as the penalty of a mask, has the same gradient everywhere, and the shares add up
        to 1.
        """
        weighed = losses * self.share
        weighed.sum().backward()
        moving = [p for group in self.optimiser.param_groups for p in group["params"] if p.grad is not None]
        parts = [*(p.grad for p in moving), weighed.detach()]
        # Without rows that count, the mean was 0 / 0, and so are the gradients.
        bucket = torch.where(self.share.amin() > 0, torch.cat([part.flatten() for part in parts]), 0)
        self.processes.add_up(bucket)
        gradients: list[Tensor] = list(bucket.split([part.numel() for part in parts]))
        total = gradients.pop()
        for p, gradient in zip(moving, gradients, strict=True):
            p.grad = gradient.view_as(p)
        return total

    def align(self) -> None:
        """Copy the first process's parameters, so that all networks are equal to the last bit."""
        with torch.no_grad():
            for group in self.optimiser.param_groups:
                for p in group["params"]:
                    self.processes.take_from_first(p.data)


class CapturedStep:
    """A step that is captured as a CUDA graph after a few plain ones and replayed from then on.

    Every step must have the same shapes: the feed fills its batches up.
    """

    WARM_UP = 3  # plain steps, in which momentum is allocated and libraries choose kernels

    def __init__(self, step: Step) -> None:
        self.step = step
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done = 0
        self.side = torch.cuda.Stream()

    def __call__(self, progress: Tensor, inputs: StepInputs) -> None:
        """A plain step first, then replays of the graph."""
        if self.graph is None and self.done >= self.WARM_UP:
            self._capture(progress, inputs)
        if self.graph is not None:
            self.progress.copy_(progress)
            self.inputs.copy_(inputs)
            self.graph.replay()
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.step(progress, inputs)
        torch.cuda.current_stream().wait_stream(self.side)
        self.done += 1

    def _capture(self, progress: Tensor, inputs: StepInputs) -> None:
        self.progress, self.inputs = progress.clone(), inputs.clone()  # where every replay reads its inputs
        self.step.optimiser.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with capture(graph):
            self.step(self.progress, self.inputs)
        self.graph = graph


def cycle_length(steps: int, epochs: int) -> int:
    """Steps in which `progress` runs from 0 to 1: an epoch, or several where epochs are very short.

    A handful of images makes one step an epoch. Annealing inside such an epoch would never leave its start.
    """
    whole_epochs = min(math.ceil(SHORTEST_CYCLE / steps), epochs)
    return steps * whole_epochs


def batches_of_images(batches: Batches, normalise: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """The normalised images of one more epoch, batch by batch, augmented as in training."""
    feed = Feed([batches])
    for inputs in feed.epoch():
        yield normalise(feed.gather(inputs)[0])


def train(
    objective: Objective,
    optimiser: GatedSGD,
    networks: Sequence[Batches],
    recipe: Recipe,
    normalise: Callable[[Tensor], Tensor],
    callbacks: Sequence[Callback],
    started: float | None = None,
) -> None:
    """Train all networks by the recipe; there is one callback for each network.

    `started` is when its preparation began, by `time.perf_counter`, if that counts as training. The losses are read
    once an epoch: nothing inside an epoch waits for the device. Where several processes work on a run, they share every
    batch (see `distributed`). On a CPU, training has a thread of its own.
    """
    work = partial(_train, objective, optimiser, networks, recipe, normalise, callbacks, started or time.perf_counter())
    if networks[0].new.labels.device.type == "cpu":
        without_denormals(work)
    else:
        work(threading.Event())


def _train(
    objective: Objective,
    optimiser: GatedSGD,
    networks: Sequence[Batches],
    recipe: Recipe,
    normalise: Callable[[Tensor], Tensor],
    callbacks: Sequence[Callback],
    started: float,
    interrupted: threading.Event,
) -> None:
    epochs, processes = recipe.epochs, current()
    on_graphs = uses_cuda_graphs(networks[0].new.labels.device)
    feed = Feed(networks, full=on_graphs)
    plain: Step = Step(objective, optimiser, feed, normalise)
    if not processes.alone:
        _check_agreement(processes, networks)
        plain = SharedStep(processes, objective, optimiser, feed, normalise)
    step = CapturedStep(plain) if on_graphs and processes.captures else plain
    cycle = cycle_length(feed.steps, epochs)
    progress = (torch.arange(cycle, device=feed.device, dtype=torch.float32) / cycle).unbind()
    for epoch in range(epochs):
        plain.total.zero_()
        for number, inputs in enumerate(feed.epoch(), start=epoch * feed.steps):
            if recipe.schedule != "constant":
                optimiser.scale_rate(recipe.rate_at(number / (epochs * feed.steps)))
            step(progress[number % cycle], inputs)
            if interrupted.is_set():
                return
        for loss, callback in zip((plain.total / feed.steps).tolist(), callbacks, strict=True):
            if not math.isfinite(loss):
                raise TplError(
                    f"The loss became {loss} in epoch {epoch + 1}: the learning rate is too high for this data. "
                    "Lower it with --lr; nothing of this task was stored."
                )
            callback(Event("epoch", {"epoch": epoch + 1, "epochs": epochs, "loss": loss}))
    if isinstance(plain, SharedStep):
        plain.align()
    seconds = time.perf_counter() - started
    work = {"images": epochs * feed.images, "steps": epochs * feed.steps, "networks": len(networks)}
    for callback in callbacks:
        callback(Event("trained", work | {"seconds": seconds}))


def _check_agreement(processes: Processes, networks: Sequence[Batches]) -> None:
    """Raise an error if the processes would train on different images, or in a different order."""
    checksums = []
    for batches in networks:
        state = batches.generator.get_state().double()
        checksums.append((state * torch.arange(1, len(state) + 1)).sum())
        for samples in (batches.new, batches.replay):
            labels = samples.labels.double().cpu() if samples is not None else torch.zeros(0, dtype=torch.float64)
            checksums += [torch.tensor(float(len(labels))), (labels * torch.arange(1, len(labels) + 1)).sum()]
        if batches.replay is not None:
            checksums.append(batches.replay.pixels.flatten(1).sum(dim=1).double().cumsum(0).sum().cpu())
    own = torch.stack([value.double() for value in checksums])
    first = own.clone()
    processes.take_from_first(first)
    differing = (own != first).any().double().reshape(1)
    processes.add_up(differing)
    if float(differing):
        raise TplError(
            "The processes of this run would not train on the same images: is the data the same on every machine? "
            "Run it in one process, or with --set memory_policy=random, which no rounding can change."
        )
