"""Brings pages that lie outside docs/ into the site, and turns links between files into links between pages.

Links are written for the repository, where most people read them. On the site README.md is the front page, a notebook
is a page, and a file that is no page, such as a recipe, is offered for download.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from notebooks import page_of

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "results/README.md": "results.md",
    "benchmarks/README.md": "benchmarks.md",
    "recipes/README.md": "recipes.md",
    "notebooks/README.md": "notebooks.md",
}
NOTEBOOKS = "notebooks/"
SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)\s#]+)")  # [text](here), but neither #anchor nor https:


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's pages, and the files that pages link to."""
    root = _root(config)
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(root / source)))
    for file in sorted((root / NOTEBOOKS).glob("*.ipynb")):
        download = f"files/{NOTEBOOKS}{file.name}"
        files.append(File.generated(config, f"{NOTEBOOKS}{file.stem}.md", content=page_of(file, f"../{download}")))
        files.append(File.generated(config, download, abs_src_path=str(file)))
    for file in list(files.documentation_pages()):
        for target in _targets(file.content_string, file.src_uri):
            place = _place(target, root)
            if place is not None and files.get_file_from_path(place) is None and not target.startswith("docs/"):
                files.append(File.generated(config, place, abs_src_path=str(root / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make every link to a file of the repository one to its place on the site; broken ones are left to MkDocs."""
    here = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        place = _place(_resolved(link[0], here), _root(config))
        return link[0] if place is None else posixpath.relpath(place, posixpath.dirname(here) or ".")

    return LINK.sub(moved, markdown)


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent


def _targets(markdown: str, page: str) -> Iterator[str]:
    """Files of the repository that a page links to."""
    for link in LINK.findall(markdown):
        yield _resolved(link, page)


def _resolved(link: str, page: str) -> str:
    """A link of a page as a path within the repository."""
    source = SOURCES.get(page) or (page if page.startswith(NOTEBOOKS) else f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _place(target: str, root: Path) -> str | None:
    """Where a file of the repository is on the site; None if there is no such file."""
    if (root / target).is_dir():
        target = f"{target}/README.md"
    if target.startswith("..") or not (root / target).is_file():
        return None
    if target.startswith(NOTEBOOKS) and target.endswith(".ipynb"):
        return f"{target.removesuffix('.ipynb')}.md"
    return PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else f"files/{target}")
