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
from tpl.report import find_runs
from tpl.report.find import group_runs
from tpl.report.page import write_page

RUNS = ("digits-5t/finetune-seed0", "digits-5t/afc-seed0")
SUITES = ("suite-digits.toml", "suite-baselines.toml")


def run(seed: int, cases: int, place: Path) -> Tally:
    """Report on changed runs; every tenth case writes a page."""
    folder = place / "runs"

    def attempt(draw: random.Random) -> str:
        shutil.rmtree(folder, ignore_errors=True)
        for name in RUNS:
            shutil.copytree(ROOT / "results" / name, folder / Path(name).name)
        file = draw.choice(sorted(folder.rglob("*.json")))
        if draw.random() < 0.7:
            content = json.loads(file.read_text(encoding="utf-8"))
            Case.text = f"{file.name}: {mutate_json(content, draw)}"
            file.write_text(json.dumps(content), encoding="utf-8")
        else:
            Case.text = f"{file.name}: bytes"
            file.write_bytes(mutated_bytes(file.read_bytes(), draw))
        found = find_runs([folder])
        if draw.random() < 0.1:
            write_page(found, place / "page.html", "runs")
            return "shown on a page"
        for experiment in group_runs(found.runs):
            _ = experiment.rows, experiment.run_rows()
        return "shown"

    return run_attempts(Tally("run files", seed), cases, attempt)


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
