"""Calibration: better on what it is fitted on, and the same as a loop written out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tpl.scores import calibration
from tpl.scores.calibration import (
    calibrate_probabilities,
    calibrate_scores,
    calibrate_shifts,
    calibrate_together,
    equal_shares,
)

Array = NDArray[np.float64]


def task_scores(n: int = 150, tasks: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores that are higher for the own task, by a little."""
    g = torch.Generator().manual_seed(seed)
    owner = torch.arange(n) % tasks
    own = torch.nn.functional.one_hot(owner, tasks).double()
    return torch.randn(n, tasks, generator=g, dtype=torch.float64) * 0.5 + own + 1, owner


def cross_entropy(scores: Array, targets: Array) -> float:
    return float(-scipy.special.log_softmax(scores, axis=1)[np.arange(len(targets)), targets].mean())


def applied(affine: Tensor, scores: Tensor) -> Array:
    return (affine[0] * scores + affine[1]).numpy()


def descended(scores: Tensor, owner: Tensor, weights: Tensor | None = None) -> Tensor:
    """100 steps of torch's own gradient descent with momentum, gradients by autograd."""
    affine = torch.stack([torch.ones(scores.shape[1]), torch.zeros(scores.shape[1])]).double().requires_grad_(True)
    optimiser = torch.optim.SGD([affine], lr=0.01, momentum=0.8)
    for _ in range(100):
        optimiser.zero_grad()
        losses = F.cross_entropy(affine[0] * scores + affine[1], owner, reduction="none")
        (losses if weights is None else losses * weights).mean().backward()
        optimiser.step()
    return affine.detach()


@pytest.mark.parametrize("weighted", [False, True])
def test_scores_are_fitted_as_by_autograd(weighted: bool) -> None:
    scores, owner = task_scores()
    weights = torch.linspace(0.5, 1.5, len(owner), dtype=torch.float64) if weighted else None
    torch.testing.assert_close(calibrate_scores(scores, owner, weights), descended(scores, owner, weights))


def test_starts_from_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "STEPS", 0)
    scores, owner = task_scores()
    assert calibrate_scores(scores, owner).tolist() == [[1, 1, 1], [0, 0, 0]]


def test_cross_entropy_over_tasks_goes_down() -> None:
    scores, owner = task_scores()
    affine = calibrate_scores(scores, owner)
    assert not affine.requires_grad
    assert affine.dtype == torch.float64
    assert affine.shape == (2, 3)
    assert cross_entropy(applied(affine, scores), owner.numpy()) < cross_entropy(scores.numpy(), owner.numpy())


@pytest.mark.parametrize("shift", [-2.0, 2.0])
def test_a_task_that_is_off_is_moved_back(shift: float) -> None:
    scores, owner = task_scores(n=300)
    off = scores + torch.tensor([0.0, shift, 0.0])
    affine = calibrate_scores(off, owner)
    others = affine[1, [0, 2]]
    assert bool((torch.sign(affine[1, 1] - others) == -np.sign(shift)).all())
    before, after = off.argmax(dim=1), torch.from_numpy(applied(affine, off)).argmax(dim=1)
    assert int((after == owner).sum()) > int((before == owner).sum())


def test_works_where_gradients_are_switched_off() -> None:
    scores, owner = task_scores()
    expected = calibrate_scores(scores, owner)
    with torch.no_grad():
        assert torch.equal(calibrate_scores(scores, owner), expected)


TASK_OF_CLASS = torch.tensor([0, 0, 1, 1, 2])


def class_data(n: int = 150) -> tuple[Tensor, Tensor, Tensor]:
    scores, _ = task_scores(n)
    g = torch.Generator().manual_seed(7)
    logits = torch.randn(n, 5, generator=g, dtype=torch.float64)
    within = torch.cat([logits[:, t == TASK_OF_CLASS].softmax(dim=1) for t in range(3)], dim=1)
    return within, scores, torch.arange(n) % 5


