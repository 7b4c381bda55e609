"""What all twelve post-hoc detectors share, whatever they compute."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import safetensors.torch
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from torch import Tensor

from tpl.scores import DETECTORS, SCORES, Score

ORDER = ["gradnorm", "klm", "openmax", "odin", "msp", "mls", "ebo", "react", "knn", "residual", "mds", "vim"]

every_detector = pytest.mark.parametrize("name", ORDER)


@dataclass(frozen=True)
class Problem:
    """A task's features and labels, and the head that is to tell its classes apart."""

    z: Tensor
    y: Tensor
    weight: Tensor
    bias: Tensor

    def fitted(self, name: str) -> Score:
        score = DETECTORS[name]().use_head(self.weight, self.bias)
        return score.fit_features(self.z, self.logits(self.z), self.y)

    def logits(self, z: Tensor) -> Tensor:
        return z @ self.weight.T + self.bias

    def scores(self, score: Score, z: Tensor) -> Tensor:
        return scored(score, z, self.logits(z))


def scored(score: Score, z: Tensor, logits: Tensor) -> Tensor:
    """No image here to perturb: the logits of the clean one stand in for those of the perturbed one."""
    return score.score_features(logits if getattr(score, "perturbs", False) else z, logits)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes_of(n: int, classes: int, d: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gaussian classes around orthogonal centres, all equally long."""
    y = torch.arange(n) % classes
    return normal(n, d, seed=seed) + 6 * centres(d)[y], y


def centres(d: int) -> Tensor:
    return torch.linalg.qr(normal(d, d, seed=99)).Q


def easy() -> Problem:
    z, y = classes_of(400, 4)
    head = LogisticRegression(max_iter=1000).fit(z.numpy(), y.numpy())
    return Problem(z, y, torch.from_numpy(head.coef_).float(), torch.from_numpy(head.intercept_).float())


def two_classes() -> Problem:
    z, y = classes_of(60, 2)
    return Problem(z, y, normal(2, 16, seed=5), normal(2, seed=6))


def constant_features() -> Problem:
    return Problem(torch.full((20, 6), 2.5), torch.arange(20) % 2, normal(2, 6), normal(2))


def zero_features_and_head() -> Problem:
    return Problem(torch.zeros(20, 6), torch.arange(20) % 2, torch.zeros(2, 6), torch.zeros(2))


def one_sample_per_class() -> Problem:
    return Problem(normal(5, 8), torch.arange(5), normal(5, 8, seed=1), normal(5, seed=2))


def one_sample_in_all() -> Problem:
    return Problem(normal(1, 8), torch.zeros(1, dtype=torch.long), normal(3, 8, seed=1), normal(3, seed=2))


def one_class() -> Problem:
    return Problem(normal(30, 8), torch.zeros(30, dtype=torch.long), normal(1, 8, seed=1), normal(1, seed=2))


def a_class_never_predicted() -> Problem:
    z, y = classes_of(60, 3)
    return Problem(z, y, normal(3, 16, seed=1), torch.tensor([0.0, 0.0, -1e4]))


def a_class_never_seen() -> Problem:
    z, y = classes_of(60, 3)
    return Problem(z, y, normal(4, 16, seed=1), normal(4, seed=2))


def fewer_samples_than_dimensions() -> Problem:
    z, y = classes_of(12, 3, d=32)
    return Problem(z, y, normal(3, 32, seed=1), normal(3, seed=2))


DEGENERATE = [
    two_classes,
    constant_features,
    zero_features_and_head,
    one_sample_per_class,
    one_sample_in_all,
    one_class,
    a_class_never_predicted,
    a_class_never_seen,
    fewer_samples_than_dimensions,
]


def test_the_detectors_are_those_of_the_paper_in_its_order() -> None:
    assert list(DETECTORS) == ORDER
    assert set(SCORES) == {"tpl", "md", *ORDER}
    for name, score in SCORES.items():
        assert score.name == name
        assert score.summary


@every_detector
def test_defaults_are_enough(name: str) -> None:
    parameters = inspect.signature(DETECTORS[name]).parameters.values()
    assert all(p.default is not p.empty for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    assert DETECTORS[name]().state() == {}


@every_detector
@pytest.mark.parametrize("make", DEGENERATE)
def test_degenerate_data_give_finite_scores(make: Callable[[], Problem], name: str) -> None:
    problem = make()
    queries = torch.cat([problem.z, problem.z + 1, -100 * problem.z, torch.zeros_like(problem.z[:1])])
    scores = problem.scores(problem.fitted(name), queries)
    assert scores.dtype == torch.float64
    assert scores.shape == (len(queries),)
    assert bool(scores.isfinite().all())


@every_detector
def test_no_samples_no_scores(name: str) -> None:
    problem = easy()
    assert problem.scores(problem.fitted(name), problem.z[:0]).shape == (0,)


@every_detector
def test_state_head_and_memory_restore_the_score_bit_for_bit(name: str) -> None:
    problem, queries = easy(), 3 * normal(40, 16, seed=1)
    memory = problem.z[::9]
    score = problem.fitted(name).use_memory(memory)
    stored = safetensors.torch.load(safetensors.torch.save(score.state()))
    again = DETECTORS[name]().load_state(stored).use_head(problem.weight, problem.bias).use_memory(memory)
    assert torch.equal(problem.scores(again, queries), problem.scores(score, queries))


@every_detector
@pytest.mark.parametrize("make", [easy, two_classes, fewer_samples_than_dimensions])
def test_a_row_does_not_depend_on_the_others(make: Callable[[], Problem], name: str) -> None:
    problem = make()
    score = problem.fitted(name)
    queries = 3 * normal(20, problem.z.shape[1], seed=1)
    logits = problem.logits(queries)
    alone = torch.cat([scored(score, queries[i : i + 1], logits[i : i + 1]) for i in range(20)])
    # Not bit for bit: matrix products of other sizes add up in another order.
    torch.testing.assert_close(scored(score, queries, logits), alone, rtol=1e-9, atol=1e-9)


@every_detector
def test_samples_of_the_task_score_higher_than_others(name: str) -> None:
    """The others are as long as the task's, around centres of their own.

    As long, because GradNorm multiplies by the length and would prefer anything far from the origin. Orthogonal to the
    task's centres, because far along one of them the logits are large: a clear case to all scores of logits.
    """
    problem, y = easy(), torch.arange(100) % 4
    inside, outside = classes_of(100, 4, seed=1)[0], normal(100, 16, seed=2) + 6 * centres(16)[8 + y]
    score = problem.fitted(name).use_memory(problem.z[::9])
    scores = torch.cat([problem.scores(score, z) for z in (inside, outside)])
    assert roc_auc_score([1] * 100 + [0] * 100, scores.numpy()) > 0.9
