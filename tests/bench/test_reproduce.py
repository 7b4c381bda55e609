"""Judging rows of the paper: which runs count, how they are grouped, what they say, and which runs a row takes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpl import TplError
from tpl.bench.benchmarks import BENCHMARKS
from tpl.bench.metrics import matrix_of
from tpl.bench.paper import FIVE, Row, find_rows
from tpl.bench.paper.evidence import Run, read_runs
from tpl.bench.paper.judge import Judgement, Question, counted_orders, judge, overall
from tpl.bench.paper.recipes import find_recipe, load_recipes, recipe_for
from tpl.bench.reproduce import ORDERS, RowSettings, obstacle, plan, run_rows
from tpl.bench.results import RunResult
from tpl.bench.spec import RunSpec
from tpl.methods import find_method
from tpl.pretraining import known_weights

ENCODER = "vit_tiny_patch16_224"
KNOWN = known_weights(ENCODER)[0]
PAPER = {"tpl": {"calibration": "score"}, "joint": {}}  # where the benchmark's settings are not the paper's
OPTIONS = {name: RunSpec("c100-10t", name, ENCODER, options=more).all_options() for name, more in PAPER.items()}


def description(order: str = "natural", method: str = "tpl", **changes: Any) -> dict[str, Any]:
    """A run.json of C100-10T; `options` are changed, everything else replaced."""
    turn = 0 if order == "natural" else int(order[-1])
    names = [f"class {(c + turn) % 100}" for c in range(100)]
    options = OPTIONS[method] | changes.pop("options", {})
    return {
        "benchmark": "c100-10t",
        "method": method,
        "options": options,
        "seed": 0,
        "order": order,
        "classes": [names[10 * t : 10 * t + 10] for t in range(10)],
        "test_images": [100] * 10,
        "validation": None,
        "encoder": {"name": ENCODER, "sha256": KNOWN},
        "data": {"train": f"train {turn}", "test": f"test {turn}"},
        "precision": "bf16",
        "environment": {"commit": "c0ffee", "device": "cuda: NVIDIA H200"},
    } | changes


KINDS = {"cil": "last", "til": "til"}


def make(order: str = "natural", last: float = 0.77, til: float = 0.96, place: str = "run", **changes: Any) -> Run:
    summary = {"last": last, "aia": last, "til": til, "detection": {"auroc_pooled": 0.9}}
    summary |= {"parameters": 5_000_000, "seconds_per_task": 90.0}
    return run_of(Path(place), description(order, **changes), summary, 10)


def run_of(place: Path, description: dict[str, Any], summary: dict[str, Any], stages: int) -> Run:
    """A run whose accuracy on all classes so far is always that of its summary."""
    matrices = {kind: matrix_of([[summary[key]] * (t + 1) for t in range(stages)]) for kind, key in KINDS.items()}
    return Run(place, RunResult(description, summary, matrices))


def write(run: Run, place: Path) -> Path:
    place.mkdir(parents=True)
    (place / "run.json").write_text(json.dumps(run.description))
    run.result.write(place)
    return place


def row(name: str = "encoders/vit-tiny/c100-10t") -> Row:
    (found,) = find_rows([name])
    return found


def judged(
    row: Row, runs: list[Run], tolerance: float = 0.5, options: Any = None, orders: Any = None, **question: Any
) -> Judgement:
    """The judgement that the row is counted by."""
    return overall(judge(row, runs, Question(tolerance, options, orders, **question)))


def verdicts(runs: list[Run], name: str = "encoders/vit-tiny/c100-10t", tolerance: float = 0.5) -> dict[str, str]:
    return {f.quantity: f.verdict for f in judged(row(name), runs, tolerance).findings}


# Verdicts


def test_mean_and_deviation_over_class_orders_decide() -> None:
    runs = [make(order, last) for order, last in zip(ORDERS, (0.75, 0.76, 0.80), strict=True)]
    judgement = judged(row(), runs)
    last, til = judgement.findings
    assert last.ours == pytest.approx(77.0) and last.difference == pytest.approx(77.0 - 76.79)
    assert last.std == pytest.approx(100 * np.std([0.75, 0.76, 0.80], ddof=1))
    assert til.ours == pytest.approx(96.0) and til.std == pytest.approx(0)
    assert judgement.verdict == "reached" and judgement.orders == 3
    assert (last.verdict, til.verdict) == ("equal", "above")
    assert judgement.recipe == "paper" and judgement.by_paper and judgement.verified
    content = judgement.to_dict()
    assert (content["class_orders"], content["paper_class_orders"], content["weights_verified"]) == (3, 5, True)


def test_the_tolerance_is_inclusive_and_two_sided() -> None:
    assert verdicts([make(last=0.7629)])["last"] == "equal"  # 76.79 - 0.5
    assert verdicts([make(last=0.7628)])["last"] == "below"
    assert verdicts([make(last=0.7628)], tolerance=1.0)["last"] == "equal"
    assert verdicts([make(last=0.7729)])["last"] == "equal"
    assert verdicts([make(last=0.7730)])["last"] == "above"
    assert judged(row(), [make(last=0.7730)]).verdict == "reached"  # equal or better


def test_one_missed_quantity_is_a_missed_row() -> None:
    judgement = judged(row(), [make(til=0.5)])
    assert [finding.verdict for finding in judgement.findings] == ["equal", "below"]
    assert [finding.reached for finding in judgement.findings] == [True, False]
    assert judgement.verdict == "missed"


def test_seeds_of_one_order_count_as_one_order() -> None:
    runs = [make(last=0.70, seed=0), make(last=0.72, seed=1), make("random:1", 0.80)]
    (last, _) = judged(row(), runs).findings
    assert last.ours == pytest.approx(75.5)


def test_no_runs_is_no_evidence_with_a_reason() -> None:
    judgement = judged(row(), [])
    assert judgement.verdict == "no evidence" and judgement.orders == 0
    assert judgement.reason and "vit_tiny_patch16_224" in judgement.reason


# Which runs count


@pytest.mark.parametrize(
    "changes",
    [
        {"validation": 0.1},
        {"benchmark": "c100-20t"},
        {"method": "joint"},
        {"encoder": {"name": "compact", "sha256": "ab"}},
        {"classes": description()["classes"][:9]},
        {"classes": [[f"class {c}" for c in range(t, 100, 10)] for t in range(9)] + [["one"]]},
        {"options": {"memory": 5000}},
        {"options": {"logit_score": "ebo"}},
        {"options": {"beta1": 0.5}},
    ],
)
def test_a_run_of_something_else_does_not_count(changes: dict[str, Any]) -> None:
    assert judged(row(), [make(**changes)]).verdict == "no evidence"


def test_a_run_that_stopped_early_does_not_count() -> None:
    run = make()
    short = run_of(run.place, run.description, run.result.summary, 4)
    assert judged(row(), [short]).verdict == "no evidence"


def test_rows_of_ablations_want_their_own_options() -> None:
    encoder = {"name": "deit_small_611", "sha256": "ab"}
    half = make(last=0.76, encoder=encoder, options={"memory": 1000})
    assert verdicts([half], "small-memory/tpl/c100-10t") == {"last": "equal"}
    assert verdicts([half], "main/tpl/c100-10t") == {"last": "no evidence", "aia": "no evidence"}


def test_runs_with_other_settings_are_not_mixed_in() -> None:
    """Neither where they are better: runs of a recipe are judged, and of these the group with more class orders."""
    good = [make(last=0.99, place="good", options={"epochs": 80})]
    usual = [make(order, 0.70, place="usual") for order in ORDERS]
    other = [make("random:3", 0.98, place="other", encoder={"name": ENCODER, "sha256": "other"})]
    judgement = judged(row(), good + other + usual)
    assert judgement.findings[0].ours == pytest.approx(70.0) and judgement.verdict == "missed"
    assert [str(group.runs[0].place) for group in judgement.used] == ["usual"]
    assert {str(group.runs[0].place) for group in judgement.unused} == {"good", "other"}
    content = judgement.to_dict()
    assert [len(content[key]) for key in ("evidence", "not_judged")] == [1, 2]
    assert {entry["options"]["epochs"] for entry in content["not_judged"]} == {40, 80}


def test_no_folder_name_chooses_among_runs_of_one_recipe() -> None:
    """As many class orders with other settings of the same recipe: nothing is chosen, whatever the folders' names."""
    better, plain = make(last=0.99, place="tpl", options={"compose": "and"}), make(last=0.7, place="runs/tpl-variant")
    for given in ([better, plain], [plain, better]):
        judgement = judged(row(), given)
        assert judgement.verdict == "ambiguous" and "differ in compose: choose with --set" in str(judgement.reason)
    assert judged(row(), [better, plain], options={"compose": "or"}).findings[0].ours == pytest.approx(70.0)
    more = [plain, make("random:1", 0.7)]
    assert judged(row(), [better, *more]).findings[0].ours == pytest.approx(70.0)


