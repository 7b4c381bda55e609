"""A method that its benchmark has changed has another name in every table: the recipe's, or the changed options."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from made_runs import found, make_run
from rich.console import Console

from tpl.bench.benchmarks import BENCHMARKS, TRAINED_WITH
from tpl.bench.paper.recipes import find_recipe
from tpl.bench.results import read_description
from tpl.bench.spec import RunSpec
from tpl.methods import find_method, load_methods
from tpl.report import Findings, group_runs, method_label, rich_table
from tpl.report.page import render
from tpl.report.tables import all_latex, all_markdown, experiment_tables

RESULTS = Path(__file__).parents[2] / "results" / "c100"
SHIFT = {"calibration": "shift"}
TRAINING = {"lr": 0.05, "epochs": 40, "memory": 100}
ENCODER = {"name": "vit_tiny_patch16_224", "sha256": "f"}


def described(method: str = "tpl", set_by_benchmark: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """run.json of a method on C100-10T whose benchmark set these options."""
    options = TRAINING | (set_by_benchmark or {}) | changes.pop("options", {})
    own = {"benchmark": "c100-10t", "encoder": ENCODER, "options": options, "benchmark_options": set_by_benchmark}
    return make_run(method, 0.9, 0.1).description | own | changes


def test_what_a_benchmark_changes_in_a_method_is_named() -> None:
    assert method_label(described("tpl", TRAINING | SHIFT)) == "tpl, changed: calibration=shift"
    assert method_label(described("tpl", TRAINING)) == "tpl"  # as the method is, for as long as the benchmark says
    assert method_label(described("tpl", TRAINING, options=SHIFT)) == "tpl"  # by whoever made the run
    many = {"others": "per_class", "rotation_classes": True, "tta": "rotate", "compose": "and"}
    assert (
        method_label(described("tpl", many)) == "tpl, changed: others=per_class, rotation_classes=true, tta=rotate, …"
    )


def test_an_early_run_is_named_by_what_its_benchmark_sets() -> None:
    early = described("tpl", SHIFT)
    del early["benchmark_options"]
    assert method_label(early) == "tpl, changed: calibration=shift"
    assert method_label(early | {"options": TRAINING | {"calibration": "score"}}) == "tpl"
    assert method_label(early | {"benchmark": "no longer there"}) == "tpl"


def test_a_run_that_follows_a_recipe_is_named_by_it() -> None:
    recipe = find_recipe("scratch-rotations")
    options = {name: values[0] for name, values in recipe.options.items()}
    changed = {name: options[name] for name in ("others", "rotation_classes", "tta", "compose", "calibration")}
    run = described("tpl", changed, options=options, encoder={"name": "resnet18:128", "sha256": "f"})
    assert method_label(run) == "tpl (scratch-rotations)"
    upright = run | {"options": run["options"] | {"tta": "none"}}
    assert method_label(upright).startswith("tpl, changed: others=per_class, ")


@pytest.mark.parametrize(
    ("folder", "label"),
    [
        ("c100-20t-resnet18-tpl-natural", "tpl (scratch-rotations)"),
        ("c100-20t-resnet18-tpl-plain-natural", "tpl (scratch-plain)"),
        ("c100-20t-vit-tiny-tpl-natural", "tpl (short-cosine)"),
        ("c100-10t-vit-tiny-tpl-paper-natural", "tpl"),
        ("c100-20t-vit-tiny-tpl-plus-grown-natural", "tpl-plus, changed: calibration=shift"),
        ("c100-20t-vit-tiny-more-natural", "more"),
    ],
)
def test_the_committed_runs_have_these_names(folder: str, label: str) -> None:
    assert method_label(read_description(RESULTS / folder)) == label


def test_every_table_has_the_name() -> None:
    changed, plain = make_run("tpl", 0.9, 0.1), make_run("hat", 0.8, 0.1)
    options = changed.description["options"]
    own = {"options": options | SHIFT, "benchmark_options": SHIFT}
    changed = dataclasses.replace(changed, description=changed.description | own)
    runs = found(changed, plain)
    (experiment,) = group_runs(runs)
    name = "tpl, changed: calibration=shift"
    assert [row["name"] for row in experiment.rows] == [name, "hat"] and experiment.rows[0]["method"] == "tpl"
    screen = io.StringIO()
    Console(width=200, file=screen).print(rich_table(experiment.rows))
    tables = experiment_tables(experiment)
    for text in (render(Findings(runs), [experiment], "t"), all_markdown(tables), all_latex(tables), screen.getvalue()):
        assert name in text


def test_settings_are_named_once() -> None:
    def run(calibration: dict[str, str], **options: Any) -> Any:
        settings = {"lr": 0.05, "memory": 100, "calibration": "score"} | calibration | options
        return make_run("tpl", 0.9, 0.1, options=settings, benchmark_options=calibration)

    def names(*runs: Any) -> list[str]:
        return [group.name for group in group_runs(found(*runs))[0].groups]

    label = "tpl, changed: calibration=shift"
    assert names(run(SHIFT), run({})) == [label, "tpl, calibration score"]
    assert names(run(SHIFT), run(SHIFT, memory=50)) == [f"{label}, memory 100", f"{label}, memory 50"]
    # What tells the runs of one label apart comes before what tells them from others.
    others = {f"a{n}": n for n in range(3)}
    *both, other = names(run(SHIFT), run(SHIFT, memory=50), run({}, **others))
    assert both == [f"{label}, memory 100, a0 null, a1 null, …", f"{label}, memory 50, a0 null, a1 null, …"]
    assert other == "tpl, a0 0, a1 1, a2 2, …"


def test_options_of_training_change_no_method() -> None:
    """Those counted as training are none of how a method answers; those that are not change its defaults."""
    named = set()
    for method in load_methods():
        config = find_method(method).config_class
        groups = {field.name: field.metadata["group"] for field in dataclasses.fields(config)}
        assert not {groups.get(name) for name in TRAINED_WITH} & {"task prediction", "test time", "masks", "loss"}
        for benchmark in BENCHMARKS:
            for encoder in ("vit_tiny_patch16_224", "resnet18:128"):
                prescribed = RunSpec(benchmark, method, encoder)._prescribed()
                changed = {name: value for name, value in prescribed.items() if name not in TRAINED_WITH}
                assert all(getattr(config(), name) != value for name, value in changed.items()), (benchmark, method)
                named |= set(changed)
    assert named == {"calibration", "others", "rotation_classes", "tta", "compose"}
