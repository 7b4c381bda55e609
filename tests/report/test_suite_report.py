"""Reports of whole suites: means over orders and seeds, the paper's numbers beside them, what moved, all formats."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import LEVELS, found, in_order, make_run, write_run
from PIL import Image
from typer.testing import CliRunner

from browser import CHROMIUM, Browser
from tpl import TplError, cli
from tpl.bench.results import RunResult
from tpl.report import Findings, FoundRun, find_runs, group_runs
from tpl.report.compare import BETTER
from tpl.report.page import render
from tpl.report.paper import paper_values
from tpl.report.tables import escape, overview, results_table, to_latex, to_markdown

RESULTS = Path(__file__).parents[2] / "results" / "c100"


def recorded(run: RunResult) -> RunResult:
    """The same run with task confusion and class accuracies, as runs are written today."""
    confusion = [[8, 1, 1], [0, 11, 0], [6, 0, 6]]
    classes = [[0.9, 0.8], [0.85, 0.8, 1.0, 0.7], [0.5, 0.8, 0.95, 0.7, 0.9, None]]
    return dataclasses.replace(run, task_confusion=confusion, class_accuracy=classes)


def call(*arguments: str | Path) -> Any:
    result = CliRunner().invoke(cli.app, ["report", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods in three class orders and joint training in the first, one run of it not finished."""
    folder = tmp_path_factory.mktemp("suite") / "new"
    for number, level in enumerate(LEVELS):
        write_run(folder / f"tpl-{number}", recorded(in_order("tpl", number, level)))
        write_run(folder / f"hat-{number}", in_order("hat", number, level - 0.1))
    write_run(folder / "joint", in_order("joint", 0, 0.97, 0.0))
    write_run(folder / "digits", make_run("tpl", 0.9, 0.1, benchmark="digits-5t"))
    (write_run(folder / "half", make_run("hat", 0.5, 0.1)) / "results.json").unlink()
    return folder


# Sorting


def test_runs_are_averaged_over_orders_and_seeds_and_nothing_else() -> None:
    runs = [in_order("tpl", n, level) for n, level in enumerate(LEVELS)]
    again = in_order("tpl", 0, 0.8, seed=1)
    other = in_order("tpl", 0, 0.7, options={"lr": 0.1, "memory": 100})
    experiments = group_runs(
        found(*runs, again, other, in_order("tpl", 1, 0.6, encoder={"name": "else", "sha256": "f"}))
    )
    assert [experiment.title for experiment in experiments] == ["made-up, compact", "made-up, else"]
    assert {group.name: len(group.runs) for group in experiments[0].groups} == {"tpl, lr 0.05": 4, "tpl, lr 0.1": 1}
    row = experiments[0].rows[0]
    lasts = [run.summary["last"] for run in (*runs, again)]
    assert row["last"] == pytest.approx(np.mean(lasts))
    assert row["last_std"] == pytest.approx(np.std(lasts, ddof=1))
    assert row["auroc"] == pytest.approx(np.mean([0.92, 0.95, 0.89, 0.82]))


def test_a_repeated_run_is_never_averaged_in() -> None:
    run = make_run("tpl", 0.9, 0.1)
    apart = group_runs([*found(run, folder="a"), *found(run, folder="b")])[0]
    assert [group.name for group in apart.groups] == ["tpl (a)", "tpl (b)"]
    together = group_runs(found(run, run))[0]
    assert [len(group.runs) for group in together.groups] == [1, 1]


def test_other_tasks_and_held_out_images_are_other_scenes() -> None:
    runs = make_run("tpl", 0.9, 0.1), make_run("tpl", 0.9, 0.1, tasks=2), make_run("tpl", 0.9, 0.1, validation=0.2)
    titles = [experiment.title for experiment in group_runs(found(*runs))]
    assert titles == [
        "made-up, compact, 3 tasks of 2 classes",
        "made-up, compact, 2 tasks of 2 classes",
        "made-up, compact, 3 tasks of 2 classes, 20 % held out",
    ]


def test_forgetting_is_measured_by_the_joint_run_over_the_same_tasks() -> None:
    mine, joint = in_order("tpl", 0, 0.9, seed=3), in_order("joint", 0, 0.97, 0.0)
    other = in_order("joint", 0, 0.5, 0.0, encoder={"name": "else", "sha256": "f"})
    experiment = group_runs(found(mine, joint, other))[0]
    assert experiment.rows[0]["forgetting_last"] == mine.against(joint)["forgetting_last"]
    lacking = group_runs(found(mine, in_order("tpl", 1, 0.9), joint))[0]
    assert lacking.rows[0]["forgetting_last"] is None  # a mean over half of them would mislead
    assert [row["forgetting_last"] is None for row in lacking.run_rows()] == [False, True, True]
    assert "tpl lack some" in render(Findings(found(mine, in_order("tpl", 1, 0.9), joint)), [lacking], "t")


