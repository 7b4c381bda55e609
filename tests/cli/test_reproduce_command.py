"""`tpl reproduce`: what it prints and how it exits. Runs are small files; nothing is trained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from tpl import TplError, cli
from tpl.bench.results import RunResult
from tpl.bench.spec import RunSpec
from tpl.pretraining import known_weights

ROW = "encoders/vit-tiny/c100-10t"
ENCODER = "vit_tiny_patch16_224"
ORDERS = ("natural", "random:1", "random:2")
KNOWN = known_weights(ENCODER)[0]


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["reproduce", *map(str, arguments)], env={"COLUMNS": "100"})


def ask(*arguments: str | Path, code: int = 0) -> Any:
    result = call(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def result_of(spec: RunSpec, last: float) -> RunResult:
    turn = ORDERS.index(spec.order)
    names = [f"class {(c + turn) % 100}" for c in range(100)]
    description = {
        "benchmark": spec.benchmark,
        "method": spec.method,
        "options": spec.all_options(),
        "seed": spec.seed,
        "order": spec.order,
        "classes": [names[10 * t : 10 * t + 10] for t in range(10)],
        "test_images": [100] * 10,
        "validation": None,
        "encoder": {"name": spec.encoder, "sha256": KNOWN},
        "data": {"train": f"{turn}" * 64, "test": "f" * 64},
        "precision": "fp32",
        "environment": {"commit": "c0ffee", "device": "cuda: NVIDIA H200"},
    }
    matrices = {"cil": np.full((10, 10), last), "til": np.full((10, 10), 0.96)}
    return RunResult(description, {"last": last, "aia": last, "til": 0.96}, matrices)


def write(place: Path, order: str, last: float, **options: Any) -> None:
    settings = {"calibration": "score"} | options
    result = result_of(RunSpec("c100-10t", "tpl", ENCODER, order=order, options=settings), last)
    place.mkdir(parents=True)
    (place / "run.json").write_text(json.dumps(result.description))
    result.write(place)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Three class orders that reach ViT-tiny's row by the paper's recipe, and one run with other settings."""
    for index, order in enumerate(ORDERS):
        write(tmp_path / "c100-10t" / order.replace(":", "-"), order, 0.77 + 0.01 * index)
    write(tmp_path / "short", "natural", 0.5, epochs=3)
    return tmp_path


def change_weights(results: Path, sha256: str, encoder: str = ENCODER) -> None:
    """Let all runs say that they had these weights."""
    for file in results.rglob("run.json"):
        run = json.loads(file.read_text())
        file.write_text(json.dumps(run | {"encoder": {"name": encoder, "sha256": sha256}}))


def test_a_reached_row_is_shown_with_all_that_is_behind_it(results: Path) -> None:
    result = call(ROW, "--from", results)
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stdout.splitlines() if line.startswith(ROW))
    assert line.split()[1:] == ["Last", "76.79", "78.00", "±", "1.00", "+1.21", "3", "above"]
    text = " ".join(result.stdout.split())
    for fact in ("the paper's recipe", "TIL 95.36 96.00 ± 0.00 +0.64 3 above"):
        assert fact in text
    assert "Rows: 1 reached by the paper's recipe (3 class orders). Equal:" in text and "unverified" not in text
    for fact in (
        f"{KNOWN} (known)",
        "(the paper has 5)",
        "natural (seed 0), random:1 (seed 0), random:2 (seed 0)",
    ):
        assert fact in text
    for fact in ("epochs=40", "memory=2000", "c0ffee", "NVIDIA H200", "train 111111111111", "0.5 points"):
        assert fact in text
    assert "epochs=3: tpl on c100-10t, Last 50.00" in text  # named, not mixed in
    assert result.stderr == ""


def test_options_that_only_one_side_knows_are_told_apart_from_other_values(results: Path) -> None:
    file = results / "short" / "run.json"
    run = json.loads(file.read_text())
    del run["options"]["grow_adapters"]
    run["options"]["tta"] = "flip"
    file.write_text(json.dumps(run))
    text = " ".join(call(ROW, "--from", results).stdout.split())
    assert "epochs=3 tta=flip grow_adapters=None (made before this option existed): tpl on c100-10t" in text
    for other in (results / "c100-10t").iterdir():
        older = json.loads((other / "run.json").read_text())
        del older["options"]["grow_adapters"], older["options"]["tta"]
        (other / "run.json").write_text(json.dumps(older))
    text = " ".join(call(ROW, "--from", results).stdout.split())
    assert "epochs=3 tta=flip (new since the compared runs): tpl on c100-10t" in text


