"""Densities in the plane: against scikit-learn's PCA, and against Gaussians whose overlap is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.decomposition import PCA

from tpl.bench.densities import ENOUGH, densities, evenly, project
from tpl.errors import TplError

RNG = np.random.default_rng


def sides(apart: float, n: int = 1500, dimensions: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Two round Gaussians, their centres so far apart."""
    points = RNG(0).normal(size=(2 * n, dimensions))
    mine = np.arange(2 * n) < n
    points[mine, 0] += apart
    return points, mine


def test_the_plane_is_that_of_pca_where_both_sides_are_alike_in_number() -> None:
    features = RNG(1).normal(size=(60, 7)) * np.arange(1, 8)
    points, explained = project(features, np.arange(60) % 2 == 0)
    pca = PCA(2).fit(features)
    expected = pca.transform(features)
    for ours, theirs in zip(points.T, expected.T, strict=True):
        assert min(np.abs(ours - theirs).max(), np.abs(ours + theirs).max()) < 1e-8
    assert explained == pytest.approx(pca.explained_variance_ratio_.sum())


def test_either_side_counts_for_half() -> None:
    few, many = RNG(2).normal(size=(10, 5)), RNG(3).normal(size=(40, 5)) * 2
    mine = np.arange(50) < 10
    points, explained = project(np.concatenate([few, many]), mine)
    repeated = np.concatenate([few, few, few, few, many])
    again, alike = project(repeated, np.arange(80) < 40)
    assert explained == pytest.approx(alike)
    assert points[mine] == pytest.approx(again[:10])


@pytest.mark.parametrize("apart", [0.0, 1.0, 2.0, 6.0])
def test_the_overlap_of_two_gaussians(apart: float) -> None:
    found = densities(*sides(apart), task=1, classes=("a",))
    exact = math.erfc(apart / 2 / math.sqrt(2))  # 2 Phi(-apart / 2)
    assert found.overlap == pytest.approx(exact, abs=0.08)  # 1500 points a side
    assert found.explained == pytest.approx(1)
    numbers = found.numbers()
    assert (numbers["own_images"], numbers["other_images"]) == (1500, 1500)


def test_a_contour_holds_its_share_of_the_points() -> None:
    found = densities(*sides(3.0), task=1, classes=("a",))
    x, y = found.own.points.T
    column, row = (np.abs(axis[:, None] - at).argmin(axis=0) for axis, at in ((found.x, x), (found.y, y)))
    at_points = found.own.values[row, column]
    for share in (0.9, 0.5, 0.1):
        assert (at_points >= found.own.level(share)).mean() == pytest.approx(share, abs=0.06)
    assert found.own.values.sum() == pytest.approx(1)


def test_many_images_are_thinned_out_evenly() -> None:
    points = np.arange(10.0).reshape(5, 2)
    assert evenly(points, 9) is not points and (evenly(points, 9) == points).all()
    assert evenly(points, 3).tolist() == [[0, 1], [4, 5], [8, 9]]
    features, mine = sides(2.0, n=ENOUGH + 500)
    assert densities(features, mine, 1, ("a",)).numbers()["own_images"] == ENOUGH + 500


def test_what_has_no_density_is_said() -> None:
    features, mine = sides(1.0, n=10)
    with pytest.raises(TplError, match="Task 3 or the others have 4 images here"):
        densities(features, np.arange(20) < 4, 3, ("a",))
    features[mine] = 1.0
    with pytest.raises(TplError, match="all alike in some direction"):
        densities(features, mine, 3, ("a",))
