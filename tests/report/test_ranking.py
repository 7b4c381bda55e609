"""The order of methods against the paper's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_runs import found, make_run, write_run
from typer.testing import CliRunner

from tpl import cli
from tpl.bench.results import RunResult
from tpl.report import group_runs
from tpl.report.paper import ranking_of

# On C100-10T the paper has TPL 76.53, ROW 74.72, MORE 70.23, HAT 62.91, A-GEM 25.21.
LEVELS = {"tpl": 0.9, "row": 0.8, "more": 0.6, "hat": 0.7, "agem": 0.3}


def runs(benchmark: str = "c100-10t", encoder: str = "any", **levels: float) -> list[RunResult]:
    of = {"benchmark": benchmark, "encoder": {"name": encoder, "sha256": "e" * 64}}
    return [make_run(method, level, 0.05, **of) for method, level in levels.items()]


def test_places_and_correlation_by_hand() -> None:
    bounds = runs(joint=0.99, finetune=0.1, ranpac=0.95)  # two bounds, and a method that the paper has not
    ranking = ranking_of(group_runs(found(*runs(**LEVELS), *bounds))[0])
    assert ranking is not None
    assert [place.method for place in ranking.places] == ["tpl", "row", "hat", "more", "agem"]
    assert [place.our_place for place in ranking.places] == [1, 2, 3, 4, 5]
    assert [place.paper_place for place in ranking.places] == [1, 2, 4, 3, 5]
    assert ranking.places[0].paper == pytest.approx(0.7653)
    assert ranking.spearman == pytest.approx(1 - 6 * 2 / (5 * 24))  # 1 - 6 sum d^2 / (n (n^2 - 1))


def test_an_order_needs_a_table_enough_methods_and_one_setting_each() -> None:
    few = dict(list(LEVELS.items())[:3])
    assert ranking_of(group_runs(found(*runs(**few)))[0]) is None
    assert ranking_of(group_runs(found(*runs("made-up", **LEVELS)))[0]) is None
    again = make_run("tpl", 0.1, 0.0, benchmark="c100-10t", encoder={"name": "any"}, options={"lr": 9.0})
    ranking = ranking_of(group_runs(found(*runs(**LEVELS), again))[0])
    assert ranking is not None and "tpl" not in {place.method for place in ranking.places}


def test_networks_from_scratch_have_a_table_of_their_own() -> None:
    ranking = ranking_of(group_runs(found(*runs(encoder="resnet18:64", tpl=0.9, hat=0.5, der=0.8, owm=0.2)))[0])
    assert ranking is not None and ranking.encoder == "resnet18"
    assert {place.method: place.paper for place in ranking.places}["tpl"] == pytest.approx(0.622)


def test_the_report_tells_it_in_every_form(tmp_path: Path) -> None:
    for run in runs(**LEVELS):
        write_run(tmp_path / "runs" / run.description["method"], run)
    page, table = tmp_path / "page.html", tmp_path / "table.md"
    command = ["report", str(tmp_path / "runs"), "--out", str(page), "--markdown", str(table)]
    shown = CliRunner().invoke(cli.app, command, catch_exceptions=False).output
    told = json.loads(CliRunner().invoke(cli.app, [*command, "--json"], catch_exceptions=False).output)
    assert told["tables"][0]["ranking"]["spearman"] == pytest.approx(0.9)
    for text in (shown, page.read_text(encoding="utf-8"), table.read_text(encoding="utf-8")):
        assert "over 5 methods: 0.90" in " ".join(text.split())