def test_overrides_and_orders_choose_among_runs() -> None:
    runs = [make(last=0.9, options={"epochs": 80}), *(make(order, 0.7) for order in ORDERS)]
    long = judged(row(), runs, 0.5, {"epochs": 80}, undeclared=True)
    assert long.findings[0].ours == pytest.approx(90.0) and long.recipe == "undeclared" and not long.by_paper
    typed = judged(row(), runs, 0.5, {"epochs": "80", "compose": "or"}, undeclared=True)
    assert typed.verdict == "reached"
    assert judged(row(), runs, 0.5, {"epochs": 80}).verdict == "no evidence"
    assert judged(row(), runs, 0.5, {"compose": "and"}).verdict == "no evidence"
    assert judged(row(), runs, 0.5, {"nonsense": 1}).verdict == "no evidence"
    assert judged(row(), runs, 0.5, {}, ["random:1", "random:2"]).orders == 2


# Weights and class orders

STRANGE = {"name": ENCODER, "sha256": "ab" * 32}


@pytest.mark.parametrize(("last", "counted"), [(0.77, "reached"), (0.70, "missed")])
def test_unverified_weights_are_judged_only_if_any_count(last: float, counted: str) -> None:
    judgement = judged(row(), [make(last=last, encoder=STRANGE)])
    assert judgement.verdict == "unverified" and not judgement.verified
    assert f"{ENCODER} (sha256 {'ab' * 32}) are not the known ones ({KNOWN[:12]} or " in str(judgement.reason)
    assert judgement.findings[0].verdict == {"reached": "equal", "missed": "below"}[counted]
    asked = judged(row(), [make(last=last, encoder=STRANGE)], any_weights=True)
    assert asked.verdict == counted and asked.reason is None and not asked.verified


