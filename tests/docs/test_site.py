"""The documentation: the site builds without a warning and without the network, and its method is a method."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from browser import CHROMIUM, Browser
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


class Links(HTMLParser):
    """Where a page can be entered, and where it leads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {"", "__skip"}
        self.targets: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif name in ("href", "src") and value and not re.match(r"[a-z]+:|//", value):
                self.targets.add(value)


def dead_links(site: Path) -> list[str]:
    """Links of the built pages to files or anchors that are not there."""
    pages = {file.resolve(): Links(file.read_text(encoding="utf-8")) for file in site.rglob("*.html")}
    dead = []
    for file, links in pages.items():
        if file.name == "404.html":  # served at any address, so its links are absolute
            continue
        for target in sorted(links.targets):
            address, _, anchor = target.partition("#")
            place = (file.parent / unquote(address.partition("?")[0])).resolve() if address else file
            if not place.exists() or (place in pages and unquote(anchor) not in pages[place].anchors):
                dead.append(f"{file.relative_to(site)}: {target}")
    return dead


def test_no_link_of_the_site_is_dead(site: Path, tmp_path: Path) -> None:
    assert dead_links(site) == []
    (tmp_path / "a.html").write_text('<a href="b.html#x"></a><a href="c.html"></a><a href="#y"></a>', encoding="utf-8")
    (tmp_path / "b.html").write_text('<p id="z"><img src="https://elsewhere/x.png">', encoding="utf-8")
    assert dead_links(tmp_path) == ["a.html: #y", "a.html: b.html#x", "a.html: c.html"]


def test_the_first_menu_is_short_and_every_page_is_below_it(site: Path) -> None:
    menu = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), yaml.BaseLoader)["nav"]
    names = [next(iter(entry)) for entry in menu]
    assert names == ["Start", "Learn from folders", "How it works", "Methods", "Results", "Reference"]
    listed = {*re.findall(r"[\w./-]+\.md", str(menu))}
    assert {file.relative_to(site).with_suffix(".md").as_posix() for file in site.rglob("*.html")} - {
        "404.md"
    } == listed


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_search_works_from_a_folder_and_nothing_is_wider_than_a_phone(site: Path, tmp_path: Path) -> None:
    typed = "const q = document.querySelector('.md-search__input'); q.focus(); q.value = 'likelihood ratio';"
    with Browser(tmp_path / "profile") as browser:
        browser.open(f"file://{site}/index.html", width=390)
        browser.evaluate("document.querySelector('[data-md-toggle=search]').click()")
        browser.evaluate(f"(() => {{ {typed} q.dispatchEvent(new KeyboardEvent('keyup', {{bubbles: true}})); }})()")
        browser.wait("document.querySelectorAll('.md-search-result__item').length > 2")
        assert browser.console == []
        for name in ("index", "results", "commands", "notebooks/method", "api/learner"):
            browser.open(f"file://{site}/{name}.html", width=390)
            assert browser.evaluate("document.documentElement.scrollWidth") <= 390, name


def test_a_notebook_is_a_page_with_its_outputs(site: Path) -> None:
    text = page(site, "notebooks/photos.html")
    assert "Same answers: True" in text and "data:image/png;base64" in text and 'href="../learn.html"' in text
    assert 'href="../files/notebooks/photos.ipynb"' in text and 'href="notebooks/photos.html"' in page(
        site, "notebooks.html"
    )


def test_a_broken_link_ends_the_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md"):
        (tmp_path / name).write_text("# A page\n", encoding="utf-8")
    for folder in ("results", "benchmarks", "recipes", "notebooks"):
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
