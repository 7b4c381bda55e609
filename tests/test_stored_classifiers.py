"""A classifier pickled by an earlier version still loads, answers as it did, and learns on; a fresh fit is the same."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from stored_classifiers import PLACE, answers, learned, learned_on

STORED = sorted(path.stem for path in PLACE.glob("*.pickle"))
EXACT = 1e-6  # answers are computed in double precision
ACROSS_MACHINES = 1e-3  # training is in single precision: rounding differs from CPU to CPU


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for name in ("classes", "arrived", "tasks"):
        assert found[name] == expected[name]
    for name in ("proba", "task_proba", "unknown"):
        for row, then in zip(found[name], expected[name], strict=True):
            assert row == pytest.approx(then, abs=tolerance)


@pytest.mark.parametrize("name", STORED)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.InconsistentVersionWarning")
def test_a_stored_classifier_answers_as_it_did_and_learns_on(name: str) -> None:
    expected = json.loads((PLACE / f"{name}.json").read_text(encoding="utf-8"))
    classifier = pickle.loads((PLACE / f"{name}.pickle").read_bytes())
    assert_same(answers(classifier), expected["stored"], EXACT)
    assert_same(answers(learned_on(classifier)), expected["later"], ACROSS_MACHINES)


@pytest.mark.parametrize("name", STORED)
def test_a_fresh_fit_answers_as_that_of_an_earlier_version(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bank, that is: earlier versions had no closed form beside it for few samples."""
    monkeypatch.setattr("tpl.methods.vectors.MANY_IMAGES", 0)
    expected = json.loads((PLACE / f"{name}.json").read_text(encoding="utf-8"))
    assert_same(answers(learned()), expected["stored"], ACROSS_MACHINES)


def test_there_is_a_stored_classifier() -> None:
    assert "0.1" in STORED
