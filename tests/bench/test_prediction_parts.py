"""A run of tpl-plus also measures its expert alone and its bank alone, without training anything for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from small_encoder import SMALL_VIT
from tpl.bench.results import RunResult, summarise
from tpl.bench.run import execute
from tpl.bench.spec import RunSpec

OPTIONS = {"latent": 8, "epochs": 1, "memory": 20, "random_features": 64}
SPEC = RunSpec("digits-5t", "tpl-plus", SMALL_VIT, tasks=3, validation=0.5, options=OPTIONS, device="cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    place = tmp_path_factory.mktemp("parts") / "run"
    return place, execute(SPEC, place)


@pytest.mark.parametrize(
    ("part", "options"),
    [("expert", {"passes": "0"}), ("bank", {"expert_weight": 0.0, "expert_weighting": "fixed"})],
)
def test_a_part_is_the_method_without_the_other_one(
    run: tuple[Path, RunResult], part: str, options: dict[str, object], tmp_path: Path
) -> None:
    alone = execute(replace(SPEC, options=OPTIONS | options), tmp_path / part)
    found = run[1].parts()[part]
    for kind, matrix in alone.matrices.items():
        np.testing.assert_array_equal(found.matrices[kind], matrix)
    assert found.summary == {name: alone.summary[name] for name in found.summary}
    assert found.description["part"] == part


def test_parts_are_stored_with_the_run(run: tuple[Path, RunResult]) -> None:
    place, result = run
    again = RunResult.read(place)
    assert list(again.parts()) == ["expert", "bank"]
    for name, part in again.parts().items():
        np.testing.assert_array_equal(part.matrices["cil"], result.parts()[name].matrices["cil"])
    stage = place / "stages/000.json"
    old = json.loads(stage.read_text())
    stage.write_text(json.dumps({key: value for key, value in old.items() if key != "parts"}))
    assert summarise(place).parts() == {}  # begun by a version that did not measure them
    stage.write_text(json.dumps(old))


def test_other_methods_have_no_parts(tmp_path: Path) -> None:
    known = {name: value for name, value in OPTIONS.items() if name != "random_features"}
    result = execute(replace(SPEC, method="tpl", options=known, tasks=2), tmp_path / "run")
    assert result.parts() == {} and "parts" not in json.loads((tmp_path / "run/results.json").read_text())