def test_a_row_reached_with_another_recipe_says_which(results: Path) -> None:
    short = {"epochs": 8, "lr": 0.01, "schedule": "cosine", "augment": "flip", "calibration": "shift"}
    write(results / "ours", "natural", 0.9, **short)
    for place in (results / "c100-10t").iterdir():
        (place / "results.json").unlink()
    result = call(ROW, "--from", results)
    text = " ".join(result.stdout.split())
    assert result.exit_code == 0 and "with short-cosine" in text and "Recipe short-cosine: 4 to 20 epochs" in text
    assert "1 reached with another recipe" in text and "by the paper's recipe" not in text
    assert call(ROW, "--from", results, "--recipe", "paper").exit_code == 1
    answer = ask(ROW, "--from", results)
    counted = {"verdict": "reached", "recipe": "short-cosine", "by_paper": False, "class_orders": 1}
    assert answer["by_row"] == {ROW: counted}
    assert answer["recipes"]["paper"]["by_paper"] and answer["verdicts"] == {"reached with another recipe": 1}


def test_weights_that_no_hash_knows_are_not_counted_unless_that_is_asked_for(results: Path) -> None:
    change_weights(results, "ab" * 32)
    result = call(ROW, "--from", results)
    text = " ".join(result.stdout.split())
    assert result.exit_code == 1 and "Rows: 1 unverified. Equal:" in text
    assert "78.00 ± 1.00 +1.21 3 above, unverified" in text and f"{'ab' * 32} (unverified)" in text
    assert (
        f"unverified: {ROW}: the weights of {ENCODER} (sha256 {'ab' * 32}) are not the known ones ({KNOWN[:12]}" in text
    )
    assert "count these runs with --any-weights" in text
    answer = ask(ROW, "--from", results, code=1)
    (row,) = answer["rows"]
    assert (row["verdict"], row["weights_verified"], answer["any_weights"]) == ("unverified", False, False)
    assert row["reason"].startswith("the weights of") and [q["verdict"] for q in row["quantities"]] == 2 * ["above"]
    assert answer["verdicts"] == {"unverified": 1} and answer["reached_class_orders"] == {}
    result = call(ROW, "--from", results, "--any-weights")
    text = " ".join(result.stdout.split())
    assert result.exit_code == 0 and "1 reached by the paper's recipe (3 class orders)" in text
    assert f"unverified: {ROW}: these weights are not known by their hash" in text and "above, unverified" not in text
    answer = ask(ROW, "--from", results, "--any-weights")
    assert answer["any_weights"] and not answer["rows"][0]["weights_verified"] and not answer["rows"][0]["reason"]


def test_too_few_class_orders_are_no_evidence(results: Path) -> None:
    assert call(ROW, "--from", results, "--min-orders", "3").exit_code == 0
    result = call(ROW, "--from", results, "--min-orders", "4")
    text = " ".join(result.stdout.split())
    assert result.exit_code == 1 and f"no evidence: {ROW}: 3 class orders, 4 wanted" in text
    assert "78.00 ± 1.00 +1.21 3 no evidence" in text and "Rows: 1 no evidence. Equal:" in text
    answer = ask(ROW, "--from", results, "--orders", "natural", "--min-orders", "3", code=1)
    (row,) = answer["rows"]
    assert (answer["min_orders"], row["class_orders"], row["reason"]) == (3, 1, "1 class order, 3 wanted")
    assert answer["by_row"][ROW]["class_orders"] == 1 and row["quantities"][0]["ours"] == pytest.approx(77.0)


