"""The committed results: their tables say what the runs say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tpl.methods.plus import PlusConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cifar100_tables", ROOT / "recipes/cifar100_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_what_the_runs_say(recipe: ModuleType) -> None:
    page = (ROOT / "results/README.md").read_text(encoding="utf-8")
    assert recipe.filled(page) == page
    (figure,) = {line.split("|")[3] for line in recipe.beyond_table() if line.startswith("| C100-10T, ViT-tiny")}
    altered = page.replace(figure, " 99.99 ")
    assert altered != page and recipe.filled(altered) == page


def test_a_page_without_a_mark_is_refused(recipe: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no mark <!-- table: tpl -->"):
        recipe.filled("# Results\n")


def test_auto_is_shown_as_it_is_by_default(recipe: ModuleType) -> None:
    assert f"passes = auto, covered = {PlusConfig().covered}" == recipe.AUTO


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
