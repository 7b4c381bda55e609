"""Forgetting is measured against the better bound, and tables say which one that is; parts of a method are rows."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import found, in_order, make_run, write_run
from rich.console import Console
from typer.testing import CliRunner

from tpl import cli
from tpl.bench.bounds import better_bound, bound_name, bounds_of, bounds_sentence
from tpl.bench.results import RunResult
from tpl.errors import TplError
from tpl.report import Findings, find_runs, rich_table
from tpl.report.compare import compare
from tpl.report.find import group_runs
from tpl.report.page import render
from tpl.report.tables import all_latex, all_markdown, experiment_tables


def test_the_better_bound_counts_and_is_named() -> None:
    run, joint, ridge = in_order("tpl", 0, 0.8), in_order("joint", 0, 0.9, 0.0), in_order("joint-ridge", 0, 0.95, 0.0)
    assert better_bound(run, [joint, ridge]) is ridge
    assert better_bound(run, [joint]) is joint
    assert better_bound(run, [in_order("joint", 1, 0.99)]) is None  # other classes
    assert better_bound(joint, [joint, ridge]) is None
    other_seed = in_order("joint", 0, 0.99, 0.0, seed=5)
    assert better_bound(run, [joint, other_seed]) is joint
    (row, *bounds) = group_runs(found(run, joint, ridge))[0].rows
    assert row["forgetting_last"] == run.against(ridge)["forgetting_last"] and row["bound"] == "joint-ridge"
    assert [bound["forgetting_last"] for bound in bounds] == [None, None]


RESULTS = Path(__file__).parents[2] / "results" / "c100"
NAMES = [f"class {n}" for n in range(6)]


def in_twos(method: str, level: float = 0.8, **changes: Any) -> RunResult:
    """A run over three tasks of two classes."""
    return make_run(method, level, 0.05, **{"benchmark": "c100-20t", "test_images": [20, 20, 20]} | changes)


def in_threes(method: str, level: float = 0.9, order: list[str] = NAMES, **changes: Any) -> RunResult:
    """A run over the same classes and images in two tasks of three."""
    changes = {"benchmark": "c100-10t", "classes": [order[:3], order[3:]], "test_images": [30, 30]} | changes
    return make_run(method, level, 0.0, 2, **{"data": {"train": "c", "test": "d"}} | changes)


def test_a_bound_over_the_same_images_in_other_tasks_counts_with_its_last() -> None:
    run, joint = in_twos("tpl"), in_threes("joint", options={"epochs": 10})
    assert better_bound(run, [joint]) is joint
    lost = run.against(joint)
    assert lost["forgetting_last"] == pytest.approx(joint.summary["last"] - run.summary["last"])
    assert lost["forgetting_aia"] is None  # its stages are others
    assert bound_name(joint.description, run.description) == "joint, 10 epochs, run of c100-10t"
    own_split = in_threes("joint", benchmark="c100-20t", options={"epochs": 3})
    assert bound_name(own_split.description, run.description) == "joint, 3 epochs, run over other tasks, not a bound"


def test_a_bound_over_the_same_tasks_comes_first() -> None:
    run, same, other = in_twos("tpl"), in_twos("joint", 0.85, seed=4), in_threes("joint-ridge", 0.99)
    assert bounds_of(run, [other, same]) == [same]
    assert run.against(same)["forgetting_aia"] is not None
    seeds = [in_threes("joint", 0.99, seed=3), in_threes("joint", 0.9)]
    assert bounds_of(run, seeds) == seeds[1:]
    orders = [in_threes("joint", 0.99, order=NAMES[::-1]), in_threes("joint", 0.9, seed=3)]
    assert bounds_of(run, orders) == orders[1:]  # the class order before the seed
    assert bounds_of(run, orders[:1]) == orders[:1]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"order": [*NAMES[:5], "another"]}, "classes"),
        ({"order": NAMES[:5]}, "classes"),
        ({"benchmark": "t-10t"}, "images"),  # another data set
        ({"benchmark": "c100-blurry"}, "images"),
        ({"benchmark": "folder"}, "images"),
        ({"test_images": [30, 29]}, "images"),
        ({"validation": 0.2}, "held-out images"),
        ({"classes": [NAMES[:2], NAMES[2:4], NAMES[4:]], "test_images": [20, 20, 20]}, "images"),  # by their hash
    ],
)
def test_other_images_are_no_bound(changes: dict[str, Any], what: str) -> None:
    run, joint = in_twos("tpl"), in_threes("joint", **changes)
    assert better_bound(run, [joint]) is None
    with pytest.raises(TplError, match=f"same {what};"):
        run.against(joint)


def test_own_photos_and_held_out_images_are_not_taken_for_the_same() -> None:
    assert better_bound(in_twos("tpl", benchmark="folder"), [in_threes("joint", benchmark="folder")]) is None
    held = in_twos("tpl", validation=0.2)
    assert better_bound(held, [in_threes("joint", validation=0.2)]) is not None
    assert better_bound(held, [in_threes("joint", validation=0.2, seed=1)]) is None  # the seed chooses the images
    encoder = {"name": "compact", "sha256": "other"}
    assert better_bound(in_twos("tpl"), [in_threes("joint", encoder=encoder)]) is None


def test_a_report_finds_the_bound_of_another_benchmark() -> None:
    epochs = {"options": {"epochs": 10}}
    runs = found(in_twos("tpl"), in_threes("joint", **epochs), in_threes("joint-ridge", 0.95, **epochs))
    experiment, bounds = group_runs(runs)
    (row,) = experiment.rows
    assert row["forgetting_last"] == pytest.approx(runs[2].result.summary["last"] - runs[0].result.summary["last"])
    assert row["forgetting_aia"] is None and row["bound"] == "joint-ridge, 10 epochs, run of c100-10t"
    assert experiment.run_rows()[0]["forgetting_last"] == row["forgetting_last"]
    assert [run.result for run in bounds.runs] == bounds.bounds  # none is taken from elsewhere
    sentence = "against joint-ridge, 10 epochs, run of c100-10t; the better of joint and joint-ridge."
    assert sentence in render(Findings(runs), [experiment, bounds], "t")
    results, _ = experiment_tables(experiment)
    assert sentence in all_markdown([results]) and not any("AIA forgetting" in text for text in results.head)
    screen = io.StringIO()
    Console(width=200, file=screen).print(rich_table(experiment.rows))
    assert "measured against joint-ridge, 10 epochs, run of c100-10t" in " ".join(screen.getvalue().split())
    # The ridge of another benchmark is not looked at where there is a joint run over the same tasks.
    own, _ = group_runs([*found(in_twos("tpl"), in_twos("joint", 0.85)), *runs[1:]])
    assert "against joint; there is no run of joint-ridge" in render(Findings(runs), [own], "t")
    assert own.rows[0]["forgetting_aia"] is not None


def test_a_group_with_several_bounds_names_each_once() -> None:
    orders = [in_twos("tpl"), in_twos("tpl", classes=[NAMES[4:], NAMES[2:4], NAMES[:2]], data={"train": "e"})]
    (experiment,) = group_runs(found(*orders, in_twos("joint", 0.9)))
    sentence = "against joint or joint, run over other tasks; there is no run of joint-ridge."
    assert sentence in all_markdown(experiment_tables(experiment))
    assert experiment.rows[0]["forgetting_aia"] is None  # one of the two orders has none


def test_the_committed_runs_of_c100_20t_have_the_bounds_of_c100_10t() -> None:
    names = ("c100-20t-vit-tiny-tpl-random-1", "c100-10t-vit-tiny-joint-natural", "c100-10t-vit-tiny-joint-random-1")
    runs = find_runs([RESULTS / name for name in names]).runs
    assert better_bound(runs[0].result, [run.result for run in runs]) is runs[2].result  # of the same class order
    assert group_runs(runs)[0].rows[0]["bound"] == "joint, 10 epochs, run of c100-10t"


def test_a_bound_with_few_epochs_is_called_none() -> None:
    short, long = (make_run("joint", 0.9, 0.0, options={"epochs": epochs}) for epochs in (3, 10))
    assert bound_name(short.description) == "joint, 3 epochs, not a bound"
    assert bound_name(long.description) == "joint, 10 epochs"


def test_the_sentence_tells_which_bounds_there_are() -> None:
    joint, ridge = make_run("joint", 0.9, 0.0), make_run("joint-ridge", 0.9, 0.0)
    assert "needs a run of joint or joint-ridge" in bounds_sentence([], [])
    assert bounds_sentence([joint], ["joint"]).endswith("against joint; there is no run of joint-ridge.")
    two = bounds_sentence([joint, ridge], ["joint-ridge"])
    assert two.endswith("against joint-ridge; the better of joint and joint-ridge.")
    assert "no run has a bound" in bounds_sentence([joint], [])


def test_every_table_names_the_bound() -> None:
    runs = found(in_order("tpl", 0, 0.8), in_order("joint", 0, 0.9, 0.0, options={"epochs": 3}))
    (experiment,) = group_runs(runs)
    sentence = "against joint, 3 epochs, not a bound; there is no run of joint-ridge"
    assert sentence in render(Findings(runs), [experiment], "t")
    for text in (all_markdown(experiment_tables(experiment)), all_latex(experiment_tables(experiment))):
        assert sentence in text
    screen = io.StringIO()
    Console(width=200, file=screen).print(rich_table(experiment.rows))
    assert "measured against joint, 3 epochs, not a bound" in screen.getvalue()


def test_a_comparison_takes_the_bound_that_both_sides_have() -> None:
    now = [in_order("tpl", 0, 0.8), in_order("joint", 0, 0.9, 0.0), in_order("joint-ridge", 0, 0.95, 0.0)]
    before = [in_order("tpl", 0, 0.7), in_order("joint", 0, 0.92, 0.0)]
    compared = compare(found(*now), found(*before, folder="before"))
    (lost,) = [d for d in compared.differences if d.method == "tpl" and d.column.key == "forgetting_last"]
    assert lost.ours == now[0].against(now[1])["forgetting_last"]
    assert lost.theirs == before[0].against(before[1])["forgetting_last"]


def with_parts(run: RunResult) -> RunResult:
    expert, bank = (make_run("tpl-plus", level, 0.02).matrices for level in (0.7, 0.6))
    return dataclasses.replace(run, part_matrices={"expert": expert, "bank": bank})


def test_parts_are_indented_rows_below_their_method() -> None:
    runs = found(with_parts(make_run("tpl-plus", 0.9, 0.01)), make_run("hat", 0.5, 0.1), make_run("joint", 0.95, 0.0))
    (experiment,) = group_runs(runs)
    names = ["tpl-plus", "tpl-plus, expert alone", "tpl-plus, bank alone", "hat", "joint"]
    assert [row["name"] for row in experiment.rows] == names
    whole, expert, *_ = experiment.rows
    assert (expert["group"], expert["part"], expert["runs"]) == ("tpl-plus", "expert", 1)
    assert whole["last"] > expert["last"] > experiment.rows[2]["last"]
    assert expert["forgetting_last"] > whole["forgetting_last"] and expert["seconds"] is None
    results, costs = experiment_tables(experiment)
    assert [row[0].indent for row in results.rows] == [False, True, True, False, False]
    assert [row[0].text for row in costs.rows] == ["tpl-plus", "hat", "joint (upper bound)"]
    assert "| &emsp;tpl-plus, expert alone |" in all_markdown([results])
    assert "\\quad tpl-plus, bank alone &" in all_latex([results])
    page = render(Findings(runs), [experiment], "t")
    assert page.count('<tr class="part">') == 2 and "tpl-plus, expert alone" in page


def test_parts_are_rows_of_the_json(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", with_parts(make_run("tpl-plus", 0.9, 0.01)))
    result = CliRunner().invoke(cli.app, ["report", str(run), "--out", str(tmp_path / "page.html"), "--json"])
    assert result.exit_code == 0, result.exception
    names = [row["name"] for row in json.loads(result.stdout)["tables"][0]["rows"]]
    assert names == ["tpl-plus", "tpl-plus, expert alone", "tpl-plus, bank alone"]


def test_a_part_that_one_run_lacks_is_no_row() -> None:
    runs = [with_parts(in_order("tpl-plus", 0, 0.9)), in_order("tpl-plus", 1, 0.9)]
    (experiment,) = group_runs(found(*runs))
    assert [row["name"] for row in experiment.rows] == ["tpl-plus"]
