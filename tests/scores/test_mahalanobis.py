"""MD against scikit-learn's covariance, and on data that offers no covariance to speak of."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.covariance import OAS, EmpiricalCovariance
from torch import Tensor

from tpl.scores import Mahalanobis
from tpl.scores.distances import NEAREST, TILE, mirror, packed, unpacked

Array = NDArray[np.float64]


def data(n: int = 400, d: int = 8, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Correlated Gaussian classes of unequal sizes."""
    g = torch.Generator().manual_seed(seed)
    mixing = torch.randn(d, d, generator=g, dtype=torch.float64)
    y = (torch.arange(n) ** 2) % 7 % classes
    centres = 3 * torch.randn(classes, d, generator=g, dtype=torch.float64)
    return centres[y] + torch.randn(n, d, generator=g, dtype=torch.float64) @ mixing, y


def fitted(z: Tensor, y: Tensor, shrinkage: str = "none") -> Mahalanobis:
    return Mahalanobis(shrinkage).fit_features(z, z, y)


def by_sklearn(estimator: type[EmpiricalCovariance], z: Tensor, y: Tensor, queries: Tensor) -> Array:
    """Squared distances of `queries` to every class mean, one row after the other."""
    features, labels = z.double().numpy(), y.numpy()
    means = np.stack([features[labels == c].mean(axis=0) for c in np.unique(labels)])
    centred = np.concatenate([features[labels == c] - m for c, m in zip(np.unique(labels), means, strict=True)])
    precision = estimator(assume_centered=True).fit(centred).precision_
    rows = [[(q - m) @ precision @ (q - m) for m in means] for q in queries.double().numpy()]
    return np.array(rows)


@pytest.mark.parametrize(("shrinkage", "estimator"), [("none", EmpiricalCovariance), ("oas", OAS)])
def test_distances_are_those_of_scikit_learn(shrinkage: str, estimator: type[EmpiricalCovariance]) -> None:
    z, y = data()
    queries = data(seed=1)[0][:50]
    expected = by_sklearn(estimator, z, y, queries)
    md = fitted(z, y, shrinkage)
    np.testing.assert_allclose(md.distances(queries).numpy(), expected, rtol=1e-8)
    np.testing.assert_allclose(md.score_features(queries, queries).numpy(), 1 / expected.min(axis=1), rtol=1e-8)


def test_agrees_with_scikit_learns_own_distance() -> None:
    z, y = data(classes=1)
    estimator = EmpiricalCovariance().fit(z.numpy())
    np.testing.assert_allclose(fitted(z, y).distances(z)[:, 0], estimator.mahalanobis(z.numpy()), rtol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_mean_distance_to_the_own_centre_is_the_feature_size(dtype: torch.dtype) -> None:
    z, y = data(n=600, d=24)
    distances = fitted(z.to(dtype), y).distances(z.to(dtype))
    assert float(distances[torch.arange(600), y].mean()) == pytest.approx(24, rel=1e-3)


def test_auto_takes_the_plain_covariance_only_where_samples_abound() -> None:
    z, y = data(n=100, d=20)
    assert torch.equal(fitted(z, y, "auto").whitening_, fitted(z, y, "none").whitening_)
    assert torch.equal(fitted(z[:99], y[:99], "auto").whitening_, fitted(z[:99], y[:99], "oas").whitening_)
    assert not torch.allclose(fitted(z, y, "none").whitening_, fitted(z, y, "oas").whitening_)


def test_does_not_depend_on_scale_shift_or_basis_of_the_features() -> None:
    z, y = data()
    q = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64))[0]
    moved = 1e-3 * z @ q + 7
    torch.testing.assert_close(fitted(moved, y).distances(moved), fitted(z, y).distances(z), rtol=1e-6, atol=1e-9)


def test_score_is_higher_near_the_centres_and_bounded_on_them() -> None:
    z, y = data()
    md = fitted(z, y)
    centre = torch.stack([z[y == c].mean(dim=0) for c in range(3)])
    on, near, far = (md.score_features(centre + step, centre) for step in (0.0, 2.0, 40.0))
    torch.testing.assert_close(on, torch.full((3,), 1 / (NEAREST * 8), dtype=torch.float64))
    assert bool((on > near).all())
    assert bool((near > far).all())


def constant() -> tuple[Tensor, Tensor]:
    return torch.full((20, 5), 2.5), torch.arange(20) % 2


def partly_constant() -> tuple[Tensor, Tensor]:
    z, y = data()
    z[:, 3] = 1.0
    return z, y


def one_per_class() -> tuple[Tensor, Tensor]:
    return data(n=6)[0], torch.arange(6)


def fewer_than_dimensions() -> tuple[Tensor, Tensor]:
    return data(n=10, d=32)


def single_sample() -> tuple[Tensor, Tensor]:
    return torch.ones(1, 4), torch.zeros(1, dtype=torch.long)


def single_dimension() -> tuple[Tensor, Tensor]:
    return data(n=30, d=1)


def huge() -> tuple[Tensor, Tensor]:
    z, y = data()
    return (1e15 * z).float(), y


@pytest.mark.parametrize(("n", "used"), [(39, "oas"), (40, "none")])
def test_the_estimator_that_auto_took_can_be_told(n: int, used: str) -> None:
    """Five samples per dimension are enough, of eight dimensions."""
    z, y = data(n=n)
    score = fitted(z, y, "auto")
    assert score.estimator == used
    torch.testing.assert_close(score.distances(z), fitted(z, y, used).distances(z))
    stored = Mahalanobis("auto").load_state(score.state())
    assert stored.estimator == used
    assert fitted(z, y, "none").estimator == "none" and fitted(z, y, "oas").estimator == "oas"
    assert Mahalanobis(0.2).fit_features(z, z, y).estimator == "0.2"
    assert fitted(*data(n=20), "auto").merge(z, y).estimator == "none"


