"""The committed results: their tables say what the runs say."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import result_tables
from page_tables import baselines, cells, paper, rivals, runs
from tpl.bench.ablate import PLUS_VARIANTS
from tpl.bench.results import RunResult
from tpl.bench.spec import RunSpec
from tpl.bench.suite import check_suite, read_suite
from tpl.methods.plus import PlusConfig

ROOT = Path(__file__).parents[2]

PLUS = "`tpl-plus`, adapters of one size"


@pytest.mark.parametrize("name", ["scratch", "runs", "models", "build", "dist", "site", "demo"])
def test_results_are_never_ignored_for_the_name_of_their_folder(name: str) -> None:
    """Evidence in results/choices/cifar100/scratch must be committable; the folders of that name at the top are not."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    for place, ignored in ((f"results/choices/cifar100/{name}/evidence.jsonl", False), (f"{name}/file", True)):
        found = subprocess.run(["git", "check-ignore", "-q", place], cwd=ROOT, check=False)
        assert (found.returncode == 0) is ignored, place


def test_the_pages_show_what_the_runs_say() -> None:
    assert {name for names in result_tables.PAGES.values() for name in names} == set(result_tables.TABLES)
    for name, tables in result_tables.PAGES.items():
        page = (ROOT / name).read_text(encoding="utf-8")
        assert result_tables.filled(page, tables) == page, f"{name}: run recipes/result_tables.py"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results with one run of t-5t; `copied` adds others."""
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    copied(tmp_path, "tpl-plus", "natural")
    return tmp_path


def copied(results: Path, name: str, order: str, **changes: Any) -> None:
    """A run of t-5t, made of one of c100-10t; `options`, `last` and `parts` may be other ones."""
    source = runs.RUNS / "c100-10t-vit-tiny-tpl-plus-former-natural"
    description = json.loads((source / "run.json").read_text())
    content = json.loads((source / "results.json").read_text())
    description |= {"method": name.removesuffix("-first"), "order": order.replace("-", ":")}
    description["options"] |= changes.get("options", {})
    content["summary"]["last"] = changes.get("last", 0.7)
    content |= {"parts": changes["parts"]} if "parts" in changes else {}
    place = results / "tiny" / f"t-5t-vit-tiny-{name}-{order}"
    place.mkdir(parents=True)
    (place / "run.json").write_text(json.dumps(description))
    (place / "results.json").write_text(json.dumps(content))


def rows(lines: list[str]) -> dict[str, list[str]]:
    return {cells[1]: cells for cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:])}


def test_a_row_without_runs_says_so(made: Path) -> None:
    found = rows(rivals.benchmark_table("t-5t"))
    assert found["`anacp`"][4] == found["`joint`, upper bound"][4] == "not run"
    assert found["&emsp;`tpl-plus`, expert alone"][4] == "not run"  # neither parts nor an ablation
    assert found[PLUS][:5] == [
        "ViT-tiny (a22e9b36)", PLUS, "1", "8 epochs, rate 0.01 cosine, flip augmentation", "70.00",
    ]  # fmt: skip
    assert rows(rivals.benchmark_table("c10-5t"))["every method"][4] == "not run"
    assert [line.split("|")[7].strip() for line in rivals.overview_table() if f"| {PLUS} |" in line] == ["70.00 (1)"]


def test_the_better_bound_of_either_split_counts(made: Path) -> None:
    copied(made, "joint", "natural", options={"epochs": 3}, last=0.95)
    assert rows(rivals.benchmark_table("t-5t"))[PLUS][7] == "–"
    assert "joint, 3 epochs, not a bound" in rows(rivals.benchmark_table("t-5t"))
    copied(made, "joint-ridge", "natural", options={"epochs": 10}, last=0.9)
    found = rows(rivals.benchmark_table("t-5t"))
    assert found[PLUS][7] == "20.00" and found["`joint-ridge`, upper bound"][7] == "–"
    assert any("| `joint-ridge`, upper bound |" in line and "as T-5T |" in line for line in rivals.overview_table())


def test_orders_are_counted_and_parts_are_rows(made: Path) -> None:
    expert = {kind: [[1.0], *([] for _ in range(8)), [0.5] * 10] for kind in ("cil", "til", "tp")}
    for order, last in (("random-1", 0.6), ("random-2", 0.8)):
        copied(made, "ranpac-first", order, options={"adapt": "first"}, last=last, parts={"expert": expert})
    row = rows(rivals.benchmark_table("t-5t"))["`ranpac`, adapted to the first task, as published"]
    assert row[2] == "2" and row[4] == "70.00 ± 14.14"
    found = runs.rows_of("t-5t", "vit-tiny", "ranpac-first")
    assert [part["last"] for part in runs.part_lasts(found, "expert")] == [0.5, 0.5]
    assert runs.part_lasts(found, "bank") == []


def test_runs_whose_adapters_were_never_full_count_as_both(made: Path) -> None:
    (place, _), *_ = runs.rows_of("t-5t", "vit-tiny", "tpl-plus")
    content = json.loads((place / "results.json").read_text())
    for units, orders in ((0.89, 1), (0.9, 0), (None, 0)):
        content["summary"]["capacity"] = {"units": units, "frozen": 0.8} if units else None
        (place / "results.json").write_text(json.dumps(content))
        assert len(runs.rows_of("t-5t", "vit-tiny", "tpl-plus-grown")) == orders
        assert len(runs.rows_of("t-5t", "vit-tiny", "tpl-plus")) == 1


def test_a_figure_that_the_runs_do_not_have_is_mended() -> None:
    page = (ROOT / "results/README.md").read_text(encoding="utf-8")
    (figure,) = {line.split("|")[4] for line in paper.family_table() if line.startswith("| C100-10T, ViT-tiny")}
    altered = page.replace(figure, " 99.99 ")
    assert altered != page and result_tables.filled(altered, result_tables.PAGES["results/README.md"]) == page


@pytest.mark.parametrize("name", ["baselines", "as_long"])
def test_the_order_of_the_baselines_is_the_one_the_page_tells(name: str) -> None:
    page = (ROOT / "results/README.md").read_text(encoding="utf-8")
    ranking = getattr(baselines, f"{name}_ranking")()
    assert (
        f"(Spearman, {len(ranking.places)} methods that are in both, bounds left out) is {ranking.spearman:.2f}" in page
    )


def test_methods_in_one_table_were_trained_as_long() -> None:
    """All but bounds and what has a schedule of its own: the same epochs and batches; and every loss is a run's."""
    found, own = baselines.as_long_runs(), {"joint", "joint-ridge", "l2p", "slca"}
    others = [run for name, (_, run) in found.items() if name not in own]
    trained = [run.description["options"] for run in others if cells.recipe(run) != "no training"]
    assert len(trained) > 10
    for option in ("epochs", "batch_size"):
        assert len({options[option] for options in trained}) == 1
    for name in set(baselines.BASELINE_ROWS) & found.keys() - {"slda"}:
        _, run = found[name]
        assert len(run.summary["loss_by_epoch"]) == run.description["options"]["epochs"], name


