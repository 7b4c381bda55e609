"""The committed runs, found by the names of their directories.

A run counts for the tables of its benchmark if its directory is results/*/BENCHMARK-ENCODER-NAME-ORDER, with a NAME of
`ROWS` or of another table, and the order as run.json has it (`random:1` is `random-1`).
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tpl.bench.bounds import BOUNDS, trained_to_the_end
from tpl.bench.results import RunResult
from tpl.methods.bank.bank import FULL

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
RUNS = RESULTS / "c100"
ORDERS = "natural", "random-1", "random-2"
SETTINGS = {
    "c100-10t-vit-tiny": "C100-10T, ViT-tiny",
    "c100-20t-vit-tiny": "C100-20T, ViT-tiny",
    "c100-10t-deit-tiny": "C100-10T, DeiT-tiny",
    "c100-20t-deit-tiny": "C100-20T, DeiT-tiny",
}
ORDER = r"natural|random-\d+|[^-]+"  # a class order as directories name it
FRONT = "vit-tiny"  # the encoder of the front page
TITLES = {"vit-tiny": "ViT-tiny", "deit-tiny": "DeiT-tiny", "vit-small": "ViT-S", "deit-small": "DeiT-S"}  # of encoders
BENCHMARKS = {  # and another one over the same images: joint training on all classes knows of no tasks
    "c10-5t": "c10-5t",
    "c100-10t": "c100-20t",
    "c100-20t": "c100-10t",
    "c100-50t": "c100-10t",
    "t-5t": "t-10t",
    "t-10t": "t-5t",
    "t-100t": "t-10t",
}
ROWS = {  # NAME of a run directory, and what is said about it besides the method
    "joint-ridge": "upper bound",
    "joint": "upper bound",
    "tpl-plus-grown": "the default: adapters grow",
    "tpl-plus": "adapters of one size",
    "tpl-plus-former": "former defaults: one view",
    "tpl": "",
    "tpl-paper": "the paper's own schedule and calibration",
    "row": "",
    "more": "",
    "hat": "",
    "ranpac-first": "adapted to the first task, as published",
    "ranpac-best": "the same, ridge chosen on held-out images",
    "ranpac-none": "encoder as it is",
    "ranpac": "encoder as it is, ridge chosen on held-out images",
    "anacp": "",
    "klda": "",
    "slca": "",
    "ease": "",
}
KINDS = "-first", "-best", "-none", "-grown", "-former", "-paper"  # ends of a NAME, no part of the method
BY_DEFAULT = {"ranpac": "ranpac-first", "tpl-plus": "tpl-plus-grown"}  # NAME of the runs with a method's own options
PARTS = "expert", "bank"  # of tpl-plus, which are measured alone, too
GROWING = {"tpl-plus": "tpl-plus-grown", "tpl-plus-grown": "tpl-plus"}  # equal while adapters are not full
FORMER = "tpl-plus-former"  # runs from before `expert_views=several`, `others=per_class` and w = 4 became defaults


def runs_of(setting: str, name: str) -> list[RunResult]:
    """The runs of one NAME in a setting ("c100-10t-vit-tiny"), one a class order, as far as there are any."""
    return [run for _, run in runs_named(setting, name)]


def encoders_of(benchmark: str) -> list[str]:
    """The encoders that have runs on a benchmark, by their names in directories; those of the paper's order first."""
    names = "|".join(map(re.escape, sorted(ROWS, key=len, reverse=True)))
    pattern = re.compile(rf"{benchmark}-(.+?)-(?:{names})-(?:{ORDER})")
    found = {match[1] for place in RESULTS.glob(f"*/{benchmark}-*") if (match := pattern.fullmatch(place.name))}
    return sorted((name for name in found if not name.startswith("resnet")), key=lambda n: (n != FRONT, n))


def rows_of(benchmark: str, encoder: str, name: str) -> list[tuple[Path, RunResult]]:
    """The runs of one row on test images, one a class order, with their directories.

    A run of `tpl-plus` whose adapters were never full is the same whether they may grow or not: where one of the two
    rows has no runs, it takes those of the other.
    """
    found = runs_named(f"{benchmark}-{encoder}", name)
    if not found and name in GROWING:
        found = runs_named(f"{benchmark}-{encoder}", GROWING[name])
        found = found if all((run.summary["capacity"] or {}).get("units", 1) < FULL for _, run in found) else []
    return found


def runs_named(setting: str, name: str) -> list[tuple[Path, RunResult]]:
    """The runs on test images in directories of this NAME, with the directories."""
    found = []
    for place in sorted(RESULTS.glob(f"*/{setting}-{name}-*")):
        order = place.name.removeprefix(f"{setting}-{name}-")
        if re.fullmatch(ORDER, order) and (place / "results.json").is_file():
            run = RunResult.read(place)
            if order == str(run.description["order"]).replace(":", "-") and run.description["validation"] is None:
                found.append((place, run))
    return found


def natural_run(benchmark: str, name: str) -> tuple[Path, RunResult] | None:
    """The run of a row in the natural class order, with its directory."""
    return next((row for row in rows_of(benchmark, FRONT, name) if row[1].description["order"] == "natural"), None)


def variants(place: Path) -> dict[str, dict[str, Any]]:
    """What `tpl ablate` measured on a run, by the variant's name."""
    rows = json.loads((place / "ablate.json").read_text())
    # Earlier versions had other names for these options.
    return {row["variant"].replace("covered =", "mass =").replace("weight =", "expert weight ="): row for row in rows}


def part_lasts(found: Sequence[tuple[Path, RunResult]], part: str) -> list[dict[str, float | None]]:
    """Accuracies of one part of tpl-plus in every run: measured with the run, or after it by `tpl ablate`."""
    if all(part in run.part_matrices for _, run in found):
        return [run.parts()[part].summary for _, run in found]
    if all((place / "ablate.json").is_file() for place, _ in found):
        return [{"last": variants(place)[f"{part} alone"]["last"]} for place, _ in found]
    return []


def bound_last(benchmark: str, encoder: str) -> float | None:
    """Last of the better upper bound over the same images; None without one that was trained to the end."""
    lasts = []
    for name, where in product(BOUNDS, (benchmark, BENCHMARKS[benchmark])):
        runs = [run for _, run in rows_of(where, encoder, name) if trained_to_the_end(run.description)]
        lasts += [statistics.mean(run.summary["last"] for run in runs)] if runs else []
    return max(lasts, default=None)
