"""kNN as a detector: over the images that the task has stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tpl.scores import NearestNeighbours


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("stored", [1, 3, 40])
def test_the_memory_takes_the_place_of_the_training_data(stored: int) -> None:
    z, queries = normal(60, 6), normal(15, 6, seed=1)
    found = NearestNeighbours().fit_features(z, z, torch.zeros(60)).use_memory(z[:stored])
    angles = queries / queries.norm(dim=1, keepdim=True) @ (z[:stored] / z[:stored].norm(dim=1, keepdim=True)).T
    nearest = (2 - 2 * angles).sqrt().sort(dim=1).values  # |a - b|^2 = 2 - 2 a.b on the unit sphere
    torch.testing.assert_close(found.score_features(queries, queries), -nearest[:, min(5, stored) - 1])
    assert len(found.state()["bank_"]) == stored


def test_the_memory_of_the_last_call_counts() -> None:
    z, queries = normal(60, 6), normal(15, 6, seed=1)
    found = NearestNeighbours().use_memory(z[:20]).use_memory(z[20:30])
    expected = NearestNeighbours().remember(z[20:30])
    assert torch.equal(found.score_features(queries, queries), expected.score_features(queries, queries))


def test_an_empty_memory_says_nothing() -> None:
    z = normal(9, 6)
    assert NearestNeighbours().use_memory(z[:0]).score_features(z, z).tolist() == [0.0] * 9