def test_probabilities_lower_the_cross_entropy_over_classes() -> None:
    within, scores, classes = class_data()
    raw = within * scores[:, TASK_OF_CLASS]
    affine = calibrate_probabilities(within, scores, TASK_OF_CLASS, classes, torch.Generator().manual_seed(0))
    after = affine[0, TASK_OF_CLASS] * raw + affine[1, TASK_OF_CLASS]
    assert affine.shape == (2, 3)
    assert not affine.requires_grad
    assert cross_entropy(after.numpy(), classes.numpy()) < cross_entropy(raw.numpy(), classes.numpy())


def test_probabilities_follow_the_generator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "STEPS", 5)
    within, scores, classes = class_data()

    def fit(seed: int) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        return calibrate_probabilities(within, scores, TASK_OF_CLASS, classes, g)

    torch.manual_seed(1)
    first = fit(0)
    torch.manual_seed(2)
    assert torch.equal(fit(0), first)
    assert not torch.equal(fit(1), first)


def test_probabilities_of_one_batch_are_fitted_as_by_a_loop_written_out() -> None:
    within, scores, classes = class_data(calibration.BATCH)  # one batch: the shuffling cannot matter
    raw, targets = (within * scores[:, TASK_OF_CLASS]).numpy(), np.eye(5)[classes.numpy()]
    member = np.eye(3)[TASK_OF_CLASS.numpy()]
    affine, velocity = np.stack([np.ones(3), np.zeros(3)]), np.zeros((2, 3))
    for _ in range(100):
        outputs = affine[0] @ member.T * raw + affine[1] @ member.T
        slope = (scipy.special.softmax(outputs, axis=1) - targets) / len(raw)
        velocity = 0.9 * velocity + np.stack([(slope * raw).sum(axis=0) @ member, slope.sum(axis=0) @ member])
        affine = affine - 0.01 * velocity
    found = calibrate_probabilities(within, scores, TASK_OF_CLASS, classes, torch.Generator().manual_seed(0))
    np.testing.assert_allclose(found.numpy(), affine, rtol=1e-9)


def test_shifts_are_the_minimum_that_scipy_finds() -> None:
    scores, owner = task_scores()
    scale, shift = calibrate_shifts(scores, owner, 0.3).numpy()

    def loss(b: Array) -> float:
        return cross_entropy((scores.numpy() + b) / 0.3, owner.numpy()) + calibration.RIDGE * float(b @ b)

    assert scale.tolist() == [1, 1, 1]
    best = scipy.optimize.minimize(loss, np.zeros(3), tol=1e-10)
    np.testing.assert_allclose(shift, best.x, atol=1e-4)


def test_a_shift_undoes_a_task_that_boasts() -> None:
    scores, owner = task_scores()
    boast = torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64)
    _, shift = calibrate_shifts(scores + boast, owner, 0.3)
    assert shift[1] == shift.min() and ((scores + boast + shift).argmax(dim=1) == owner).double().mean() > 0.7
    assert calibrate_shifts(scores * torch.nan, owner, 0.3).tolist() == [[1, 1, 1], [0, 0, 0]]


def test_equal_shares_count_every_class_the_same() -> None:
    classes = torch.tensor([0] * 8 + [2] * 2)
    weights = equal_shares(classes)
    assert weights is not None
    assert weights.tolist() == [10 / (2 * 8)] * 8 + [10 / (2 * 2)] * 2
    assert equal_shares(torch.tensor([0, 0, 1, 1, 1])) is None  # a remainder
    assert equal_shares(torch.zeros(0, dtype=torch.long)) is None


@pytest.mark.parametrize(
    "fit", [calibrate_scores, lambda s, t, w=None: calibrate_shifts(s, t, 0.3, w), calibrate_together]
)
def test_weights_are_repetitions(fit: Callable[..., torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    tasks = torch.tensor([0] * 6 + [1] * 6 + [2] * 2)
    scores = torch.randn(14, 3, generator=generator, dtype=torch.float64) + F.one_hot(tasks, 3)
    again = torch.cat([torch.arange(12), torch.tensor([12, 13] * 3)])  # the last class as often as the others
    if fit is not calibrate_together:  # it standardises by all samples, counted once
        torch.testing.assert_close(fit(scores, tasks, equal_shares(tasks)), fit(scores[again], tasks[again]))
    assert float(fit(scores, tasks, equal_shares(tasks))[1, 2]) > float(fit(scores, tasks)[1, 2])
