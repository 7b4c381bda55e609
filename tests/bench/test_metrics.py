"""Metrics against numbers worked out by hand, and AUROC against counting pairs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tpl.bench import metrics

NAN = np.nan
MATRIX = np.array([[0.9, NAN, NAN], [0.8, 0.6, NAN], [0.5, 0.4, 1.0]])
JOINT = np.array([[0.9, NAN, NAN], [0.9, 0.8, NAN], [0.7, 0.7, 0.9]])
EQUAL, UNEQUAL = [20, 20, 20], [10, 30, 60]


def test_accuracy_so_far_counts_images() -> None:
    np.testing.assert_allclose(metrics.accuracy_so_far(MATRIX, EQUAL), [0.9, 0.7, 1.9 / 3])
    # 8 + 18 of 40 images; then 5 + 12 + 60 of 100.
    np.testing.assert_allclose(metrics.accuracy_so_far(MATRIX, UNEQUAL), [0.9, 26 / 40, 77 / 100])


def test_last_and_average_incremental_accuracy() -> None:
    assert metrics.last(MATRIX, EQUAL) == pytest.approx(1.9 / 3)
    assert metrics.last(MATRIX, UNEQUAL) == pytest.approx(0.77)
    assert metrics.average_incremental(MATRIX, EQUAL) == pytest.approx((0.9 + 0.7 + 1.9 / 3) / 3)
    assert metrics.average_incremental(MATRIX, UNEQUAL) == pytest.approx((0.9 + 0.65 + 0.77) / 3)


def test_classic_forgetting() -> None:
    assert metrics.classic_forgetting(MATRIX) == pytest.approx(((0.9 - 0.5) + (0.6 - 0.4)) / 2)
    assert metrics.classic_forgetting(np.array([[0.7]])) == 0.0
    better = np.array([[0.5, NAN], [0.7, 0.9]])
    assert metrics.classic_forgetting(better) == pytest.approx(-0.2)  # a task can gain


def test_rectified_forgetting() -> None:
    stages = metrics.rectified_forgetting_per_stage(MATRIX, JOINT)
    np.testing.assert_allclose(stages, [0.0, (0.1 + 0.2) / 2, (0.2 + 0.3 - 0.1) / 3], atol=1e-12)
    assert metrics.rectified_forgetting_last(MATRIX, JOINT) == pytest.approx(0.4 / 3)
    assert metrics.rectified_forgetting_aia(MATRIX, JOINT) == pytest.approx((0.15 + 0.4 / 3) / 3)


def test_rectified_forgetting_is_the_gap_to_joint_training_for_equal_sizes() -> None:
    rng = np.random.default_rng(0)
    ours, joint = (np.where(np.tri(5, dtype=bool), rng.random((5, 5)), NAN) for _ in range(2))
    sizes = [50] * 5
    gap = metrics.last(joint, sizes) - metrics.last(ours, sizes)
    assert metrics.rectified_forgetting_last(ours, joint) == pytest.approx(gap)
    gap = metrics.average_incremental(joint, sizes) - metrics.average_incremental(ours, sizes)
    assert metrics.rectified_forgetting_aia(ours, joint) == pytest.approx(gap)
    assert metrics.rectified_forgetting_aia(joint, joint) == 0


def by_counting(inside: np.ndarray, outside: np.ndarray) -> float:
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in itertools.product(inside, outside)]
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize("seed", range(3))
def test_auroc_counts_pairs_ties_half(seed: int) -> None:
    rng = np.random.default_rng(seed)
    inside, outside = rng.integers(2, 9, 31) / 4.0, rng.integers(0, 7, 17) / 4.0
    assert len(np.intersect1d(inside, outside))  # there are ties
    assert metrics.auroc(inside, outside) == pytest.approx(by_counting(inside, outside))
    assert metrics.auroc(outside, inside) == pytest.approx(1 - by_counting(inside, outside))


def test_auroc_at_its_ends() -> None:
    low, high = np.array([0.0, 1.0]), np.array([2.0, 3.0])
    assert metrics.auroc(high, low) == 1
    assert metrics.auroc(low, high) == 0
    assert metrics.auroc(low, low) == 0.5


def test_false_positives_at_95_by_hand() -> None:
    inside = np.arange(1.0, 21.0)  # 19 of 20 lie at 2 or above: the threshold is 2, and 1 is given up
    assert metrics.false_positives_at_95(inside, np.array([0.0, 1.0, 1.9, 2.0, 50.0])) == pytest.approx(2 / 5)
    assert metrics.false_positives_at_95(inside, np.array([1.5, 1.0])) == 0.0
    # 19 of them need every one: 18 of 19 are but 94.7 %.
    assert metrics.false_positives_at_95(inside[:19], np.array([0.5, 1.0, 1.5])) == pytest.approx(2 / 3)
    # Tied scores are accepted together.
    assert metrics.false_positives_at_95(np.ones(20), np.array([1.0, 0.0])) == pytest.approx(1 / 2)


@pytest.mark.parametrize("seed", range(3))
def test_false_positives_at_95_against_trying_every_threshold(seed: int) -> None:
    rng = np.random.default_rng(seed)
    inside, outside = rng.normal(1, 1, 57).round(1), rng.normal(0, 1, 43).round(1)
    enough = [t for t in inside if (inside >= t).mean() >= 0.95]
    assert metrics.false_positives_at_95(inside, outside) == pytest.approx((outside >= max(enough)).mean())


def detection_data(sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    tasks = np.repeat(np.arange(len(sizes)), sizes)
    scores = rng.normal(0, 1, (len(tasks), len(sizes))) + np.linspace(0.3, 2, len(sizes)) * np.eye(len(sizes))[tasks]
    return scores + 5 * np.arange(len(sizes)), tasks  # columns far apart: only within a column may be compared


@pytest.mark.parametrize("sizes", [[20, 20, 20], [40, 10, 25]])
def test_detection_by_counting(sizes: list[int]) -> None:
    scores, tasks = detection_data(sizes)
    found = metrics.detection(scores, tasks)
    pairs = [by_counting(scores[tasks == j, j], scores[tasks == i, j]) for j, i in itertools.permutations(range(3), 2)]
    pooled = [by_counting(scores[tasks == j, j], scores[tasks != j, j]) for j in range(3)]
    fpr = [metrics.false_positives_at_95(scores[tasks == j, j], scores[tasks != j, j]) for j in range(3)]
    assert found["auroc_pairwise"] == pytest.approx(np.mean(pairs))
    assert found["auroc_pooled"] == pytest.approx(np.mean(pooled))
    assert found["fpr95"] == pytest.approx(np.mean(fpr))


def test_pairwise_is_pooled_for_equal_sizes_only() -> None:
    equal, unequal = (metrics.detection(*detection_data(sizes)) for sizes in ([20, 20, 20], [40, 10, 25]))
    assert equal["auroc_pairwise"] == pytest.approx(equal["auroc_pooled"])
    assert unequal["auroc_pairwise"] != pytest.approx(unequal["auroc_pooled"])


@pytest.mark.parametrize("seed", range(6))
def test_both_are_scikit_learns(seed: int) -> None:
    from sklearn.metrics import roc_auc_score, roc_curve

    rng = np.random.default_rng(seed)
    n, m = rng.integers(1, 90, 2)
    inside, outside = rng.normal(1, 1, n), rng.normal(0, 1, m)
    if seed % 2:  # with ties
        inside, outside = inside.round(1), outside.round(1)
    labels, scores = np.r_[np.ones(n), np.zeros(m)], np.r_[inside, outside]
    false, true, _ = roc_curve(labels, scores, drop_intermediate=False)
    assert metrics.auroc(inside, outside) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    expected = false[np.searchsorted(true, 0.95)]
    assert metrics.false_positives_at_95(inside, outside) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("digits", [1, 9])  # with ties, and without
def test_detection_is_the_mean_of_single_comparisons(digits: int) -> None:
    sizes = [31, 5, 20, 47, 1]
    scores, tasks = detection_data(sizes)
    scores = scores.round(digits)
    found = metrics.detection(scores, tasks)
    own = [scores[tasks == j, j] for j in range(5)]
    pairs = [metrics.auroc(own[j], scores[tasks == i, j]) for j, i in itertools.permutations(range(5), 2)]
    pooled = [metrics.auroc(own[j], scores[tasks != j, j]) for j in range(5)]
    fpr = [metrics.false_positives_at_95(own[j], scores[tasks != j, j]) for j in range(5)]
    expected = {"auroc_pairwise": np.mean(pairs), "auroc_pooled": np.mean(pooled), "fpr95": np.mean(fpr)}
    assert found == pytest.approx(expected, abs=1e-12)


def test_scores_that_cannot_be_ranked_are_refused() -> None:
    scores, tasks = detection_data([3, 3])
    for place in ((0, 0), (5, 0)):  # inside and outside
        broken = scores.copy()
        broken[place] = NAN
        with pytest.raises(ValueError, match="finite"):
            metrics.detection(broken, tasks)