def test_the_summary_states_the_fewest_and_the_most_class_orders(results: Path) -> None:
    short = {"epochs": 8, "lr": 0.01, "schedule": "cosine", "augment": "flip", "calibration": "shift"}
    for index, order in enumerate(ORDERS):
        write(results / "short-cosine" / str(index), order, 0.9, **short)
        (results / "c100-10t" / order.replace(":", "-") / "results.json").unlink()
    write(results / "deit", "natural", 0.9, **short | {"epochs": 20})
    change_weights(results / "deit", known_weights("deit_tiny_patch16_224")[0], "deit_tiny_patch16_224")
    rows = (ROW, "encoders/deit-tiny/c100-10t")
    text = " ".join(call(*rows, "--from", results).stdout.split())
    assert "Rows: 2 reached with another recipe (1 to 3 class orders). Equal:" in text
    answer = ask(*rows, "--from", results)
    assert answer["reached_class_orders"] == {"reached with another recipe": {"min": 1, "max": 3}}
    text = " ".join(call(*rows, "--from", results, "--min-orders", "2").stdout.split())
    assert "Rows: 1 reached with another recipe (3 class orders), 1 no evidence. Equal:" in text


def test_runs_of_equal_standing_are_ambiguous(results: Path) -> None:
    for order in ORDERS:
        write(results / "and" / order.replace(":", "-"), order, 0.99, compose="and")
    result = call(ROW, "--from", results)
    assert result.exit_code == 1 and "ambiguous" in result.stdout
    assert "differ in compose: choose with --set" in " ".join(result.stdout.split())
    assert call(ROW, "--from", results, "--set", "compose=or").exit_code == 0


def test_a_summary_that_lies_stops_the_comparison(results: Path) -> None:
    file = results / "c100-10t" / "natural" / "results.json"
    content = json.loads(file.read_text())
    content["summary"]["last"] += 0.01
    file.write_text(json.dumps(content))
    result = call(ROW, "--from", results)
    assert isinstance(result.exception, TplError) and "its summary says last = 78.0000 %" in str(result.exception)


def test_a_missed_row_exits_with_1(results: Path) -> None:
    result = call(ROW, "--from", results, "--orders", "natural", "--epochs", "3")
    assert result.exit_code == 1 and "missed" in result.stdout
    assert call(ROW, "--from", results, "--orders", "natural", "--epochs", "3", "--tolerance", "30").exit_code == 0


def test_a_table_of_rows_says_which_lack_evidence(results: Path) -> None:
    result = call("--from", results, "encoders/*tiny/c100*")
    assert result.exit_code == 1
    assert result.stdout.count("above") >= 2 and result.stdout.count("no evidence") >= 6
    assert "1 reached by the paper's recipe (3 class orders), 3 no evidence" in " ".join(result.stdout.split())


def test_json_has_everything(results: Path) -> None:
    answer = ask(ROW, "encoders/vit-tiny/c10-5t", "--from", results, code=1)
    assert answer["tolerance"] == 0.5 and answer["verdicts"] == {"no evidence": 1, "reached by the paper's recipe": 1}
    by_name = {row["row"]: row for row in answer["rows"]}
    row = by_name[ROW]
    assert (row["verdict"], row["class_orders"], row["benchmark"], row["encoder"]) == (
        "reached",
        3,
        "c100-10t",
        ENCODER,
    )
    last = row["quantities"][0]
    assert (last["quantity"], last["paper"], last["verdict"], last["reached"]) == ("last", 76.79, "above", True)
    assert (row["recipe"], row["by_paper"], row["paper_class_orders"]) == ("paper", True, 5)
    assert last["ours"] == pytest.approx(78.0) and last["std"] == pytest.approx(1.0)
    (evidence,) = row["evidence"]
    assert evidence["options"]["epochs"] == 40 and evidence["encoder"]["sha256"] == KNOWN
    assert evidence["weights"] == "known" and evidence["contamination"] == []
    assert [run["percent"]["last"] for run in evidence["runs"]] == [pytest.approx(p) for p in (77.0, 78.0, 79.0)]
    assert [run["order"] for run in evidence["runs"]] == list(ORDERS)
    assert {run["commit"] for run in evidence["runs"]} == {"c0ffee"}
    assert evidence["runs"][1]["data"] == {"train": "1" * 64, "test": "f" * 64}
    assert row["not_judged"][0]["options"]["epochs"] == 3
    assert by_name["encoders/vit-tiny/c10-5t"]["reason"]