def test_a_page_without_a_mark_is_refused() -> None:
    with pytest.raises(SystemExit, match="no mark <!-- table: tpl -->"):
        result_tables.filled("# Results\n", ["tpl"])


def test_the_default_mass_of_auto_is_among_what_is_measured() -> None:
    assert f"passes = auto, mass = {PlusConfig().passes_mass}" in PLUS_VARIANTS


def test_runs_on_test_images_are_comparable() -> None:
    """Within a setting: one encoder, one commit, nothing drifted, and networks trained by one recipe."""
    for setting in runs.SETTINGS:
        made = {name: runs.runs_of(setting, name) for name in ("tpl", runs.FORMER, "ranpac", "more", "row")}
        everyone = [run for found in made.values() for run in found]
        assert len({run.description["encoder"]["sha256"] for run in everyone}) == 1
        assert len({run.description["environment"]["commit"] for run in everyone}) == 1
        assert {run.summary["drift"] for run in everyone} <= {0.0, None}
        trained = [run for method, found in made.items() if method != "ranpac" for run in found]
        for name in ("epochs", "lr", "schedule", "augment", "others", "latent", "memory"):
            assert len({run.description["options"].get(name) for run in trained} - {None}) == 1, (setting, name)
        for run in runs.runs_of(setting, "tpl-plus"):
            assert run.summary["drift"] == 0
            for name in ("expert_views", "others", "expert_weight"):
                assert run.description["options"][name] == getattr(PlusConfig(), name)  # today's defaults
            for name in ("epochs", "lr", "schedule", "augment", "latent", "memory"):
                assert run.description["options"][name] == trained[0].description["options"][name], (setting, name)


def assert_was_run(ran: dict[str, Any], spec: RunSpec) -> None:
    known = {name: value for name, value in spec.all_options().items() if name in ran["options"]}
    assert known == {name: ran["options"][name] for name in known}, spec.method
    assert (ran["benchmark"], ran["encoder"]["name"], ran["order"]) == (spec.benchmark, spec.encoder, spec.order)
    assert ran["validation"] is None


def test_the_suite_of_baselines_is_what_was_run() -> None:
    suite = check_suite(read_suite(ROOT / "recipes/suite-baselines.toml"))
    assert sorted(suite.methods) == sorted(place.name for place in baselines.BASELINES.iterdir())
    for spec in suite.specs():
        assert_was_run(RunResult.read(baselines.BASELINES / spec.method).description, spec)


def test_the_suite_of_baselines_as_long_as_tpl_is_what_was_run_so_far() -> None:
    suite = check_suite(read_suite(ROOT / "recipes/suite-as-long.toml"))
    assert sorted(suite.methods) == sorted(baselines.BASELINE_ROWS) and tuple(suite.benchmarks) == baselines.EVERYWHERE
    pairs = [(spec, runs.natural_run(spec.benchmark, spec.method)) for spec in suite.specs()]
    made = [(spec, row[1]) for spec, row in pairs if row is not None]
    assert len(made) >= 17
    for spec, run in made:
        assert_was_run(run.description, spec)
