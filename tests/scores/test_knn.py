"""kNN against scikit-learn's and against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import normalize
from torch import Tensor

from tpl.scores import NearestNeighbours, distances


def features(n: int, d: int = 12, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) * 3 + 0.5


def by_sklearn(bank: Tensor, z: Tensor, k: int) -> np.ndarray:
    neighbours = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(normalize(bank.double().numpy()))
    return np.asarray(neighbours.kneighbors(normalize(z.double().numpy()))[0][:, -1])


@pytest.mark.parametrize("k", [1, 5, 40])
def test_distances_are_those_of_scikit_learn(k: int) -> None:
    bank, z = features(40), features(25, seed=1)
    found = NearestNeighbours(k).remember(bank)
    np.testing.assert_allclose(found.distances(z).numpy(), by_sklearn(bank, z, k), rtol=1e-9)
    np.testing.assert_array_equal(found.score_features(z, z).numpy(), -found.distances(z).numpy())


def test_squared_is_the_square_of_l2() -> None:
    bank, z = features(40), features(25, seed=1)
    squared = NearestNeighbours(5, "squared").remember(bank).distances(z)
    torch.testing.assert_close(squared, NearestNeighbours(5, "l2").remember(bank).distances(z) ** 2)
    assert float(squared.min()) >= 0
    assert float(squared.max()) <= 4


def test_k_is_clipped_to_the_bank() -> None:
    bank, z = features(3), features(25, seed=1)
    np.testing.assert_allclose(
        NearestNeighbours(5).remember(bank).distances(z).numpy(), by_sklearn(bank, z, 3), rtol=1e-9
    )


def test_an_empty_bank_says_nothing() -> None:
    found = NearestNeighbours().remember(features(0)).distances(features(7))
    assert torch.equal(found, torch.zeros(7, dtype=torch.float64))


def test_no_queries_no_distances() -> None:
    assert NearestNeighbours().remember(features(9)).distances(features(0)).shape == (0,)


def test_fitting_remembers_the_tasks_own_features() -> None:
    bank, z = features(30), features(5, seed=1)
    fitted = NearestNeighbours().fit_features(bank, bank, torch.zeros(30), others=features(30, seed=2))
    np.testing.assert_allclose(fitted.distances(z).numpy(), by_sklearn(bank, z, 5), rtol=1e-9)
    assert torch.equal(NearestNeighbours().load_state(fitted.state()).distances(z), fitted.distances(z))


@pytest.mark.parametrize("distance", ["l2", "squared"])
@pytest.mark.parametrize(("size", "k"), [(20, 5), (20, 1), (4, 5), (2, 5)])
def test_skip_is_leaving_one_out(size: int, k: int, distance: str) -> None:
    bank = features(size)
    found = NearestNeighbours(k, distance).remember(bank).distances(bank, torch.arange(size))
    for i in range(size):
        rest = torch.cat([bank[:i], bank[i + 1 :]])
        expected = by_sklearn(rest, bank[i : i + 1], min(k, size - 1))[0]
        assert float(found[i]) == pytest.approx(expected if distance == "l2" else expected**2, rel=1e-9)


def test_skip_concerns_only_the_rows_that_name_one() -> None:
    bank, z = features(10), features(10, seed=1)
    both = torch.cat([z, bank[[7, 2]]])
    skip = torch.tensor([-1] * 10 + [7, 2])
    found = NearestNeighbours(1).remember(bank)
    mixed = found.distances(both, skip)
    torch.testing.assert_close(mixed[:10], found.distances(z))
    assert bool((found.distances(both)[10:] < 1e-6).all())  # without skip each finds itself
    for row, own in ((10, 7), (11, 2)):
        rest = torch.cat([bank[:own], bank[own + 1 :]])
        assert float(mixed[row]) == pytest.approx(by_sklearn(rest, bank[own : own + 1], 1)[0])


def test_alone_in_the_bank_there_is_nobody_else() -> None:
    bank = features(1)
    assert NearestNeighbours().remember(bank).distances(bank, torch.tensor([0])).tolist() == [0.0]


@pytest.mark.parametrize("rows", [8, 9, 17])
def test_blocks_do_not_show(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = features(rows)
    whole = NearestNeighbours(3).remember(bank).distances(bank, torch.arange(rows))
    monkeypatch.setattr(distances, "BLOCK", 8)
    torch.testing.assert_close(NearestNeighbours(3).remember(bank).distances(bank, torch.arange(rows)), whole)


def test_more_rows_than_one_block() -> None:
    bank, z = features(20, d=4), features(distances.BLOCK + 3, d=4, seed=1)
    np.testing.assert_allclose(
        NearestNeighbours(5).remember(bank).distances(z).numpy(), by_sklearn(bank, z, 5), rtol=1e-9
    )


def test_awkward_features_give_numbers() -> None:
    bank = torch.cat([features(5), torch.zeros(1, 12), features(5)])  # a zero vector, and duplicates
    z = torch.cat([bank, 1e30 * features(2), 1e-30 * features(2)])
    for k in (1, 5, 50):
        for distance in ("l2", "squared"):
            found = NearestNeighbours(k, distance).remember(bank).distances(z)
            assert bool(found.isfinite().all())
            assert bool((found >= 0).all())


@pytest.mark.parametrize("stored", [1, 3, 40])
def test_the_memory_takes_the_place_of_the_training_data(stored: int) -> None:
    z, queries = features(60).double(), features(15, seed=1).double()
    found = NearestNeighbours().fit_features(z, z, torch.zeros(60)).use_memory(z[:stored])
    angles = queries / queries.norm(dim=1, keepdim=True) @ (z[:stored] / z[:stored].norm(dim=1, keepdim=True)).T
    nearest = (2 - 2 * angles).sqrt().sort(dim=1).values  # |a - b|^2 = 2 - 2 a.b on the unit sphere
    torch.testing.assert_close(found.score_features(queries, queries), -nearest[:, min(5, stored) - 1])
    assert len(found.state()["bank_"]) == stored


def test_the_memory_of_the_last_call_counts() -> None:
    z, queries = features(60), features(15, seed=1)
    found = NearestNeighbours().use_memory(z[:20]).use_memory(z[20:30])
    expected = NearestNeighbours().remember(z[20:30])
    assert torch.equal(found.score_features(queries, queries), expected.score_features(queries, queries))


def test_an_empty_memory_says_nothing() -> None:
    z = features(9)
    assert NearestNeighbours().use_memory(z[:0]).score_features(z, z).tolist() == [0.0] * 9
