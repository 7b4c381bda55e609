"""The digits in five tasks: bounds, tpl-plus, TPL and RanPAC in three seeds, and every method beside the paper's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from page_tables.baselines import beside_the_paper, ranking
from page_tables.cells import behind, shown, table
from page_tables.runs import RESULTS
from tpl.bench.bounds import BOUNDS, trained_to_the_end
from tpl.bench.results import RunResult
from tpl.report.paper import Ranking

DIGITS = RESULTS / "digits-5t"
IN_SEEDS = "joint-ridge", "joint", "tpl-plus", "tpl", "ranpac", "finetune"  # methods with a run for each seed
SEEDS = range(3)
PARTS = "expert", "bank"  # of tpl-plus


def seeds_of(method: str) -> list[RunResult]:
    """The runs of a method, one a seed."""
    return [RunResult.read(DIGITS / f"{method}-seed{seed}") for seed in SEEDS]


def digits_bound() -> float:
    """Last of the better upper bound, the mean over seeds."""
    bounds = [seeds_of(method) for method in BOUNDS]
    assert all(trained_to_the_end(run.description) for runs in bounds for run in runs)
    return max(statistics.mean(float(run.summary["last"]) for run in runs) for runs in bounds)


def digits_table() -> list[str]:
    """Last in every seed, and the means of all accuracies and of what is missing to the better bound."""
    bound = digits_bound()

    def cells(found: Sequence[Mapping[str, Any]], method: str) -> list[str]:
        seeds = [f"{100 * each['last']:.1f}" for each in found]
        means = [shown([each[key] for each in found], 1) for key in ("last", "aia", "til")]
        return [*seeds, *means, behind(bound, [each["last"] for each in found], method)]

    def rows() -> Iterator[list[str]]:
        for method in IN_SEEDS:
            runs = seeds_of(method)
            name = f"`{method}`, upper bound" if method in BOUNDS else f"`{method}`"
            yield [name, *cells([run.summary for run in runs], method)]
            for part in PARTS if method == "tpl-plus" else ():
                alone = [run.parts()[part].summary for run in runs]
                yield [f"&emsp;`tpl-plus`, {part} alone", *cells(alone, method)]

    seeds = " | ".join(f"seed {seed}" for seed in SEEDS)
    return table(f"method | {seeds} | Last, mean | AIA | TIL | rectified forgetting", rows(), 1)


def digits_ranking() -> Ranking:
    """Our order of the methods with seed 0 against the paper's on another data set of ten classes in five tasks."""
    return ranking(sorted(DIGITS.glob("*-seed0")), "c10-5t")


def digits_methods_table() -> list[str]:
    """Every method with seed 0, the best first."""
    places = {place.method: place for place in digits_ranking().places}
    runs = {place.name.removesuffix("-seed0"): RunResult.read(place) for place in DIGITS.glob("*-seed0")}

    def rows() -> Iterator[list[str]]:
        for method, run in sorted(runs.items(), key=lambda entry: (-entry[1].summary["last"], entry[0])):
            found = run.summary
            numbers = [f"{100 * found[key]:.1f}" for key in ("last", "aia", "til")]
            size = f"{(found['network_bytes'] + found['memory_bytes']) / 1e6:.1f}"
            name = f"`{method}`, upper bound" if method in BOUNDS else f"`{method}`"
            yield [name, *numbers, size, *beside_the_paper(places.get(method))]
            for part in PARTS if method == "tpl-plus" else ():
                alone = run.parts()[part].summary
                numbers = [f"{100 * alone[key]:.1f}" for key in ("last", "aia", "til")]
                yield [f"&emsp;`tpl-plus`, {part} alone", *numbers, "–", "–", ""]

    paper = "paper's Last on C10-5T (DeiT-S, 611) | place, ours / paper's"
    return table(f"method | Last | AIA | TIL | network and memory, MB | {paper}", rows(), 1)