@pytest.mark.parametrize(("sha256", "words"), [("ab" * 32, f"sha256 {'ab' * 32}"), (None, "no recorded sha256")])
def test_an_encoder_without_any_known_hash_says_so(sha256: str | None, words: str) -> None:
    run = make(last=0.9, encoder={"name": "deit_small_611", "sha256": sha256})
    judgement = judged(row("main/tpl/c100-10t"), [run])
    assert judgement.verdict == "unverified"
    assert f"deit_small_611 ({words}) cannot be checked, no hash is known" in str(judgement.reason)
    assert judged(row("main/tpl/c100-10t"), [run], any_weights=True).verdict == "reached"


def test_a_network_without_pre_training_needs_no_hash() -> None:
    values = find_recipe("scratch-plain").values("tpl", "resnet18", "c100-10t") or {}
    options = {name: some[0] for name, some in values.items()}
    judgement = judged(row("resnet18/tpl/c100-10t"), [make(encoder={"name": "resnet18"}, options=options)])
    assert judgement.verdict == "reached" and judgement.verified


def test_known_weights_are_compared_before_unverified_ones() -> None:
    """Whatever the numbers are, and however many class orders; if any weights count, they are as good as others."""
    strange = [make(order, 0.99, place="strange", encoder=STRANGE) for order in ORDERS]
    runs = [make(last=0.70, place="known"), *strange]
    judgement = judged(row(), runs)
    assert judgement.verdict == "missed" and judgement.findings[0].ours == pytest.approx(70.0)
    assert [str(group.runs[0].place) for group in judgement.unused] == ["strange"]
    assert judged(row(), runs, any_weights=True).findings[0].ours == pytest.approx(99.0)
    runs = [make(last=0.70, options=SHORT), *strange]  # nor are they the better recipe
    assert [j.verdict for j in judge(row(), runs, Question(0.5))] == ["unverified", "missed"]
    assert judged(row(), runs).verdict == "missed"


