"""The committed results: their tables say what the runs say."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tpl.bench.suite import check_suite, read_suite
from tpl.methods.plus import PlusConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cifar100_tables", ROOT / "recipes/cifar100_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["scratch", "runs", "models", "build", "dist", "site", "demo"])
def test_results_are_never_ignored_for_the_name_of_their_folder(name: str) -> None:
    """Evidence in results/choices/cifar100/scratch must be committable; the folders of that name at the top are not."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    for place, ignored in ((f"results/choices/cifar100/{name}/evidence.jsonl", False), (f"{name}/file", True)):
        found = subprocess.run(["git", "check-ignore", "-q", place], cwd=ROOT, check=False)
        assert (found.returncode == 0) is ignored, place


def test_the_pages_show_what_the_runs_say(recipe: ModuleType) -> None:
    assert {name for names in recipe.PAGES.values() for name in names} == set(recipe.TABLES)
    for name, tables in recipe.PAGES.items():
        page = (ROOT / name).read_text(encoding="utf-8")
        assert recipe.filled(page, tables) == page, f"{name}: run recipes/cifar100_tables.py"


def test_a_figure_that_the_runs_do_not_have_is_mended(recipe: ModuleType) -> None:
    page = (ROOT / "results/README.md").read_text(encoding="utf-8")
    (figure,) = {line.split("|")[3] for line in recipe.beyond_table() if line.startswith("| C100-10T, ViT-tiny")}
    altered = page.replace(figure, " 99.99 ")
    assert altered != page and recipe.filled(altered, recipe.PAGES["results/README.md"]) == page


def test_the_order_of_the_baselines_is_the_one_the_page_tells(recipe: ModuleType) -> None:
    page = (ROOT / "results/README.md").read_text(encoding="utf-8")
    ranking = recipe.baselines_ranking()
    assert (
        f"(Spearman, {len(ranking.places)} methods that are in both, bounds left out) is {ranking.spearman:.2f}" in page
    )


def test_a_page_without_a_mark_is_refused(recipe: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no mark <!-- table: tpl -->"):
        recipe.filled("# Results\n", ["tpl"])


def test_auto_is_shown_as_it_is_by_default(recipe: ModuleType) -> None:
    assert f"passes = auto, mass = {PlusConfig().passes_mass}" == recipe.AUTO


def test_runs_on_test_images_are_comparable(recipe: ModuleType) -> None:
    """Within a setting: one encoder, one commit, nothing drifted, and networks trained by one recipe."""
    for setting in recipe.SETTINGS:
        runs = {method: recipe.runs_of(setting, method) for method in ("tpl", "tpl-plus", "ranpac", "more", "row")}
        everyone = [run for found in runs.values() for run in found]
        assert len({run.description["encoder"]["sha256"] for run in everyone}) == 1
        assert len({run.description["environment"]["commit"] for run in everyone}) == 1
        assert {run.summary["drift"] for run in everyone} <= {0.0, None}
        trained = [run for method, found in runs.items() if method != "ranpac" for run in found]
        for name in ("epochs", "lr", "schedule", "augment", "others", "latent", "memory"):
            assert len({run.description["options"].get(name) for run in trained} - {None}) == 1, (setting, name)


def test_the_suite_of_baselines_is_what_was_run(recipe: ModuleType) -> None:
    suite = check_suite(read_suite(ROOT / "recipes/suite-baselines.toml"))
    assert sorted(suite.methods) == sorted(place.name for place in recipe.BASELINES.iterdir())
    for spec in suite.specs():
        ran = recipe.RunResult.read(recipe.BASELINES / spec.method).description
        known = {name: value for name, value in spec.all_options().items() if name in ran["options"]}
        assert known == {name: ran["options"][name] for name in known}, spec.method
        assert (ran["benchmark"], ran["encoder"]["name"], ran["order"]) == (spec.benchmark, spec.encoder, spec.order)
        assert ran["validation"] is None
