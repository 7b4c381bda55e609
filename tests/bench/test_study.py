"""The detector study: one bank for all post-hoc detectors, one run a technique, resumable, and its picture."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from small_encoder import SMALL_VIT
from tpl.bench.metrics import line_through
from tpl.bench.results import RunResult
from tpl.bench.spec import RunSpec
from tpl.bench.study import ALL, MEASURED, paper_numbers, study
from tpl.errors import TplError
from tpl.report.pictures import draw_correlation
from tpl.scores import DETECTORS

OPTIONS = {"latent": 16, "epochs": 1, "batch_size": 32, "memory": 40}
SPEC = RunSpec("digits-5t", "hat", SMALL_VIT, tasks=2, device="cpu", options=OPTIONS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("study")
    study(SPEC, ["natural"], out, ["msp", "odin", "knn", "mixup"])
    return out


def test_post_hoc_detectors_share_a_run_and_techniques_have_their_own(place: Path) -> None:
    found = json.loads((place / "study.json").read_text())
    assert found["runs"] == ["mixup/natural", "none/natural"]
    assert [row["detector"] for row in found["rows"]] == ["msp", "odin", "knn", "mixup"]
    til = {row["detector"]: row["til"] for row in found["rows"]}
    assert til["msp"] == til["knn"] == til["odin"]  # the detector chooses the task, not the class within it
    assert all(row["paper"] is None for row in found["rows"])  # the paper has no digits


def test_numbers_of_msp_are_those_of_the_run_itself(place: Path) -> None:
    row = json.loads((place / "study.json").read_text())["rows"][0]
    summary = RunResult.read(place / "none" / "natural").summary
    assert row["last"] == pytest.approx(100 * summary["last"])
    assert row["til"] == pytest.approx(100 * summary["til"])
    assert row["auroc"] == pytest.approx(100 * summary["detection"]["auroc_pooled"])


def test_what_is_finished_is_not_trained_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (place / "none" / "natural" / "results.json").stat().st_mtime_ns
    monkeypatch.setattr("tpl.methods.bank.training.train", lambda *_: pytest.fail("trained again"))
    again = study(SPEC, ["natural"], place, ["msp", "mds"])
    assert [row["detector"] for row in again["rows"]] == ["msp", "mds"]
    assert (place / "none" / "natural" / "results.json").stat().st_mtime_ns == before


def test_what_is_measured_is_not_measured_again_and_needs_no_model(place: Path, tmp_path: Path) -> None:
    names = ["msp", "odin", "knn", "mixup"]
    before = study(SPEC, ["natural"], place, names)
    shutil.copytree(place, tmp_path / "copy", ignore=shutil.ignore_patterns("model", "outputs", "study.json"))
    assert study(SPEC, ["natural"], tmp_path / "copy", names) == before


@pytest.mark.parametrize(
    "content", ["", "[]", '{"detectors": 3}', "another run", "half a row", "no number", "too large", "too deep"]
)
def test_numbers_that_do_not_belong_to_the_run_are_measured_again(place: Path, tmp_path: Path, content: str) -> None:
    shutil.copytree(place / "none", tmp_path / "none")
    file = tmp_path / "none" / "natural" / "detectors.json"
    stored = json.loads(file.read_text())
    if content == "another run":
        stored |= {"results_sha256": 64 * "0", "detectors": {"msp": dict.fromkeys(MEASURED, 0.5)}}
        content = json.dumps(stored)
    elif content == "half a row":
        content = json.dumps(stored | {"detectors": {"msp": {"last": 0.5}}})
    elif content in ("no number", "too large"):
        value = float("nan") if content == "no number" else 10**400  # more than a float can hold
        content = json.dumps(stored | {"detectors": {"msp": dict.fromkeys(MEASURED, value)}})
    elif content == "too deep":
        content = 100_000 * "["
    file.write_text(content)
    again = study(SPEC, ["natural"], tmp_path, ["msp"])
    assert again["rows"] == study(SPEC, ["natural"], place, ["msp"])["rows"]
    assert json.loads(file.read_text())["detectors"].keys() == {"msp"}


def test_the_picture_is_drawn_with_and_without_a_line(place: Path, tmp_path: Path) -> None:
    found = study(SPEC, ["natural"], place, ["msp", "knn", "mds"])
    assert found["fit"]["last"] is None or -1 <= found["fit"]["last"]["r"] <= 1
    draw_correlation(found, tmp_path / "line.svg")
    draw_correlation(found | {"fit": {"last": None}, "rows": found["rows"][:1]}, tmp_path / "point.png")
    assert "knn" in (tmp_path / "line.svg").read_text() or (tmp_path / "line.svg").stat().st_size > 1000
    assert (tmp_path / "point.png").stat().st_size > 1000


def test_the_line_is_that_of_least_squares() -> None:
    rows = [{"auroc": x, "last": 2 * x - 30 + e} for x, e in ((80, 1), (85, -1), (90, 0.5), (95, 0))]
    fit = line_through(rows, "last")
    assert fit is not None
    x, y = np.array([[r["auroc"], r["last"]] for r in rows]).T
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    assert fit["slope"] == pytest.approx(slope) and fit["r"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert line_through(rows[:2], "last") is None


def test_every_detector_of_the_paper_has_its_printed_row() -> None:
    printed = {name: paper_numbers(name, "c100-10t") for name in ALL}
    assert len(ALL) == 20 and len(DETECTORS) == 12
    assert all(found and set(found) == {"last", "auroc", "til"} for found in printed.values())
    fit = line_through([found for found in printed.values() if found], "last")
    assert fit is not None and fit["r"] == pytest.approx(0.811, abs=0.02)  # the paper's own figure


def test_an_unknown_detector_is_an_error_that_names_all(tmp_path: Path) -> None:
    with pytest.raises(TplError, match=r"no detector 'nope'.*gradnorm.*cutmix"):
        study(SPEC, ["natural"], tmp_path, ["nope"])
