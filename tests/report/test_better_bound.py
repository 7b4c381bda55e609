"""Forgetting is measured against the better bound, and tables say which one that is; parts of a method are rows."""

from __future__ import annotations

import dataclasses
import io

from made_runs import found, in_order, make_run
from rich.console import Console

from tpl.bench.bounds import better_bound, bound_name, bounds_sentence
from tpl.bench.results import RunResult
from tpl.report import Findings, rich_table
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


def test_a_part_that_one_run_lacks_is_no_row() -> None:
    runs = [with_parts(in_order("tpl-plus", 0, 0.9)), in_order("tpl-plus", 1, 0.9)]
    (experiment,) = group_runs(found(*runs))
    assert [row["name"] for row in experiment.rows] == ["tpl-plus"]