DEGENERATE = [
    constant,
    partly_constant,
    one_per_class,
    fewer_than_dimensions,
    single_sample,
    single_dimension,
    huge,
]


@pytest.mark.parametrize("shrinkage", ["none", "oas", "auto"])
@pytest.mark.parametrize("make", DEGENERATE)
def test_degenerate_data_give_finite_positive_scores(make: object, shrinkage: str) -> None:
    z, y = make()  # type: ignore[operator]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn remarks on a single sample
        md = fitted(z, y, shrinkage)
    queries = torch.cat([z, z + 1, -100 * z, torch.zeros_like(z[:1])])
    scores = md.score_features(queries, queries)
    assert scores.dtype == torch.float64
    assert bool(scores.isfinite().all())
    assert bool((scores > 0).all())
    # Training samples may not look stranger than what lies far away.
    assert float(scores[: len(z)].min()) >= float(md.score_features(z + 1e6 * z.abs().max(), z).max())


def test_directions_without_variance_count_against_a_sample() -> None:
    z, y = partly_constant()
    md = fitted(z, y)
    off = torch.zeros(8, dtype=torch.float64)
    off[3] = 1.0
    assert bool((md.score_features(z + off, z) < 1e-2 * md.score_features(z, z)).all())


def test_a_class_without_samples_makes_no_centre() -> None:
    z, y = data()
    gap = torch.where(y == 2, 5, y)  # classes 2, 3 and 4 are absent
    queries = torch.cat([z, torch.zeros(1, 8, dtype=torch.float64)])  # an empty class's sum is zero
    torch.testing.assert_close(
        fitted(z, gap).score_features(queries, queries), fitted(z, y).score_features(queries, queries)
    )


def test_float32_features_cost_no_precision_beyond_their_own() -> None:
    z, y = data(n=500, d=16)
    single = z.float()
    torch.testing.assert_close(
        fitted(single, y).distances(single), fitted(single.double(), y).distances(single.double())
    )


def test_state_is_all_that_scoring_needs() -> None:
    z, y = data()
    md = fitted(z, y)
    again = Mahalanobis().load_state(md.state())
    assert torch.equal(again.score_features(z, z), md.score_features(z, z))


@pytest.mark.parametrize("shrinkage", ["none", "oas", "auto"])
@pytest.mark.parametrize("first", [9, 30, 200])
def test_merged_statistics_are_those_of_all_samples_at_once(shrinkage: str, first: int) -> None:
    z, y = data(n=400)
    merged = fitted(z[:first], y[:first], shrinkage).merge(z[first:300], y[first:300]).merge(z[300:], y[300:])
    at_once = fitted(z, y, shrinkage)
    assert torch.equal(merged.counts_, at_once.counts_)
    for name in ("means_", "scatter_"):
        torch.testing.assert_close(getattr(merged, name), getattr(at_once, name), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(merged.distances(z), at_once.distances(z), rtol=1e-7, atol=1e-7)


def test_a_class_without_new_samples_keeps_its_centre() -> None:
    z, y = data(n=90)
    md = fitted(z, y)
    before = md.means_.clone()
    md.merge(z[y == 1] + 1, torch.ones(int((y == 1).sum()), dtype=torch.long))
    assert torch.equal(md.means_[[0, 2]], before[[0, 2]])
    torch.testing.assert_close(md.means_[1], before[1] + 0.5)


def test_what_began_with_one_sample_a_class_ends_as_if_all_had_come_at_once() -> None:
    """The spread that stood in for the missing one leaves no trace."""
    z, y = data(n=60)
    firsts = torch.stack([torch.nonzero(y == c)[0, 0] for c in range(3)])
    rest = torch.ones(60, dtype=torch.bool)
    rest[firsts] = False
    merged = fitted(z[firsts], y[firsts]).merge(z[rest], y[rest])
    torch.testing.assert_close(merged.distances(z), fitted(z, y).distances(z), rtol=1e-7, atol=1e-7)


def test_a_forgotten_class_leaves_the_others_distances_as_they_were() -> None:
    z, y = data(n=90)
    md = fitted(z, y)
    before = md.distances(z)
    torch.testing.assert_close(md.forget(1).distances(z), before[:, [0, 2]], rtol=1e-12, atol=0)
    md.merge(z[y == 2], torch.ones(int((y == 2).sum()), dtype=torch.long))  # it goes on without it
    assert md.counts_.tolist() == [int((y == 0).sum()), 2 * int((y == 2).sum())]
    assert int(md.pooled_) == 90 + int((y == 2).sum())


@pytest.mark.parametrize("size", [1, 2, 7, TILE - 1, TILE, TILE + 1, 3 * TILE + 5])
def test_a_triangle_is_all_of_a_symmetric_matrix(size: int) -> None:
    rounded = torch.rand(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    whole = mirror(rounded.clone())
    for row in range(size):
        assert torch.equal(whole[row, row:], rounded[row, row:]) and torch.equal(whole[row:, row], rounded[row, row:])
    triangle = packed(whole)
    assert torch.equal(triangle, torch.cat([rounded[row, row:] for row in range(size)]))
    assert torch.equal(unpacked(triangle, size), whole)
    with pytest.raises(ValueError, match="does not fit"):
        unpacked(torch.cat([triangle, triangle[:1]]), size)
    with pytest.raises(ValueError, match="does not fit"):
        unpacked(triangle[1:], size)