def test_a_row_needs_as_many_class_orders_as_are_wanted() -> None:
    two = [make(order) for order in ORDERS[:2]]
    assert judged(row(), two, min_orders=2).verdict == "reached"
    judgement = judged(row(), [*two, make(seed=1)], min_orders=3)  # a seed is no class order
    assert judgement.verdict == "no evidence" and judgement.reason == "2 class orders, 3 wanted"
    assert judgement.orders == 2 and judgement.findings[0].ours == pytest.approx(77.0)
    assert [finding.reached for finding in judgement.findings] == [None, None]
    more = [make(order, 0.9, options=SHORT) for order in ORDERS]
    (only,) = judge(row(), [*two, *more], Question(0.5, min_orders=3))
    assert only.recipe == "short-cosine" and only.verdict == "reached"
    (most,) = judge(row(), [*two, *more], Question(0.5, min_orders=4))
    assert most.reason == "3 class orders, 4 wanted"
    assert judged(row(), [], min_orders=3).reason == judged(row(), []).reason


@pytest.mark.parametrize(
    ("numbers", "text"), [((1,), "1 class order"), ((3, 3), "3 class orders"), ((1, 3), "1 to 3 class orders")]
)
def test_numbers_of_class_orders_in_words(numbers: tuple[int, ...], text: str) -> None:
    assert counted_orders(*numbers) == text


# Recipes

SHORT = {"epochs": 8, "lr": 0.01, "schedule": "cosine", "augment": "flip", "calibration": "shift"}


def test_a_row_is_judged_once_for_every_recipe_that_has_runs() -> None:
    runs = [make(last=0.70, place="a"), make(last=0.79, place="b", options=SHORT)]
    found = judge(row(), runs, Question(0.5))
    assert [(j.recipe, j.verdict, j.by_paper) for j in found] == [
        ("paper", "missed", True), ("short-cosine", "reached", False),
    ]  # fmt: skip
    assert all(not j.unused for j in found)
    assert overall(found).recipe == "short-cosine"
    assert judged(row(), [*runs, make("random:1", 0.9)]).by_paper  # reached by the paper's recipe comes first
    (only,) = judge(row(), runs, Question(0.5, recipe="paper"))
    assert only.verdict == "missed"
    (none,) = judge(row(), runs, Question(0.5, recipe="scratch-plain"))
    assert none.verdict == "no evidence" and "scratch-plain" in str(none.reason)


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 39}, {"lr": 0.005}, {"schedule": "cosine"}, {"augment": "flip"}, {"calibration": "none"},
        {"calibration": "shift"}, {"rotation_classes": True}, {"tta": "flip"}, {"gamma": 1.0}, {"latent": 64},
    ],
)  # fmt: skip
def test_any_setting_of_its_own_takes_a_run_out_of_the_papers_recipe(changes: dict[str, Any]) -> None:
    assert find_recipe("paper").matches(make().description)
    assert not find_recipe("paper").matches(make(options=changes).description)
    assert judged(row(), [make(options=changes)]).verdict == "no evidence"


def test_what_the_text_and_the_public_code_say_are_both_the_papers() -> None:
    code = {"compose": "and", "distance": "squared", "weight_decay": 5e-4, "nesterov": True, "others": "per_class"}
    assert judged(row(), [make(options=code)]).by_paper


def test_options_that_older_runs_do_not_have_are_known() -> None:
    old = make()
    for name in ("tta", "rotation_classes", "augment", "schedule"):
        del old.description["options"][name]
    assert find_recipe("paper").matches(old.description)
    assert not find_recipe("short-cosine").matches(old.description)


def test_the_recipes_are_for_what_the_paper_runs() -> None:
    for name in FIVE:
        assert recipe_for("tpl", "deit_small_611", name) is find_recipe("paper")
        values = find_recipe("paper").values("tpl", ENCODER, name) or {}
        benchmark = BENCHMARKS[name].options
        assert all(benchmark[key] in values[key] for key in ("epochs", "lr", "latent", "batch_size"))
    assert {name for name, recipe in load_recipes().items() if recipe.by_paper} == {"paper"}
    assert recipe_for("tpl", "resnet18", "c100-10t") is find_recipe("scratch-plain")
    assert find_recipe("scratch-rotations").values("more", "resnet18", "c100-10t") is None
    with pytest.raises(TplError, match="no recipe 'fast'; there are paper, "):
        find_recipe("fast")