def test_a_row_this_program_cannot_run_says_why(results: Path, tmp_path: Path) -> None:
    for extra in (["--from", results], ["--out", tmp_path / "runs"]):
        answer = ask("resnet18/owm/c10-5t", *extra, code=1)["rows"][0]
        assert answer["verdict"] == "no evidence" and "no owm without pre-training" in answer["reason"]
    text = " ".join(call("resnet18/owm/c10-5t", "--from", results).stdout.split())
    assert "cannot run it (it has no owm without pre-training)" in text


def test_misprints_are_named(results: Path) -> None:
    result = call("ood/odin/average", "--from", results)
    text = " ".join(result.stdout.split())
    assert "AUROC 89.8*" in text and "printed as 86.4" in text


def test_the_list_says_what_can_be_run() -> None:
    rows = {row["row"]: row for row in ask("--list")["rows"]}
    assert len(rows) > 500
    assert rows[ROW]["runnable"] and rows[ROW]["paper"] == {"last": 76.79, "til": 95.36}
    assert rows["main/tpl/c10-5t"]["runnable"]
    assert rows["resnet18/owm/c10-5t"]["obstacle"] == "no owm without pre-training"
    text = call("--list", "encoders/vit-tiny").stdout
    assert ROW in text and "yes" in text and "main/" not in text


def test_runs_are_made_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RunSpec] = []

    def execute_together(specs: list[RunSpec], places: list[Path], resume: bool, callback: object) -> list[RunResult]:
        made.extend(specs)
        return [result_of(spec, 0.70 + 0.01 * spec.seed) for spec in specs]

    monkeypatch.setattr("tpl.bench.run.execute_together", execute_together)
    options = ["--out", tmp_path, "--data", tmp_path, "--set", "k=3", "--epochs", "2", "--device", "cpu"]
    answer = ask(ROW, *options, code=1)["rows"][0]
    assert answer["verdict"] == "missed" and answer["class_orders"] == 3
    assert [spec.order for spec in made] == list(ORDERS)
    assert {(s.options["k"], s.options["epochs"], s.device, s.data) for s in made} == {("3", 2, "cpu", tmp_path)}
    answer = ask(ROW, *options, "--seed", "8", "--orders", "random:1, random:2", "--min-orders", "2")["rows"][0]
    assert answer["verdict"] == "reached" and answer["class_orders"] == 2
    monkeypatch.setitem(globals(), "KNOWN", "ab" * 32)  # of the runs from here on
    answer = ask(ROW, *options, "--seed", "8", code=1)["rows"][0]
    assert answer["verdict"] == "unverified" and f"sha256 {'ab' * 32}" in answer["reason"]
    answer = ask(ROW, *options, "--seed", "8", "--any-weights")["rows"][0]
    assert answer["verdict"] == "reached" and not answer["weights_verified"]


def test_an_interrupted_reproduction_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tpl.bench.reproduce.run_rows", interrupt)
    result = call(ROW, "--out", tmp_path)
    assert result.exit_code == 130 and "continue with the same command" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "Name a row of the paper"),
        (["encoder/vit-tiny/c100-10t"], "near: encoders/vit-tiny/c100-10t"),
        ([ROW, "--from", "absent"], "There is no folder absent"),
        ([ROW, "--orders", ","], "Class orders are joined by commas"),
        ([ROW, "--min-orders", "4"], "--min-orders 4 needs as many class orders: name them with --orders"),
        ([ROW, "--set", "k"], "--set takes NAME=VALUE"),
        ([ROW, "--recipe", "fast"], "There is no recipe 'fast'; there are paper, scratch-plain"),
        ([ROW, "--set", "nonsense=1"], "There is no option 'nonsense'"),
    ],
)
def test_mistakes_are_answered_by_what_would_do(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tpl.bench.run.execute_together", None)
    result = call(*arguments)
    assert isinstance(result.exception, TplError) and text in str(result.exception)
    monkeypatch.setattr(sys, "argv", ["tpl", "reproduce", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    captured = capsys.readouterr()
    assert end.value.code == 2 and captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
