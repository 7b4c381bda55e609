"""The gallery: its recipe draws every picture on small data, and the page shows those that are committed."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from PIL import Image

from browser import CHROMIUM
from scripts import load_script
from tpl.bench.results import RunResult
from tpl.bench.run import execute
from tpl.bench.spec import RunSpec

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_script("recipes/gallery.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that takes a moment: two tasks, hardly trained."""
    place = tmp_path_factory.mktemp("gallery") / "run"
    options = {"epochs": 1, "latent": 4, "batch_size": 64, "memory": 20}
    execute(RunSpec("digits-5t", "tpl", tasks=2, device="cpu", options=options), place)
    return place


def words(file: Path) -> str:
    """The text of an SVG file; it must be well-formed."""
    return " ".join(element.text or "" for element in ElementTree.parse(file).iter() if element.tag.endswith("text"))


def test_the_curve_ends_where_the_committed_runs_end(recipe: ModuleType, tmp_path: Path) -> None:
    (file,) = recipe.make(["accuracy-curve.svg"], tmp_path, recipe.Scene(tmp_path))
    orders = "natural", "random-1", "random-2"
    for name in ("tpl", "joint", "joint-ridge"):
        runs = [RunResult.read(recipe.RUNS / f"c100-10t-vit-tiny-{name}-{order}") for order in orders]
        last = 100 * sum(run.summary["last"] for run in runs) / len(runs)
        assert f"{name} {last:.1f}" in words(file)
    alone = 100 * RunResult.read(recipe.RUNS / "c100-10t-vit-tiny-finetune-natural").summary["last"]
    assert f"fine-tuning {alone:.1f}" in words(file)
    assert "prefers-color-scheme: dark" in file.read_text(encoding="utf-8")


def test_committed_pictures_of_runs_are_those_of_the_committed_runs(recipe: ModuleType, tmp_path: Path) -> None:
    for file in recipe.make(["accuracy-curve.svg", "auroc-line.svg", "growth.svg"], tmp_path, recipe.Scene(tmp_path)):
        again = f"run: python recipes/gallery.py --only {file.stem}"
        assert words(file) == words(IMAGES / file.name), again


def test_the_line_through_the_detectors_names_them(recipe: ModuleType, tmp_path: Path) -> None:
    (file,) = recipe.make(["auroc-line.svg"], tmp_path, recipe.Scene(tmp_path))
    assert {"vim", "mls", "oe"} <= set(words(file).split()) and "Pearson" in words(file)


def test_pictures_of_a_model(recipe: ModuleType, run: Path, tmp_path: Path) -> None:
    scene = recipe.Scene(tmp_path, run)
    densities, failure = recipe.make(["densities.webp", "failure.svg"], tmp_path / "out", scene)
    with Image.open(densities) as picture:
        assert picture.format == "WEBP" and picture.width > 500
    result = RunResult.read(run)
    right = sum(round(a * n) for a, n in zip(result.matrices["cil"][-1], result.sizes, strict=True))
    images = sum(result.sizes)
    assert f"{images - right} of {images} test images" in words(failure)


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: the pages are not pictured")
def test_pictures_of_the_pages(recipe: ModuleType, run: Path, tmp_path: Path) -> None:
    scene = recipe.Scene(tmp_path, run)
    for file in recipe.make(["serve-page.webp", "report-page.webp"], tmp_path / "out", scene):
        with Image.open(file) as picture:
            assert picture.width >= 980 and len(picture.convert("L").getcolors(256) or ()) > 50  # not an empty page


def test_without_a_browser_its_pictures_are_left_out(
    recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipe, "has_browser", lambda: False)
    assert recipe.make(["serve-page.webp"], tmp_path, recipe.Scene(tmp_path)) == []
    assert "Chromium is not installed" in capsys.readouterr().out


def test_the_page_shows_every_picture_and_its_command(recipe: ModuleType) -> None:
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    shown = re.findall(r"!\[[^\]]+\]\(images/([\w.-]+)\)", page)
    assert sorted(shown) == sorted([*recipe.PICTURES, "film.svg"])
    for name in shown:
        below = page.partition(f"(images/{name})")[2].split("![")[0]
        assert re.search(r"```bash\n(tpl|python) ", below), name
    assert sum(file.stat().st_size for file in IMAGES.iterdir()) < 1_500_000
