"""Class orders by name, by seed and from a file."""

import json
from pathlib import Path

import numpy as np
import pytest

from tpl.stream import DataError, class_order


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    content = {
        "toy": {
            "1": [2, 0, 1],
            "2": [1, 2, 0],
            "short": [0, 1],
            "twice": [0, 0, 1],
            "odd": [0, 1.5, 2],
            "text": "012",
        },
        "other": {"1": [0]},
    }
    path = tmp_path / "orders.json"
    path.write_text(json.dumps(content))
    return path


def test_natural() -> None:
    assert class_order("natural", "toy", 4) == [0, 1, 2, 3]


def test_random_is_numpys_permutation() -> None:
    expected = np.random.default_rng(7).permutation(20).tolist()
    assert class_order("random:7", "toy", 20) == expected
    assert class_order(7, "toy", 20) == expected
    assert class_order("random:8", "toy", 20) != expected


def test_from_file(orders: Path) -> None:
    assert class_order(f"{orders}:1", "toy", 3) == [2, 0, 1]
    assert class_order(f"{orders}:2", "toy", 3) == [1, 2, 0]


@pytest.mark.parametrize("spec", ["", "sorted", "random", "random:", "orders.txt:1", "orders.json"])
def test_unknown_forms_list_the_known_ones(spec: str) -> None:
    with pytest.raises(DataError, match="natural.*random:SEED.*FILE.json:ID"):
        class_order(spec, "toy", 3)


@pytest.mark.parametrize("seed", ["x", "-1", "1.5"])
def test_bad_seed(seed: str) -> None:
    with pytest.raises(DataError, match="whole number"):
        class_order(f"random:{seed}", "toy", 3)


def test_unknown_file_data_set_and_id(orders: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no class-order file .*absent.json"):
        class_order(f"{tmp_path / 'absent.json'}:1", "toy", 3)
    with pytest.raises(DataError, match="'cifar10'; it has: other, toy"):
        class_order(f"{orders}:1", "cifar10", 10)
    with pytest.raises(DataError, match="'9'; it has: 1, 2, odd, short, text, twice"):
        class_order(f"{orders}:9", "toy", 3)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DataError, match="broken.json cannot be read as JSON"):
        class_order(f"{tmp_path / 'broken.json'}:1", "toy", 3)
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(DataError, match="it has: none"):
        class_order(f"{tmp_path / 'list.json'}:1", "toy", 3)


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        ("short", "2 entries for 3"),
        ("twice", "exactly once"),
        ("odd", "whole numbers"),
        ("text", "whole numbers"),
    ],
)
def test_orders_that_are_no_permutation(orders: Path, key: str, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        class_order(f"{orders}:{key}", "toy", 3)
