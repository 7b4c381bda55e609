"""OpenMax against the formula written out per sample, with scipy's Weibull, and against its likelihood equation."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpl.scores import OpenMax
from tpl.scores.logits import fit_weibull

Array = NDArray[np.float64]


def data(n: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits of a good classifier: few samples are not recognised."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    return 2 * torch.randn(n, classes, generator=g) + 5 * torch.nn.functional.one_hot(y, classes), y


def fitted(logits: Tensor, y: Tensor, **options: int) -> OpenMax:
    return OpenMax(**options).fit_features(logits, logits, y)


def scores(score: OpenMax, logits: Tensor) -> Array:
    return score.score_features(logits, logits).numpy()


def by_hand(logits: Array, y: Array, queries: Array, alpha: int, tail: int) -> Array:
    classes = logits.shape[1]
    right = logits.argmax(axis=1) == y
    means, weibulls = [], []
    for c in range(classes):
        own = logits[right & (y == c)]
        means.append(own.mean(axis=0))
        largest = np.sort(np.linalg.norm(own - means[c], axis=1))[-tail:]
        location = largest.min() - 1000 * np.ptp(largest)
        weibulls.append(scipy.stats.weibull_min(*scipy.stats.weibull_min.fit(largest, floc=location)))
    found = []
    for f in queries:
        revised, unknown = f.copy(), 0.0
        for i, c in enumerate(np.argsort(-f)[:alpha], start=1):
            taken = f[c] * (alpha + 1 - i) / alpha * weibulls[c].cdf(np.linalg.norm(f - means[c]))
            revised[c] -= taken
            unknown += taken
        found.append(-scipy.special.softmax([*revised, unknown])[-1])
    return np.array(found)


@pytest.mark.parametrize(("classes", "alpha", "tail"), [(2, 2, 20), (3, 3, 20), (6, 3, 20), (6, 1, 5)])
def test_is_what_the_formula_says(classes: int, alpha: int, tail: int) -> None:
    logits, y = data(240, classes)
    queries = 2 * data(40, classes, seed=1)[0]
    expected = by_hand(logits.double().numpy(), y.numpy(), queries.double().numpy(), alpha, tail)
    found = scores(fitted(logits, y, alpha=alpha, tail=tail), queries)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.ptp(found) > 0.2


def test_more_ranks_than_classes_are_clipped() -> None:
    logits, y = data(80, 2)
    np.testing.assert_array_equal(scores(fitted(logits, y), logits), scores(fitted(logits, y, alpha=2), logits))


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("n", [2, 5, 100])
def test_the_weibull_solves_the_likelihood_equation(size: float, n: int) -> None:
    distances = size * np.abs(np.random.default_rng(n).normal(3, 1, n))
    fit = fit_weibull(torch.from_numpy(distances), 20)
    assert fit is not None
    shape, location, scale = fit
    logs = np.log(np.sort(distances)[-20:] - location)

    def slope(k: float) -> float:
        weights = scipy.special.softmax(k * logs)
        return float(weights @ logs - 1 / k - logs.mean())

    expected = scipy.optimize.brentq(slope, 1, 1e9)
    assert shape == pytest.approx(expected, rel=1e-3)
    log_scale = (scipy.special.logsumexp(expected * logs) - np.log(len(logs))) / expected
    assert np.log(scale) == pytest.approx(log_scale, abs=1e-3 / expected)  # an error in units of the tail's spread


def test_agrees_with_pytorch_ood() -> None:
    """libMR's translation by 10000 there, by 1000 spreads of the tail here: both are far."""
    detector = pytest.importorskip("pytorch_ood.detector")
    logits, y = data(300, 4)
    right = logits.argmax(dim=1) == y
    logits, y, queries = logits[right], y[right], 2 * data(40, 4, seed=1)[0]
    theirs = detector.OpenMax(None, tailsize=20, alpha=3).fit_logits(logits, y).predict_logits(queries)
    np.testing.assert_allclose(scores(fitted(logits, y), queries), -theirs.numpy(), atol=5e-3)


def test_the_unit_of_the_logits_does_not_matter_to_the_weibull() -> None:
    logits, y = data(80, 3)
    plain, large = fitted(logits, y), fitted(64 * logits, y)
    np.testing.assert_allclose(plain.weibull_[0], large.weibull_[0], rtol=1e-6)
    np.testing.assert_allclose(64 * plain.weibull_[1:], large.weibull_[1:], rtol=1e-6)


def test_a_class_that_is_never_recognised_is_described_by_all_its_samples() -> None:
    logits, y = data(80, 2)
    logits[y == 1, 1] = logits[y == 1, 0] - 1
    score = fitted(logits, y)
    torch.testing.assert_close(score.means_[1], logits[y == 1].double().mean(dim=0))
    assert bool(score.weibull_.isfinite().all())


def test_a_class_with_too_few_samples_borrows_the_distances_of_all() -> None:
    logits, y = data(81, 3)
    few = torch.cat([torch.nonzero(y < 2).squeeze(1), torch.nonzero(y == 2)[0]])
    score = fitted(logits[few], y[few])
    logits, y = logits[few].double(), y[few]
    right = logits.argmax(dim=1) == y
    assert bool(right[-1])
    distances = (logits - score.means_[y]).norm(dim=1)[right]
    together = fit_weibull(distances, 20)
    assert tuple(score.weibull_[:, 2].tolist()) == together


def test_a_class_without_samples_is_never_exceeded() -> None:
    logits, y = data(80, 2)
    wide = torch.cat([logits, torch.full((80, 1), -9.0)], dim=1)
    assert fitted(wide, y).weibull_[:, 2].tolist() == [1, 0, torch.inf]
    queries = torch.tensor([[0.0, 0.0, 1e6]])
    assert scores(fitted(wide, y, alpha=1), queries).tolist() == [0]


@pytest.mark.parametrize("distances", [[], [3.0], [0.0, 0.0, 0.0], [2.0, 2.0], [2.0, 2.0 + 1e-14]])
def test_distances_that_do_not_differ_have_no_weibull(distances: list[float]) -> None:
    assert fit_weibull(torch.tensor(distances, dtype=torch.float64), 20) is None
