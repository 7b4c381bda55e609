"""Run directories and suite files with changed values or bytes."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from torture.fuzz import Case, run_attempts
from torture.mutations import mutate_json, mutated_bytes
from torture.small_models import ROOT
from torture.tally import Tally
from tpl.bench.suite import check_suite, read_suite
from tpl.bench.suite_run import read_states
from tpl.report import find_runs
from tpl.report.find import group_runs
from tpl.report.page import write_page

RUNS = ("digits-5t/finetune-seed0", "digits-5t/afc-seed0")
PAGES = 0.01  # share of the cases that write a page, which takes a second
SUITES = ("suite-digits.toml", "suite-baselines.toml")


def run(seed: int, cases: int, place: Path) -> Tally:
    """Report on changed runs, and ask for the state of their suite; some write a page."""
    folder = place / "runs"
    for name in RUNS:
        shutil.copytree(ROOT / "results" / name, folder / Path(name).name)
    _half_done(folder)
    contents = {file: file.read_bytes() for file in sorted(folder.rglob("*.json*"))}

    def attempt(draw: random.Random) -> str:
        file = draw.choice(list(contents))
        try:
            Case.text = f"{file.parent.name}/{file.name}: {_changed(file, contents[file], draw)}"
            return _use(folder, place, draw)
        finally:
            file.write_bytes(contents[file])

    return run_attempts(Tally("run files", seed), cases, attempt)


def _half_done(folder: Path) -> None:
    """A suite's list of runs, with one that failed and one that was cut off."""
    names = [Path(name).name for name in RUNS]
    runs = [{"method": "tpl", "benchmark": "digits-5t", "order": "natural", "seed": 0, "directory": n} for n in names]
    runs += [runs[0] | {"directory": name} for name in ("failed", "cut-off")]
    (folder / "suite.json").write_text(json.dumps({"suite": {}, "runs": runs}), encoding="utf-8")
    for name in ("failed", "cut-off"):
        (folder / name).mkdir()
    (folder / "failed" / "failure.json").write_text(json.dumps({"error": "no", "time": 1.0}), encoding="utf-8")
    lines = (
        {"kind": "run", "time": 1.0, "images": [10, 10], "learned": 0},
        {"kind": "epoch", "time": 2.0, "epoch": 1, "epochs": 4},
        {"kind": "stage", "time": 3.0, "stage": 0},
    )
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / "cut-off" / "events.jsonl").write_text(text, encoding="utf-8")
    (folder / "cut-off" / "run.json").write_text(json.dumps({"method": "tpl", "seed": 0}), encoding="utf-8")


def _changed(file: Path, content: bytes, draw: random.Random) -> str:
    """Change a file; returns what was done."""
    if draw.random() < 0.3:
        file.write_bytes(mutated_bytes(content, draw))
        return "bytes"
    if file.suffix == ".jsonl":
        lines = content.decode().splitlines()
        at = draw.randrange(len(lines))
        event = {"line": json.loads(lines[at])}
        said = mutate_json(event, draw)
        lines[at] = json.dumps(event.get("line"))
        file.write_text("\n".join(lines), encoding="utf-8")
        return said
    whole = json.loads(content)
    said = mutate_json(whole, draw)
    file.write_text(json.dumps(whole), encoding="utf-8")
    return said


def _use(folder: Path, place: Path, draw: random.Random) -> str:
    if draw.random() < 0.3:
        for state in read_states(folder):
            _ = state.to_dict(), state.progress(100.0), state.doing(), state.label
        return "state of a suite"
    found = find_runs([folder])
    if draw.random() < PAGES:
        write_page(found, place / "page.html", "runs")
        return "shown on a page"
    for experiment in group_runs(found.runs):
        _ = experiment.rows, experiment.run_rows()
    return "shown"


def run_suites(seed: int, cases: int, place: Path) -> Tally:
    """Check changed suites."""
    texts = [(ROOT / "recipes" / name).read_bytes() for name in SUITES]
    file = place / "suite.toml"

    def attempt(draw: random.Random) -> str:
        file.write_bytes(mutated_bytes(draw.choice(texts), draw))
        Case.text = f"{file.stat().st_size} bytes"
        check_suite(read_suite(file)).specs()
        return "accepted"

    return run_attempts(Tally("suites", seed), cases, attempt)