def test_every_value_of_a_recipe_is_one_that_the_method_takes() -> None:
    known = {f.name: f for f in dataclasses.fields(find_method("tpl").config_class)}
    for recipe in load_recipes().values():
        for options in (recipe.options, *(more for _, more in recipe.cases)):
            for name, values in options.items():
                for value in values:
                    choices = known[name].metadata["choices"]
                    assert not choices or value in choices, (recipe.name, name)


def test_the_committed_results_are_of_declared_recipes() -> None:
    runs = read_runs(Path(__file__).parents[2] / "results" / "c100")
    found = {j.recipe: j for j in judge(row("resnet18/tpl/c100-10t"), runs, Question(0.5))}
    assert {name: j.verdict for name, j in found.items()} == {"scratch-plain": "missed", "scratch-rotations": "reached"}
    tiny = {j.recipe: (j.orders, j.verified, j.verdict) for j in judge(row(), runs, Question(0.5))}
    assert tiny == {"paper": (1, True, "reached"), "short-cosine": (3, True, "reached")}


# Numbers


def test_numbers_come_from_the_matrices_and_a_summary_that_differs_is_refused(tmp_path: Path) -> None:
    run = make(last=0.7)
    lying = Run(run.place, RunResult(run.description, run.result.summary | {"last": 0.8}, run.result.matrices))
    assert lying.number("last") == pytest.approx(0.7)
    write(lying, tmp_path / "lying")
    with pytest.raises(TplError, match=r"lying cannot be read .its summary says last = 80.0000 %, .* 70.0000 %"):
        read_runs(tmp_path)


def test_accuracies_are_weighted_by_the_number_of_test_images() -> None:
    run = make(test_images=[900, *[100] * 9])
    run.result.matrices["cil"][-1, 0] = 0.17
    assert run.number("last") == pytest.approx((0.17 * 900 + 0.77 * 900) / 1800)


def test_a_matrix_of_something_else_is_refused(tmp_path: Path) -> None:
    run = make()
    run.result.matrices["cil"][3, 1] = 77.0  # percent
    write(run, tmp_path / "odd")
    with pytest.raises(TplError, match=r"matrices\.cil\.3\.1.*less than or equal to 1"):
        read_runs(tmp_path)


# Other quantities


def test_forgetting_is_measured_against_joint_runs_over_the_same_tasks() -> None:
    encoder = {"name": "deit_small_611", "sha256": "ab"}
    mine = [make(order, 0.75, encoder=encoder) for order in ORDERS]
    joint = [make(order, 0.80, encoder=encoder, method="joint") for order in ORDERS]
    judgement = judged(row("forgetting/tpl/c100-10t"), mine + joint)
    assert [f.ours for f in judgement.findings] == [pytest.approx(5.0), pytest.approx(5.0)]
    assert [f.verdict for f in judgement.findings] == ["below", "above"]  # 6.23 and 3.10; less is better
    assert [f.reached for f in judgement.findings] == [True, False]
    assert len(judgement.used) == 2
    judgement = judged(row("forgetting/tpl/c100-10t"), mine + joint[:2])
    assert judgement.verdict == "no evidence" and "joint" in str(judgement.reason)


def test_sizes_and_times_are_shown_and_not_judged() -> None:
    run = make(encoder={"name": "deit_small_611", "sha256": "ab"})
    (size,) = judged(row("sizes/tpl/c100-10t"), [run]).findings
    (minutes,) = judged(row("times/tpl/c100-10t"), [run]).findings
    assert (size.ours, minutes.ours) == (pytest.approx(5.0), pytest.approx(1.5))
    assert size.verdict == minutes.verdict == "shown"


