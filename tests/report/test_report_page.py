"""The page and its figures: complete, safe, and the same numbers as the tables."""

from __future__ import annotations

import dataclasses
import io
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from made_runs import make_run
from rich.console import Console

from tpl.bench.results import RunResult
from tpl.errors import TplError
from tpl.report import Findings, FoundRun, markdown, rich_table, summary_rows
from tpl.report.figures import Line, curves_svg, heatmap_svg, spread_labels
from tpl.report.page import write_page
from tpl.report.tables import results_table, to_latex

VOID = {"meta", "br", "link", "img", "input"}
SVG_NAMESPACE = "http://www.w3.org/2000/svg"


@pytest.fixture
def runs() -> dict[str, RunResult]:
    return {
        "joint": make_run("joint", 0.97, 0.0),
        "tpl": make_run("tpl", 0.95, 0.02),
        "hat": make_run("hat", 0.93, 0.05),
        "finetune": make_run("finetune", 0.99, 0.45),
    }


class Page(HTMLParser):
    """Checks that tags close in order, and gathers text, links and ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []
        self.resources: list[str] = []
        self.tags: Counter[str] = Counter()
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._see(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._see(tag, attrs)

    def _see(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for key, value in attrs:
            if key == "id":
                self.ids.append(value or "")
            if key in ("src", "href", "srcset", "data", "action"):
                self.resources.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.text.append(data)


def found(runs: dict[str, RunResult]) -> Findings:
    return Findings([FoundRun(Path("runs") / name, run) for name, run in runs.items()])


def read(runs: dict[str, RunResult], folder: Path, title: str = "A title") -> str:
    file = folder / "new" / "page.html"
    write_page(found(runs), file, title)
    return file.read_text(encoding="utf-8")


def test_page_is_whole_and_needs_nothing_else(runs: dict[str, RunResult], tmp_path: Path) -> None:
    text = read(runs, tmp_path)
    page = Page(text)
    assert set(re.findall(r"https?://[^\s\"'<>]*", text)) <= {SVG_NAMESPACE}
    links = [link for link in page.resources if not link.startswith("data:")]
    assert all(link.startswith("#") for link in links)
    assert page.tags["script"] == 1 and page.tags["link"] == 1  # the one that sorts; an empty icon, not to ask for one
    assert "@import" not in text
    assert "@font-face" not in text
    assert len(page.ids) == len(set(page.ids))
    assert all(link[1:] in page.ids for link in links)
    assert all(link in page.ids for link in re.findall(r"url\(#([^)]+)\)", text))
    assert page.tags["svg"] == 2 + len(runs)
    assert page.tags["details"] == len(runs)
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        assert ElementTree.fromstring(svg).tag == f"{{{SVG_NAMESPACE}}}svg"
    assert text == read(runs, tmp_path / "again")


def test_page_shows_the_numbers_of_the_table(runs: dict[str, RunResult], tmp_path: Path) -> None:
    text = read(runs, tmp_path)
    words = "".join(Page(text).text)
    for row in summary_rows(runs):
        for key in ("last", "aia", "til", "tp", "forgetting_last", "forgetting_aia", "forgetting_classic"):
            if row[key] is not None:
                assert f"{100 * row[key]:.2f}".replace("-", "\N{MINUS SIGN}") in words
    for piece in (
        "6 classes arrive in 3 tasks of 2",
        "1.23",
        "23.5",
        "12.3",
        "3.2",
        "class 5",
        "e" * 64,
        "b" * 64,
    ):
        assert piece in words
    assert "nan" not in words.lower()
    best = f"{100 * runs['tpl'].summary['last']:.2f}"
    assert f"<strong>{best}</strong>" in text
    assert f"<td>{100 * runs['joint'].summary['aia']:.2f}</td>" in text


def test_names_cannot_inject_markup(tmp_path: Path) -> None:
    bad = '<script>alert("x")</script>'
    run = make_run(bad, 0.9, 0.1, 1, classes=[[bad, "b"]], options={bad: bad}, order=bad, benchmark=bad)
    other = make_run("$x$", 0.8, 0.1, 1, classes=[[bad, "b"]], benchmark=bad)
    text = read({bad: run, "$x$": other}, tmp_path, title=bad)
    page = Page(text)
    assert page.tags["script"] == 1 and text.count("<script") == 1
    assert "".join(page.text).count(bad) > 5
    assert "$x$ 80.0" in "".join(page.text)


def test_one_run_of_one_task_without_joint(tmp_path: Path) -> None:
    words = "".join(Page(read({"tpl": make_run("tpl", 0.9, 0.1, tasks=1)}, tmp_path)).text)
    assert "2 classes in a single task" in words
    assert "Rect. Last" not in words
    assert "90.00" in words


def test_missing_numbers_are_dashes(runs: dict[str, RunResult], tmp_path: Path) -> None:
    broken = dataclasses.replace(
        runs["tpl"],
        summary=runs["tpl"].summary | {"last": float("nan"), "aia": None},
        matrices={kind: np.full((3, 3), np.nan) for kind in ("cil", "til", "tp")},
    )
    both = {"tpl": broken, "hat": runs["hat"]}
    words = "".join(Page(read(both, tmp_path)).text)
    assert "nan" not in words.lower()
    assert summary_rows(both)[0]["last"] is None
    assert "| tpl | \N{EN DASH} | \N{EN DASH} |" in markdown(summary_rows(both))
    assert "nan" not in curves_svg([Line("x", np.array([np.nan, 0.5, np.nan]), "continual")], [1, 2, 3], "c")


def test_cautions_and_differences_between_runs(runs: dict[str, RunResult], tmp_path: Path) -> None:
    held_out = make_run("tpl", 0.9, 0.1, seed=7, validation=0.1)
    other = make_run("tpl", 0.9, 0.1, seed=7, data={"train": "c", "test": "d"})
    words = "".join(Page(read({"tpl": runs["tpl"], "other": other, "held-out": held_out}, tmp_path)).text)
    assert "held out from the training data" in words
    assert "did not use the same images" in words
    assert "Seeds0, 7" in words
    assert "\N{DAGGER}" not in words
    seen = make_run("tpl", 0.9, 0.1, contamination=["cifar100"])
    words = "".join(Page(read({"tpl": seen}, tmp_path)).text)
    assert "The encoder was pre-trained on cifar100" in words and "tpl \N{DAGGER}" in words
    assert "\\textdagger" in to_latex(results_table(summary_rows({"tpl": seen})), "x")
    elsewhere = make_run("hat", 0.9, 0.1, order="random:1", classes=[[c + "!" for c in "ab"]] * 3)
    assert "same class orders" in "".join(Page(read({"tpl": runs["tpl"], "hat": elsewhere}, tmp_path)).text)


def test_what_cannot_be_written_or_shown(runs: dict[str, RunResult], tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    with pytest.raises(TplError, match="at least one"):
        write_page(Findings(), file, "t")
    (tmp_path / "file").touch()
    with pytest.raises(TplError, match="cannot be written"):
        write_page(found({"tpl": runs["tpl"]}), tmp_path / "file" / "page.html", "t")
    assert not file.exists()


def test_rows_are_ordered_raw_and_judged_without_bounds(runs: dict[str, RunResult]) -> None:
    rows = summary_rows(runs)
    assert [row["name"] for row in rows] == ["finetune", "tpl", "hat", "joint"]
    assert rows[1]["last"] == runs["tpl"].summary["last"]
    assert rows[1]["forgetting_last"] == runs["tpl"].against(runs["joint"])["forgetting_last"]
    assert rows[3]["forgetting_last"] is None
    lines = markdown(rows).splitlines()
    assert len(lines) == 6
    assert len({line.count("|") for line in lines}) == 1
    assert lines[3].count("**") == 2 * 7
    assert not any("**" in lines[n] for n in (2, 4, 5))
    assert "finetune (lower bound)" in lines[2]
    assert "**" not in markdown(summary_rows({"tpl": runs["tpl"], "joint": runs["joint"]}))
    assert markdown(summary_rows({"a|b": runs["tpl"]})).splitlines()[2].startswith("| a\\|b |")


def test_terminal_table_fits(runs: dict[str, RunResult]) -> None:
    rows = summary_rows(runs | {"[bold]x": make_run("hat", 0.9, 0.1)})

    def lines(width: int) -> list[str]:
        screen = io.StringIO()
        Console(width=width, file=screen).print(rich_table(rows, width=width))
        return screen.getvalue().splitlines()

    shown = {row["name"]: f"{100 * row['last']:.2f}" for row in rows}
    for width in (60, 80, 200):
        text = "\n".join(lines(width))
        assert all(name in text and last in text for name, last in shown.items())
        assert "…" not in text
        assert max(len(line) for line in lines(width)) <= width
    assert "kB" in "\n".join(lines(200))
    assert all(column.justify == "right" for column in rich_table(rows).columns[1:])


def numbers(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{{{SVG_NAMESPACE}}}text")]


def test_heatmap_numbers_and_scale() -> None:
    small = heatmap_svg(make_run("tpl", 0.9, 0.1).matrices["cil"], "h", "tpl")
    assert {"90.0", "80.0", "89.0"} <= set(numbers(small))
    assert "currentColor" in small
    assert "#010203" not in small
    assert "<metadata" not in small
    large = heatmap_svg(make_run("tpl", 0.9, 0.01, tasks=12).matrices["cil"], "h", "tpl")
    assert not any("." in text for text in numbers(large))
    low, high = (heatmap_svg(np.array([[value]]), "h", "x") for value in (0.0, 1.0))
    assert re.findall("fill: #......", low) != re.findall("fill: #......", high)
    assert "100" in numbers(high)


def test_labels_keep_apart_and_near() -> None:
    wanted = np.array([90.0, 20.0, 90.0, 91.0, 99.0])
    placed = spread_labels(wanted, 4.0, 0.0, 100.0)
    assert np.diff(np.sort(placed)).min() >= 4 - 1e-9
    assert placed[1] == 20
    assert placed.max() <= 100
    assert (np.argsort(placed, kind="stable") == np.argsort(wanted, kind="stable")).all()
    many = curves_svg([Line(f"run {n}", np.array([0.9, 0.9]), "continual") for n in range(30)], [1, 2], "c")
    assert sum(text.startswith("run ") for text in numbers(many)) == 30