def test_the_papers_numbers_stand_beside_runs_that_fit_them() -> None:
    experiment = group_runs(find_runs([RESULTS / "c100-10t-vit-tiny-tpl-natural"]).runs)[0]
    printed = paper_values(experiment.groups[0])
    assert (printed["last"].text, printed["til"].text) == ("76.79", "95.36")
    assert printed["last"].value == pytest.approx(0.7679)
    assert printed["last"].row == "encoders/vit-tiny/c100-10t"
    table = results_table(experiment.rows, paper={experiment.groups[0].name: printed})
    assert table.head[1:4] == ("Last (%)", "paper", "AIA (%)") and table.rows[0][2].text == "76.79"
    run = experiment.runs[0]
    fewer = dataclasses.replace(
        run.result, description=run.description | {"options": run.description["options"] | {"memory": 20}}
    )
    assert paper_values(group_runs([FoundRun(run.place, fewer)])[0].groups[0]) == {}  # another memory, another protocol


def test_methods_by_benchmarks() -> None:
    runs = [in_order("tpl", 0, 0.9), in_order("hat", 0, 0.8), in_order("tpl", 0, 0.7, benchmark="other")]
    table = overview(group_runs(found(*runs)))
    assert table is not None and table.head == ("Method", "made-up Last", "made-up AIA", "other Last", "other AIA")
    assert [[cell.text for cell in row] for row in table.rows][1][3:] == ["\N{EN DASH}"] * 2
    assert table.rows[0][3].text == f"{100 * runs[2].summary['last']:.2f}"


# Formats


def test_latex_survives_any_name() -> None:
    nasty = 'a_b&50%$x$#{~^\\}<|>"犬é\n['
    experiment = group_runs(found(make_run(nasty, 0.9, 0.1), make_run("hat", 0.8, 0.1)))[0]
    text = to_latex(results_table(experiment.rows, nasty), "tab:x")
    plain = re.sub(r"\\[\\&%$#_{}]", "", text)
    columns = {line.count("&") for line in plain.splitlines() if line.endswith("\\\\") or "&" in line}
    assert columns == {len(results_table(experiment.rows).head) - 1}
    assert plain.count("{") == plain.count("}") and plain.count("$") % 2 == 0
    assert not re.search(r"[%#_~^<>|\"犬]", plain)
    assert "\\toprule" in text and "\\textbf{" in text and escape("é 犬 ±") == "é ? $\\pm$"


def test_markdown_survives_any_name() -> None:
    experiment = group_runs(found(make_run("a|b*c*`<i>[x](y) _z_", 0.9, 0.1)))[0]
    line = to_markdown(results_table(experiment.rows)).splitlines()[2]
    assert line.startswith(r"| a\|b\*c\*\`\<i>\[x\](y) \_z\_ | ")


def test_a_name_sends_no_codes_to_a_terminal() -> None:
    experiment = group_runs(found(make_run("a\x1b[2J\x9b\u202eb", 0.9, 0.1)))[0]
    for text in (to_markdown(results_table(experiment.rows)), to_latex(results_table(experiment.rows), "tab:x")):
        assert "a?" in text and text.replace("\n", "").isprintable()


def test_a_suite_in_all_formats(suite: Path, tmp_path: Path) -> None:
    arguments = ["--out", tmp_path / "page.html", "--markdown", tmp_path / "t.md"]
    arguments += ["--latex", tmp_path / "deep" / "t.tex"]
    answer = json.loads(call(suite, *arguments, "--figures", tmp_path / "figures", "--json").stdout)
    assert [table["title"] for table in answer["tables"]] == ["digits-5t, compact", "made-up, compact"]
    rows = {row["name"]: row for row in answer["tables"][1]["rows"]}
    lasts = [in_order("tpl", n, level).summary["last"] for n, level in enumerate(LEVELS)]
    assert rows["tpl"]["last"] == pytest.approx(np.mean(lasts)) and rows["tpl"]["runs"] == 3
    shown = f"{100 * np.mean(lasts):.2f} ± {100 * np.std(lasts, ddof=1):.2f}"
    assert len(answer["runs"]) == 8 and {row["order"] for row in answer["runs"]} >= {"natural", "random:2"}
    page, text, latex = ((tmp_path / name).read_text("utf-8") for name in ("page.html", "t.md", "deep/t.tex"))
    assert f"<strong>{shown}</strong>" in page and f"**{shown}**" in text
    assert "\\textbf{" + shown.replace("±", "$\\pm$") + "}" in latex
    assert text.count("### ") == latex.count("\\begin{table}") == 5
    assert "1 run\n" in page and str(suite / "half") in page  # what is not finished is named
    pictures = [Path(picture) for picture in answer["figures"]]
    names = {picture.name for picture in pictures}
    assert {"curves-made-up-compact.png", "auroc-made-up-compact.svg", "matrix-made-up-compact-tpl.svg"} <= names
    assert {"confusion-made-up-compact-tpl.png"} <= names and "confusion-made-up-compact-hat.png" not in names
    for picture in pictures:
        if picture.suffix == ".png":
            with Image.open(picture) as image:
                assert image.width > 700
    assert "#0067a5" in (tmp_path / "figures" / "curves-made-up-compact.svg").read_text()
    assert call(suite, *arguments[:2], "--markdown", "-").stdout == text