def test_an_average_needs_all_five_benchmarks() -> None:
    def five(last: float) -> list[Run]:
        sizes = {"c10-5t": (5, 2), "c100-10t": (10, 10), "c100-20t": (20, 5), "t-5t": (5, 40), "t-10t": (10, 20)}
        runs = []
        for index, (name, (tasks, per_task)) in enumerate(sizes.items()):
            classes = [[f"{t} {c}" for c in range(per_task)] for t in range(tasks)]
            values = find_recipe("paper").values("tpl", ENCODER, name) or {}
            options = {key: values[key][0] for key in ("epochs", "lr", "latent")}
            options["memory"] = 200 if name == "c10-5t" else 2000
            run = make(last=last + 0.01 * index, benchmark=name, classes=classes, options=options,
                       test_images=[100] * tasks)  # fmt: skip
            runs.append(run_of(Path(name), run.description, run.result.summary, tasks))
        return runs

    judgement = judged(row("encoders/vit-tiny/average"), five(0.77))
    assert judgement.findings[0].ours == pytest.approx(79.0) and judgement.verdict == "reached"
    judgement = judged(row("encoders/vit-tiny/average"), five(0.77)[1:])
    assert judgement.verdict == "no evidence" and "missing c10-5t" in str(judgement.reason)
    few = judged(row("encoders/vit-tiny/average"), [*five(0.77), make("random:1", 0.78)], min_orders=2)
    assert few.verdict == "no evidence" and few.orders == 1
    assert few.reason == "1 class order, 2 wanted (c10-5t has 1, c100-20t has 1, t-5t has 1, t-10t has 1)"


# Reading


def test_runs_are_found_below_a_folder_and_unfinished_ones_left_out(tmp_path: Path) -> None:
    place = write(make(), tmp_path / "deep" / "er" / "run")
    write(make(), tmp_path / "unfinished")
    (tmp_path / "unfinished" / "results.json").unlink()
    (found,) = read_runs(tmp_path)
    assert found.place == place and found.description == make().description
    np.testing.assert_array_equal(found.result.matrices["cil"], make().result.matrices["cil"])


@pytest.mark.parametrize("text", ["{", "[]", '{"benchmark": "c100-10t"}', json.dumps(description() | {"encoder": 1})])
def test_a_broken_run_is_named(text: str, tmp_path: Path) -> None:
    place = write(make(), tmp_path / "broken")
    (place / "run.json").write_text(text)
    with pytest.raises(TplError, match="broken cannot be read"):
        read_runs(tmp_path)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TplError, match="no folder"):
        read_runs(tmp_path / "absent")


