"""The documentation: the site builds without a warning and without the network, and its method is a method."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from handwriting import digits
from tpl import Learner
from tpl.methods import load_methods
from tpl.methods.base import METHODS
from tpl.stream import Task

ROOT = Path(__file__).parents[2]
LOADED = re.compile(
    r"<(?:script|img|iframe)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b[^>]*rel=\"?(?:stylesheet|preconnect)[^>]*//"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors, as `make docs` does."""
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package)
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def page(site: Path, name: str) -> str:
    return (site / name).read_text(encoding="utf-8")


def test_every_page_of_the_repository_is_there(site: Path) -> None:
    for document in (ROOT / "docs").glob("*.md"):
        assert (site / f"{document.stem}.html").is_file(), document
    assert "image classifiers that keep learning" in page(site, "index.html")
    assert "Where things are" in page(site, "contributing.html") and "AUROC" in page(site, "results.html")


def test_links_made_for_the_repository_lead_to_pages(site: Path) -> None:
    """README -> docs, docs -> README of a folder, docs -> a file that is no page."""
    assert 'href="learn.html"' in page(site, "index.html") and 'href="results.html"' in page(site, "index.html")
    assert 'href="choices.html"' in page(site, "results.html") and 'href="results.html"' in page(
        site, "which-method.html"
    )
    assert 'href="files/recipes/suite-digits.toml"' in page(site, "suites.html")
    assert (site / "files/recipes/suite-digits.toml").read_bytes() == (ROOT / "recipes/suite-digits.toml").read_bytes()


def test_the_reference_has_signatures_and_docstrings(site: Path) -> None:
    learner = page(site, "api/learner.html")
    assert "A classifier that learns new classes task by task." in learner
    assert "predict_proba" in learner and "Write the model directory" in learner
    assert "score_features" in page(site, "api/scores.html") and "log_probabilities" in page(site, "api/methods.html")


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    assert LOADED.search('<script src="https://cdn/x.js">') and LOADED.search(
        '<link rel="stylesheet" href="//fonts/x">'
    )
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    assert [p.name for p in pages if LOADED.search(p.read_text(encoding="utf-8"))] == []


def test_a_broken_link_ends_the_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md"):
        (tmp_path / name).write_text("# A page\n", encoding="utf-8")
    for folder in ("results", "benchmarks", "recipes"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "README.md").write_text("# A page\n", encoding="utf-8")
    hook = ROOT / "docs" / "hooks" / "repository.py"
    (tmp_path / "mkdocs.yml").write_text(
        f"site_name: x\nhooks: [{hook}]\nplugins: []\nvalidation: {{links: {{not_found: warn}}}}\n", encoding="utf-8"
    )
    (tmp_path / "docs" / "a.md").write_text("[right](../README.md) [wrong](../results/gone.md)\n", encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and "gone.md" in done.stderr and "README.md'" not in done.stderr


def method_of_guide(page: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the first Python code of a page as a module; the method in it is known until the test ends."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    load_methods()
    monkeypatch.setattr("tpl.methods.base.METHODS", METHODS.copy())
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(found[1], f"{name}.py", "exec"), module.__dict__)


def taught_on_digits(method: str, **options: Any) -> Learner:
    """Two tasks of two digits each."""
    usual: dict[str, Any] = {"epochs": 2, "batch_size": 8, "latent": 8, "lr": 0.05, "memory": 8}
    learner = Learner(method, device="cpu", **(usual | options))
    for first in (0, 2):
        learner.method.learn(Task(f"from {first}", (str(first), str(first + 1)), digits([first, first + 1], 8)))
    return learner


DIGITS = [c for c in range(4) for _ in range(4)]


def test_the_method_of_the_guide_works(monkeypatch: pytest.MonkeyPatch) -> None:
    method_of_guide("add-a-method.md", "smooth", monkeypatch)
    learner = taught_on_digits("smooth-replay", smoothing=0.3, epochs=6, lr=0.02, memory=16)
    probabilities = learner.predict_proba(digits(range(4), 4, start=30))
    assert (probabilities.argmax(axis=1) == DIGITS).mean() > 0.5 and probabilities.max() < 0.999  # never quite sure


def test_the_family_member_of_the_guide_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    method_of_guide("add-to-the-family.md", "cosine", monkeypatch)
    learner = taught_on_digits("cosine")
    images = digits(range(4), 4, start=30)
    probabilities = learner.predict_proba(images)
    assert (probabilities.argmax(axis=1) == DIGITS).mean() > 0.5
    learner.save(tmp_path / "model")
    assert (Learner.load(tmp_path / "model", device="cpu").predict_proba(images) == probabilities).all()


def test_code_quoted_by_how_tpl_works_is_the_code() -> None:
    """Every quoted block stands in the file that is named above it, line by line."""
    text = (ROOT / "docs" / "how-tpl-works.md").read_text(encoding="utf-8")
    quoted = re.findall(r'```python title="(.*?)"\n(.*?)```', text, re.DOTALL)
    assert len(quoted) >= 3
    for file, block in quoted:
        source = [line.strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        starts = [i for i, line in enumerate(source) if line == lines[0]]
        assert any(source[i : i + len(lines)] == lines for i in starts), (file, block)


def test_the_figure_of_how_tpl_works_is_drawn_by_its_script(tmp_path: Path) -> None:
    file = tmp_path / "figure.svg"
    subprocess.run([sys.executable, ROOT / "tools" / "draw_overview.py", file], check=True, timeout=120)
    assert "Task 3" in file.read_text(encoding="utf-8") and file.stat().st_size < 200_000


def test_the_architecture_page_names_every_file() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert listed is not None
    named = set(re.findall(r"[\w/]+\.py", listed[1]))
    files = [file.relative_to(ROOT / "src" / "tpl") for file in (ROOT / "src" / "tpl").rglob("*.py")]
    present = {file.name for file in files if not file.name.startswith("__") and file.name != "_version.py"}
    assert {Path(name).name for name in named} == present
