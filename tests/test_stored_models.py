"""Models of earlier versions, learned on another machine, still load, answer as they did, and learn on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from handwriting import digits
from stored_models import PLACE, PROBE
from tpl import Learner, Task

STORED = sorted(folder.name for folder in PLACE.iterdir())
ACROSS_MACHINES = 1e-3  # what is promised of probabilities on another CPU, or with another number of threads


@pytest.mark.parametrize("name", STORED)
def test_a_stored_model_answers_as_it_did(name: str, tmp_path: Path) -> None:
    shutil.copytree(PLACE / name / "model", tmp_path / "model")
    expected = json.loads((PLACE / name / "answers.json").read_text(encoding="utf-8"))
    learner = Learner.load(tmp_path / "model", device="cpu")
    assert learner.classes_ == expected["classes"]
    found = [answer.to_dict() for answer in learner.answers(PROBE, top=6)]
    for answer, then in zip(found, expected["answers"], strict=True):
        assert answer["unknown"] == pytest.approx(then["unknown"], abs=ACROSS_MACHINES)
        probabilities = {entry["class"]: entry["probability"] for entry in then["top"]}
        assert {entry["class"]: entry["probability"] for entry in answer["top"]} == pytest.approx(
            probabilities, abs=ACROSS_MACHINES
        )
    learner.learn(Task("task 3", ("six", "seven"), digits([6, 7], 12)))
    learner.save(tmp_path / "model")
    assert Learner.load(tmp_path / "model", device="cpu").classes_[-2:] == ["six", "seven"]


def test_both_kinds_of_model_are_kept() -> None:
    assert {"0.1-tpl", "0.1-tpl-plus"} <= set(STORED)