def test_committed_evidence_is_judged_without_torch(tmp_path: Path) -> None:
    write(make(), tmp_path / "run")
    program = (
        "import sys; sys.argv = ['tpl', 'reproduce', '--from', sys.argv[1], 'encoders/vit-tiny/c100-10t']\n"
        "import tpl.cli\n"
        "try:\n    tpl.cli.main()\n"
        "finally:\n    assert not {'torch', 'timm'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# Running


def test_what_this_program_lacks() -> None:
    assert obstacle(row()) is None
    assert obstacle(row("encoders/vit-tiny/average")) is None
    assert obstacle(row("main/tpl/c10-5t")) is None
    assert obstacle(row("resnet18/tpl/c100-10t")) is None
    assert obstacle(row("resnet18/der/c100-10t")) is None
    assert obstacle(row("resnet18/owm/c100-10t")) == "no owm without pre-training"
    assert obstacle(Row("x", "x", "x", "tpl", ENCODER, "nonsense", {})) == "no benchmark nonsense"
    assert obstacle(Row("x", "x", "x", "nonsense", ENCODER, "c10-5t", {})) == "no method nonsense"
    strange = Row("x", "x", "x", "tpl", ENCODER, "c10-5t", {}, {"nonsense": 1})
    assert obstacle(strange) == "no option nonsense of tpl"


def test_a_row_takes_one_run_per_class_order(tmp_path: Path) -> None:
    settings = RowSettings(tmp_path, data=tmp_path, orders=("natural", "random:7"), seed=3, options={"epochs": 2})
    (specs,) = plan(row(), settings)
    assert [spec.order for spec in specs] == ["natural", "random:7"]
    for spec in specs:
        assert (spec.benchmark, spec.method, spec.encoder, spec.seed) == ("c100-10t", "tpl", ENCODER, 3)
        assert spec.validation is None and spec.tasks is None and spec.per_task is None
        options = spec.all_options()
        assert (options["epochs"], options["memory"], options["lr"]) == (2, 2000, 0.001)
        assert (options["calibration"], options["schedule"], options["augment"]) == ("score", "constant", "none")
    assert [len(specs) for specs in plan(row("encoders/vit-tiny/average"), settings)] == [2] * 5


def test_rows_bring_their_options_along(tmp_path: Path) -> None:
    (specs,) = plan(row("small-memory/tpl/c100-10t"), RowSettings(tmp_path))
    assert specs[0].all_options()["memory"] == 1000
    (specs,) = plan(row("small-memory/tpl/c100-10t"), RowSettings(tmp_path, options={"memory": 7}))
    assert specs[0].all_options()["memory"] == 7
    (specs,) = plan(row("beta/0.9-25.0/c10-5t"), RowSettings(tmp_path))
    assert (specs[0].all_options()["beta1"], specs[0].all_options()["beta2"]) == (0.9, 500.0)


def test_the_recipe_decides_what_is_run(tmp_path: Path) -> None:
    def options(name: str, recipe: str | None = None) -> dict[str, Any]:
        (specs,) = plan(row(name), RowSettings(tmp_path, recipe=recipe))
        return specs[0].all_options()

    assert find_recipe("paper").matches(make(options=options(row().name)).description)
    short = options(row().name, "short-cosine")
    assert {name: short[name] for name in SHORT} == SHORT
    assert options("resnet18/tpl/c100-10t")["rotation_classes"] is False
    assert options("resnet18/tpl/c100-10t", "scratch-rotations")["tta"] == "rotate"
    assert options("encoders/vit-tiny/t-5t", "short-cosine")["epochs"] == 4
    with pytest.raises(TplError, match="recipe short-cosine is not for tpl on t-5t"):
        options("encoders/vit-small/t-5t", "short-cosine")


def test_forgetting_takes_joint_runs_too(tmp_path: Path) -> None:
    mine, joint = plan(row("forgetting/tpl-pfi/c100-10t"), RowSettings(tmp_path, options={"epochs": 2, "k": 3}))
    assert (mine[0].method, joint[0].method) == ("tpl", "joint")
    assert joint[0].all_options()["epochs"] == 2
    assert "k" not in joint[0].all_options()  # the bound takes what it has


def test_weights_may_be_a_folder(tmp_path: Path) -> None:
    (specs,) = plan(row(), RowSettings(tmp_path, weights=tmp_path))
    assert specs[0].weights == tmp_path / f"{ENCODER}.safetensors"
    (tmp_path / f"{ENCODER}.pth").touch()
    (specs,) = plan(row(), RowSettings(tmp_path, weights=tmp_path))
    assert specs[0].weights == tmp_path / f"{ENCODER}.pth"
    (specs,) = plan(row(), RowSettings(tmp_path, weights=tmp_path / "file"))
    assert specs[0].weights == tmp_path / "file"


def test_each_run_is_made_once_whatever_rows_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[RunSpec]] = []

    def execute_together(specs: list[RunSpec], places: list[Path], resume: bool, callback: object) -> list[RunResult]:
        assert resume and [place.parent for place in places] == [tmp_path] * len(specs)
        calls.append(specs)
        square = np.full((10, 10), 0.8)
        return [RunResult(description(s.order), {}, {"cil": square}) for s in specs]

    monkeypatch.setattr("tpl.bench.run.execute_together", execute_together)
    rows = find_rows(["encoders/deit-small/c100-10t", "main/tpl-pfi/c100-10t"])
    runs = run_rows(rows, RowSettings(tmp_path), lambda event: None)
    assert len(calls) == 1 and [spec.order for spec in calls[0]] == list(ORDERS)
    assert len(runs) == 3 and len({run.place for run in runs}) == 3
    assert all(run.result.matrices["cil"][9, 0] == 0.8 for run in runs)
    assert run_rows([], RowSettings(tmp_path), lambda event: None) == []
    with pytest.raises(TplError, match="named twice"):
        run_rows(rows, RowSettings(tmp_path, orders=("natural", "natural")), lambda event: None)


def test_rows_without_pre_training_take_settings_of_their_own_and_no_weight_file(tmp_path: Path) -> None:
    (specs,) = plan(row("resnet18/tpl/c100-10t"), RowSettings(tmp_path, weights=tmp_path))
    options = specs[0].all_options()
    assert specs[0].weights is None
    assert (options["augment"], options["schedule"], options["lr"]) == ("crop", "cosine", 0.05)
    assert options["memory"] == 2000 and options["batch_size"] == 64  # as everywhere else
    given = replace(specs[0], options={"lr": 0.1}).all_options()
    assert (given["lr"], given["augment"]) == (0.1, "crop")
    assert replace(specs[0], encoder="compact", options={}).all_options()["augment"] == "none"
