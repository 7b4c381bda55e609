"""Making the outputs of separately trained task models comparable (paper, appendix on calibration).

All readings fit one scale and one shift per task on the replay memory, after every task:

- "score": w_t S_t + b_t, cross-entropy over *tasks*, full batch, 100 steps (the public code);
- "shift": S_t + b_t, the same cross-entropy at the temperature that the answer uses, to convergence (ours);
- "probability": sigma1_t * softmax(f_t)_j * S_t + sigma2_t, cross-entropy over *classes*, batches
  of 64, 100 epochs (the paper's text). These outputs are no probabilities, so cross-entropy takes
  them as logits.

A memory may hold more of one class than of another, where there were fewer images of that. Cross-entropy would take the
one for likelier; by `equal_shares` every class counts the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor

P = ParamSpec("P")

CALIBRATIONS = ("none", "score", "shift", "probability")
STEPS = 100
BATCH = 64
RIDGE = 0.1  # on the squared shifts: a task without samples in the memory keeps its own


def equal_shares(classes: Tensor) -> Tensor | None:
    """A weight a sample, 1 on average, with which all classes count the same; None where they do (or nearly)."""
    counts = classes.bincount()
    present = counts[counts > 0]
    if not len(present) or int(present.max() - present.min()) <= 1:
        return None
    return len(classes) / (len(present) * counts[classes].double())


def _beside_the_gpu(fit: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """The fit done on the CPU, with its answer where its tensors were.

    It is hundreds of tiny steps, each of which would cost several launches on a GPU.
    """

    @wraps(fit)
    def on_cpu(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        device = next(part.device for part in (*args, *kwargs.values()) if isinstance(part, Tensor))
        return fit(*map(_to_cpu, args), **{name: _to_cpu(part) for name, part in kwargs.items()}).to(device)

    return on_cpu


def _to_cpu(part: Any) -> Any:
    return part.cpu() if isinstance(part, Tensor) else part


def _cross_entropy(logits: Tensor, truth: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return F.cross_entropy(logits, truth)
    return (F.cross_entropy(logits, truth, reduction="none") * weights).mean()


@_beside_the_gpu
def calibrate_scores(scores: Tensor, tasks: Tensor, weights: Tensor | None = None) -> Tensor:
    """Scale and shift per task, `[2, T]`, from scores `[n, T]` of samples with known tasks `[n]`."""
    with torch.enable_grad():
        affine = torch.stack([torch.ones(scores.shape[1]), torch.zeros(scores.shape[1])]).to(scores)
        affine.requires_grad_(True)
        optimiser = torch.optim.SGD([affine], lr=0.01, momentum=0.8)
        for _ in range(STEPS):
            optimiser.zero_grad()
            _cross_entropy(affine[0] * scores + affine[1], tasks, weights).backward()
            optimiser.step()
    return _sane(affine.detach())


@_beside_the_gpu
def calibrate_shifts(scores: Tensor, tasks: Tensor, temperature: float, weights: Tensor | None = None) -> Tensor:
    """A shift per task and scale 1, `[2, T]`: the minimum of the cross-entropy at the temperature, weakly regularised.

    The problem is convex: the answer depends on no rate and no number of steps.
    """
    with torch.enable_grad():
        shift = torch.zeros(scores.shape[1], dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.LBFGS([shift], max_iter=STEPS, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimiser.zero_grad()
            value = _cross_entropy((scores + shift) / temperature, tasks, weights) + RIDGE * shift.square().sum()
            value.backward()
            return value

        optimiser.step(loss)
    return _sane(torch.stack([torch.ones_like(shift), shift]).detach())


@_beside_the_gpu
def calibrate_together(scores: Tensor, tasks: Tensor, weights: Tensor | None = None) -> Tensor:
    """One scale for all tasks and a shift each, `[2, T]`, for scores of any size: logistic regression at temperature 1.

    Convex, as above; the scale is fitted on scores divided by their overall deviation, and stays positive.
    """
    size = scores.double().std(correction=0).clamp_min(1e-12)
    centred = (scores.double() - scores.double().mean(dim=0)) / size
    with torch.enable_grad():
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        shift = torch.zeros(scores.shape[1], dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.LBFGS([scale, shift], max_iter=STEPS, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimiser.zero_grad()
            value = _cross_entropy(scale * centred + shift, tasks, weights) + RIDGE / 10 * shift.square().mean()
            value.backward()
            return value

        optimiser.step(loss)
    found = scale.detach().clamp_min(1e-3) / size
    return _sane(torch.stack([found.expand_as(shift), shift.detach() - found * scores.double().mean(dim=0)]))


@_beside_the_gpu
def calibrate_probabilities(
    within: Tensor, scores: Tensor, task_of_class: Tensor, classes: Tensor, generator: torch.Generator
) -> Tensor:
    """Scale and shift per task, `[2, T]`, for class outputs `within * score`.

    `within` `[n, classes]` holds each class's probability inside its own task.
    """
    base = within * scores[:, task_of_class]
    weights = equal_shares(classes)
    with torch.enable_grad():
        affine = torch.stack([torch.ones(scores.shape[1]), torch.zeros(scores.shape[1])]).to(base)
        affine.requires_grad_(True)
        optimiser = torch.optim.SGD([affine], lr=0.01, momentum=0.9)
        for _ in range(STEPS):
            for rows in torch.randperm(len(base), generator=generator).split(BATCH):
                optimiser.zero_grad()
                per_class = affine[:, task_of_class]
                own = None if weights is None else weights[rows]
                _cross_entropy(per_class[0] * base[rows] + per_class[1], classes[rows], own).backward()
                optimiser.step()
    return _sane(affine.detach())


def _sane(affine: Tensor) -> Tensor:
    """The fit, or no calibration at all where it diverged."""
    if bool(affine.isfinite().all()):
        return affine
    return torch.stack([torch.ones_like(affine[0]), torch.zeros_like(affine[1])])
