"""Ridge on random features: exact sums, whatever the order, and the closed form of scikit-learn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.linear_model import Ridge

from tpl.methods.parts.ridge import (
    LARGEST,
    SMALLEST,
    STRENGTHS,
    TEMPERATURES,
    RandomRidge,
    RidgeConfig,
    features_for,
    held_out_rows,
)

CPU = torch.device("cpu")


def problem(samples: int = 240, classes: int = 4, dim: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    y = torch.arange(samples) % classes
    return torch.randn(samples, dim, generator=g) + 2 * torch.randn(classes, dim, generator=g)[y], y


def ridge(dim: int = 12, width: int = 64, **options: Any) -> RandomRidge:
    config = RidgeConfig(random_features=width, **{"logit_adjustment": False} | options)
    return RandomRidge.drawn_for(torch.empty(0, dim), config, torch.Generator().manual_seed(1))


def restored(learned: RandomRidge) -> RandomRidge:
    return RandomRidge.from_state(learned.state(), learned.config)


def test_the_solution_is_that_of_ridge_regression() -> None:
    z, y = problem()
    ours = ridge()
    ours.strength = 1e-3
    ours.update(z, y)
    alpha = 1e-3 * float(ours.gram.diagonal().mean())
    target = torch.nn.functional.one_hot(y).double().numpy()
    theirs = Ridge(alpha=alpha, fit_intercept=False, solver="cholesky").fit(ours.hidden(z).numpy(), target)
    torch.testing.assert_close(ours.weights, torch.from_numpy(theirs.coef_.T), rtol=1e-6, atol=1e-8)


def test_sums_do_not_depend_on_the_order_or_size_of_parts() -> None:
    z, y = problem()
    whole, parts = ridge(), ridge()
    whole.update(z, y)
    for rows in torch.randperm(len(z), generator=torch.Generator().manual_seed(2)).split(37):
        parts.update(z[rows], y[rows])
    torch.testing.assert_close(whole.gram, parts.gram, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(whole.sums, parts.sums, rtol=1e-12, atol=1e-9)


def test_tasks_learned_one_by_one_classify_all_classes() -> None:
    z, y = problem()
    learned = ridge()
    for task in (0, 1):
        own = (y // 2) == task
        learned.learn(z[own], y[own], torch.Generator().manual_seed(task))
    assert learned.classes == 4
    assert float((learned.log_probabilities(z).argmax(dim=1) == y).double().mean()) > 0.9
    assert learned.strength in STRENGTHS and learned.temperature in TEMPERATURES


def left_out(ridge: RandomRidge, z: torch.Tensor, y: torch.Tensor, strength: float) -> torch.Tensor:
    """What a ridge of this strength says of each sample when it is fitted to all others."""
    hidden, target = ridge.hidden(z), torch.nn.functional.one_hot(y).double()
    eye = strength * float(ridge.gram.diagonal().mean()) * torch.eye(hidden.shape[1])
    others = [torch.arange(len(y)) != i for i in range(len(y))]
    weights = [torch.linalg.solve(hidden[o].T @ hidden[o] + eye, hidden[o].T @ target[o]) for o in others]
    return torch.stack([hidden[i] @ w for i, w in enumerate(weights)])


def test_leaving_one_out_is_leaving_it_out() -> None:
    z, y = problem(samples=60)
    whole = ridge(ridge_criterion="error")
    whole.learn_whole(z, y, z, y)
    target = torch.nn.functional.one_hot(y).double()
    errors = {s: float((left_out(whole, z, y, s) - target).square().mean()) for s in STRENGTHS}
    assert whole.strength == min(errors, key=lambda strength: errors[strength])
    penalty = whole.strength * float(whole.gram.diagonal().mean())
    solution = torch.linalg.solve(whole.gram + penalty * torch.eye(64), whole.sums)
    torch.testing.assert_close(whole.weights, solution, rtol=1e-6, atol=1e-8)


def test_many_classes_are_told_apart_by_the_ridge_with_the_smaller_entropy() -> None:
    z, y = problem(samples=400, classes=20)
    chosen = [ridge(width=256, ridge_criterion=criterion) for criterion in ("error", "entropy")]
    entropies = []
    for learned in chosen:
        learned.learn_whole(z, y, z, y)
        answers = left_out(learned, z, y, learned.strength)
        entropies.append([float(torch.nn.functional.cross_entropy(answers / t, y)) for t in TEMPERATURES])
        assert learned.temperature == TEMPERATURES[min(range(len(TEMPERATURES)), key=entropies[-1].__getitem__)]
    assert chosen[0].strength != chosen[1].strength
    assert min(entropies[1]) < min(entropies[0])


def test_the_strength_is_found_from_wherever_the_search_begins() -> None:
    z, y = problem(samples=120)
    found = set()
    for start in STRENGTHS:
        learned = ridge()
        learned.strength = start
        learned.learn_whole(z, y, z, y)
        found.add(learned.strength)
    assert len(found) == 1 and found < set(STRENGTHS[1:-1])


def test_classes_that_any_ridge_tells_apart_leave_the_choice_to_the_squared_error() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(80) % 2
    z = 10 * torch.randn(2, 12, generator=generator)[y] + torch.randn(80, 12, generator=generator)
    chosen = [ridge(ridge_criterion=criterion) for criterion in ("error", "entropy")]
    for learned in chosen:
        learned.learn_whole(z, y, z, y)
    assert chosen[0].strength == chosen[1].strength < STRENGTHS[-1]


def test_state_and_forgetting() -> None:
    z, y = problem()
    learned = ridge()
    learned.learn(z, y, torch.Generator().manual_seed(0))
    again = restored(learned)
    assert torch.equal(again.log_probabilities(z), learned.log_probabilities(z))
    learned.forget(1)
    assert learned.classes == 3 and learned.log_probabilities(z).shape[1] == 3
    assert set(learned.log_probabilities(z[y == 2]).argmax(dim=1).tolist()) == {1}  # later classes move up


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_very_small_tasks_give_finite_answers(samples: int) -> None:
    z, y = torch.ones(samples, 12), torch.zeros(samples, dtype=torch.long)
    learned = ridge()
    learned.learn(z, y, torch.Generator().manual_seed(0))
    assert learned.log_probabilities(z).isfinite().all()


def test_a_single_first_class_is_taken_up_whole() -> None:
    z, y = torch.randn(10, 12, generator=torch.Generator().manual_seed(0)), torch.zeros(10, dtype=torch.long)
    learned, whole = ridge(), ridge()
    learned.learn(z, y, torch.Generator().manual_seed(0))
    whole.update(z, y)
    torch.testing.assert_close(learned.gram, whole.gram)


def test_the_number_of_random_features_follows_the_first_task() -> None:
    assert features_for(1) == SMALLEST and features_for(1000) == 4000 and features_for(10**6) == LARGEST


def test_a_fifth_of_every_class_is_held_out_and_none_of_a_small_one() -> None:
    labels = torch.tensor([0] * 10 + [1] * 4 + [2] * 25)
    held = held_out_rows(labels, torch.Generator().manual_seed(0))
    assert [int(held[labels == c].sum()) for c in range(3)] == [2, 0, 5]


def test_even_takes_the_classes_numbers_out_of_the_answer() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(4).repeat(60)
    z = torch.randn(4, 12, generator=generator)[y] + 1.5 * torch.randn(240, 12, generator=generator)
    few = (y != 3) | (torch.arange(len(y)) >= 220)  # five of the last class
    plain, even = ridge(), ridge(logit_adjustment=True)
    for learned in (plain, even):
        learned.learn_whole(z[few], y[few], z[few], y[few])
    assert even.counts.tolist() == y[few].bincount().tolist()
    logits = torch.cat([even.hidden(z) @ even.weights]) / even.temperature - y[few].bincount().log()
    torch.testing.assert_close(even.log_probabilities(z), logits.log_softmax(dim=1))
    rare = y == 3
    right = [
        float((learned.log_probabilities(z).argmax(dim=1) == y)[rare].double().mean()) for learned in (plain, even)
    ]
    assert right[1] > right[0]
    again = restored(even)
    torch.testing.assert_close(again.log_probabilities(z), even.log_probabilities(z))
    even.forget(0)
    assert even.counts.tolist() == y[few].bincount()[1:].tolist()


def test_even_changes_nothing_where_classes_are_equally_many() -> None:
    z, y = problem()
    rows = torch.cat([torch.nonzero(y == c).squeeze(1)[:30] for c in range(4)])
    plain, even = ridge(), ridge(logit_adjustment=True)
    for learned in (plain, even):
        learned.learn_whole(z[rows], y[rows], z[rows], y[rows])
    torch.testing.assert_close(even.log_probabilities(z), plain.log_probabilities(z))


def test_models_of_early_versions_have_no_counts() -> None:
    learned = ridge()
    learned.update(*problem())
    state = learned.state()
    del state["counts"]
    again = RandomRidge.from_state(state, RidgeConfig())
    torch.testing.assert_close(again.log_probabilities(problem()[0]), learned.log_probabilities(problem()[0]))


def views_of(z: torch.Tensor) -> torch.Tensor:
    """Three views of 12-dimensional features side by side: the last is a smooth function of the others."""
    g = torch.Generator().manual_seed(5)
    first, second = (torch.randn(12, 10, generator=g) for _ in range(2))
    one, two = z @ first, torch.tanh(z @ second)
    return torch.cat([one, two, torch.tanh(0.3 * one + 0.5 * two)], dim=1)


def several(z: torch.Tensor) -> RandomRidge:
    config = RidgeConfig(random_features=256, logit_adjustment=False)
    return RandomRidge.drawn_for_views(z[:, :20].split(10, dim=1), config, torch.Generator().manual_seed(1), 4)


def with_late_view(stored: int) -> tuple[RandomRidge, RandomRidge, torch.Tensor]:
    """A ridge whose third view came with the last two of four classes, and one that had it from the start."""
    features, y = problem(samples=800)
    z = views_of(features)
    old, new = y < 2, y >= 2
    late = several(z)
    late.update(z[old, :20], y[old])
    kept = torch.cat([torch.nonzero(y == c).squeeze(1)[:stored] for c in (0, 1)])
    late.add_view(z[new], z[kept], y[kept], torch.Generator().manual_seed(2))
    late.update(z[new], y[new])
    whole = RandomRidge(late.projections, late.config)
    whole.update(z, y)
    return late, whole, z


def test_a_late_view_is_exact_where_all_old_samples_are_stored() -> None:
    late, whole, _ = with_late_view(stored=200)
    torch.testing.assert_close(late.gram, whole.gram, rtol=1e-8, atol=1e-6)
    torch.testing.assert_close(late.sums, whole.sums, rtol=1e-8, atol=1e-6)


def test_a_late_view_is_close_where_some_old_samples_are_stored() -> None:
    late, whole, z = with_late_view(stored=20)
    known = late.projections[0].shape[1] * 2
    torch.testing.assert_close(late.gram[:known, :known], whole.gram[:known, :known], rtol=1e-8, atol=1e-6)
    for mine, true in ((late.gram, whole.gram), (late.sums, whole.sums)):
        without = true.clone()
        without[known:] = 0  # what it would be had old samples not counted at all
        assert (mine - true).norm() < 0.1 * (without - true).norm()
    agree = late.log_probabilities(z).argmax(dim=1) == whole.log_probabilities(z).argmax(dim=1)
    assert agree.double().mean() > 0.97
    assert torch.equal(restored(late).log_probabilities(z), late.log_probabilities(z))


def test_columns_of_a_projection_are_orthogonal_in_groups() -> None:
    projection = several(torch.zeros(1, 30)).projections[0].double()
    group = torch.nn.functional.normalize(projection[:, :10], dim=0)
    torch.testing.assert_close(group.T @ group, torch.eye(10, dtype=torch.float64), rtol=0, atol=1e-6)
    assert not torch.equal(projection[:, 0], projection[:, 10])