def test_the_page_shows_what_is_recorded_and_says_what_is_not(suite: Path) -> None:
    findings = find_runs([suite])
    page = html.unescape(render(findings, group_runs(findings.runs), "Title"))
    words = " ".join(re.sub(r"<style>.*?</style>|<script>.*?</script>|<[^>]+>", " ", page, flags=re.DOTALL).split())
    assert "Not recorded by runs of hat; joint: they are older than this figure" in words
    assert "Assigned to their own task, percent: 80.0, 100.0, 50.0." in page
    # The first class of each order fell from 0.9 to 0.5; the last has no test images.
    classes = words.split("Classes The accuracy")[1].split("AUROC and accuracy")[0]
    assert "0-0 90.00 50.00 40.00" in words and "0-4 " in words and "0-5 " not in classes
    assert math.isfinite(float(words.split("Pearson's r = ")[1].split(";")[0]))
    assert "Densities of the features" not in words  # no outputs are stored: there is nothing to show
    assert words.count("Network M") == 2 and "GPU peak" not in words


def test_what_moved_is_on_the_page_and_in_json(suite: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    for number, level in enumerate(LEVELS):
        write_run(old / str(number), in_order("tpl", number, level - (0.05, 0.06, 0.07)[number]))
    page, table = tmp_path / "page.html", tmp_path / "t.md"
    answer = json.loads(call(suite, "--against", old, "--out", page, "--markdown", table, "--json").stdout)
    rows = {row["quantity"]: row for row in answer["comparison"]["differences"]}
    assert rows["last"]["verdict"] == BETTER and rows["last"]["pairs"] == 3
    assert rows["last"]["interval"][0] < rows["last"]["difference"] == pytest.approx(0.06)
    assert len(answer["comparison"]["only_here"]) == 5 and answer["comparison"]["only_there"] == []
    assert '<td class="text better">better</td>' in page.read_text("utf-8")
    assert "| +6.00 |" in table.read_text("utf-8") and "**better**" in table.read_text("utf-8")
    assert "within noise" in call(suite, "--against", suite, "--out", page).stdout


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(TplError, match="no such folder"):
        find_runs([tmp_path / "absent"])
    with pytest.raises(TplError, match="name run directories or the --out of a suite"):
        find_runs([tmp_path])
    place = write_run(tmp_path / "run", make_run("tpl", 0.9, 0.1))
    (place / "run.json").write_text('{"method": "tpl"}')
    with pytest.raises(TplError, match="run.json lacks benchmark, options"):
        find_runs([place])
    (place / "results.json").write_text('{"matrices": 3}')
    with pytest.raises(TplError, match="holds no finished run"):
        find_runs([place])
    odd = dataclasses.replace(make_run("tpl", 0.9, 0.1), task_confusion=[[1]])
    with pytest.raises(TplError, match="other tasks than run.json"):
        find_runs([write_run(tmp_path / "odd", odd)])
    with pytest.raises(TplError, match="Only one of --json"):
        CliRunner().invoke(cli.app, ["report", str(place), "--json", "--latex", "-"], catch_exceptions=False)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_the_page_in_a_browser(suite: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    call(suite, "--against", suite, "--out", page)
    with Browser(tmp_path / "profile") as browser:
        browser.call("Network.enable")
        browser.call("Network.setBlockedURLs", urls=["http://*", "https://*"])
        for width, dark in ((1280, False), (390, True)):
            browser.open(page.as_uri(), width, dark=dark)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
        entries = browser.evaluate("performance.getEntriesByType('resource').map((e) => e.name)")
        assert [name for name in entries if not name.startswith("data:")] == []
        names = "[...document.querySelectorAll('#s2 ~ section .results')][0].tBodies[0].innerText"
        first = f"{names}.trim().split(/\\s/)[0]"
        assert browser.evaluate(first) == "hat"
        browser.evaluate("document.querySelector('#s2 ~ section .results .titles th:nth-child(2) button').click()")
        assert browser.evaluate(first) == "joint"  # by Last, the largest first
        browser.evaluate("document.querySelector('#s2 ~ section .results .titles th:nth-child(2) button').click()")
        assert browser.evaluate(first) == "hat"
        assert browser.console == []
