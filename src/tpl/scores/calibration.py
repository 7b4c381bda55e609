"""Making the outputs of separately trained task models comparable (paper, appendix on calibration).

Every variant fits one scale and one shift per task on the replay memory, after every task:

- "score": w_t S_t + b_t, cross-entropy over *tasks*, full batch, 100 steps (the public code);
- "shift": S_t + b_t, the same cross-entropy at the temperature that the answer uses, to convergence (ours);
- "probability": sigma1_t * softmax(f_t)_j * S_t + sigma2_t, cross-entropy over *classes*, batches
  of 64, 100 epochs (the paper's text). These outputs are not probabilities, so cross-entropy uses
  them as logits.

A memory may hold more images of one class than of another, which cross-entropy would learn as a prior; with the weights
of `equal_shares` every class counts the same.

Images of unknown classes are detected by conformal p-values over images held out of training: a new image of a task's
classes has a score of any rank among the held-out ones with equal probability, as neither was trained on. So its
p-value is at most `a` with probability at most `a`, whatever the scores are (Vovk et al., 2005).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor

P = ParamSpec("P")

CALIBRATIONS = ("none", "score", "shift", "probability")
STEPS = 100
RATE, MOMENTUM = 0.01, 0.8
BATCH = 64
RIDGE = 0.1  # on the squared shifts: a task without samples in the memory keeps a shift of 0


def equal_shares(classes: Tensor) -> Tensor | None:
    """Sample weights, 1 on average, with which all classes count the same; None where they do already (or nearly)."""
    counts = classes.bincount()
    present = counts[counts > 0]
    if not len(present) or int(present.max() - present.min()) <= 1:
        return None
    return len(classes) / (len(present) * counts[classes].double())


def _on_cpu(fit: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Run a fit on the CPU and move its result to the device of its tensors.

    An optimiser has hundreds of tiny steps, each of which would cost dozens of kernel launches on a GPU.
    """

    @wraps(fit)
    def fit_on_cpu(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        device = next(part.device for part in (*args, *kwargs.values()) if isinstance(part, Tensor))
        return fit(*map(_to_cpu, args), **{name: _to_cpu(part) for name, part in kwargs.items()}).to(device)

    return fit_on_cpu


def _to_cpu(part: Any) -> Any:
    return part.cpu() if isinstance(part, Tensor) else part


def _cross_entropy(logits: Tensor, truth: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return F.cross_entropy(logits, truth)
    return (F.cross_entropy(logits, truth, reduction="none") * weights).mean()


def calibrate_scores(scores: Tensor, tasks: Tensor, weights: Tensor | None = None) -> Tensor:
    """Scale and shift per task, `[2, T]`, from scores `[n, T]` of samples with known tasks `[n]`.

    Gradient descent with momentum, the gradient written out: with a hundred tasks, a step by autograd takes four times
    as long.
    """
    affine = torch.stack([torch.ones(scores.shape[1]), torch.zeros(scores.shape[1])]).to(scores)
    velocity = torch.zeros_like(affine)
    share = torch.ones_like(scores[:, :1]) if weights is None else weights.to(scores).unsqueeze(1)
    share = share / len(scores)
    own = share * F.one_hot(tasks, scores.shape[1])
    for _ in range(STEPS):
        wrong = share * (affine[0] * scores + affine[1]).softmax(dim=1) - own
        velocity = MOMENTUM * velocity + torch.stack([(wrong * scores).sum(dim=0), wrong.sum(dim=0)])
        affine = affine - RATE * velocity
    return _finite(affine)


@_on_cpu
def calibrate_shifts(scores: Tensor, tasks: Tensor, temperature: float, weights: Tensor | None = None) -> Tensor:
    """A shift per task and scale 1, `[2, T]`: the minimum of the cross-entropy at the temperature, weakly regularised.

    The problem is convex: the result does not depend on a learning rate or a number of steps.
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
    return _finite(torch.stack([torch.ones_like(shift), shift]).detach())


@_on_cpu
def calibrate_together(scores: Tensor, tasks: Tensor, weights: Tensor | None = None) -> Tensor:
    """One scale for all tasks and a shift each, `[2, T]`, for scores of any size: logistic regression at temperature 1.

    The problem is convex. The scale is fitted on scores divided by their overall deviation, and stays positive.
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
    return _finite(torch.stack([found.expand_as(shift), shift.detach() - found * scores.double().mean(dim=0)]))


@_on_cpu
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
    return _finite(affine.detach())


def _finite(affine: Tensor) -> Tensor:
    """The fit, or the identity where it diverged."""
    if bool(affine.isfinite().all()):
        return affine
    return torch.stack([torch.ones_like(affine[0]), torch.zeros_like(affine[1])])


def p_values(scores: Tensor, held_out: Tensor) -> Tensor:
    """(1 + number of the sorted `held_out` scores that are no larger) / (1 + their number); 1 without any."""
    if torch.compiler.is_compiling():  # ONNX has no counterpart of searchsorted
        below = (held_out <= scores.unsqueeze(1)).sum(dim=1)
    else:
        below = torch.searchsorted(held_out, scores, right=True)
    return (1 + below).double() / (1 + len(held_out))


def graded_p_values(scores: Tensor, held_out: Tensor) -> Tensor:
    """`p_values` without steps: no smaller from the smallest held-out score on, and falling to 0 below it.

    A threshold of at least 1 / (n + 1) therefore rejects no more known samples than with `p_values`; smaller ones rest
    on the assumption that scores thin out exponentially below the smallest, as fast as between it and the median.
    """
    n = len(held_out)
    if n == 0:
        return torch.ones_like(scores)
    if torch.compiler.is_compiling():  # ONNX has no counterpart of searchsorted
        below = (held_out <= scores.unsqueeze(1)).sum(dim=1)
    else:
        below = torch.searchsorted(held_out, scores, right=True)
    left, right = held_out[(below - 1).clamp_min(0)], held_out[below.clamp_max(n - 1)]
    between = torch.where(right > left, (scores - left) / (right - left).clamp_min(1e-300), 0.0)
    scale = ((held_out[n // 2] - held_out[0]) / math.log((n + 1) / 2)) if n > 1 else held_out[0].abs()
    tail = torch.exp((scores - held_out[0]).clamp_max(0) / scale.clamp_min(1e-12))
    return torch.where(below > 0, (1 + below + between).clamp_max(n + 1), tail) / (1 + n)


def unknown_scores(scores: Sequence[Tensor], held_out: Sequence[Tensor]) -> Tensor:
    """1 - max_t p_t per image, in [0, 1]: high where the image looks like no task's own.

    `scores[t]` `[n]` are the images' scores under task t, `held_out[t]` those of its held-out images, sorted. The
    largest p-value is at least that of the true task: a known image reaches 1 - a with probability at most `a`, however
    many tasks there are.
    """
    each = [p_values(s, h) for s, h in zip(scores, held_out, strict=True)]
    return 1 - torch.stack(each).amax(dim=0)


def smallest_share(held_out: Sequence[Tensor]) -> float:
    """The smallest share of rejected known images at which any image can be rejected.

    Every task must be able to rule an image out, so the task with the fewest held-out images decides: 1 / (n + 1). A
    held-out image with score -inf, which its task's model would not have been queried with, rules nothing out.
    """
    return max((1 + int(h.isneginf().sum())) / (1 + len(h)) for h in held_out)
