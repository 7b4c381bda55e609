"""The digits in five tasks: bounds, tpl-plus, TPL and RanPAC in three seeds, and every method beside the paper's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from page_tables.baselines import beside_the_paper, ranking
from page_tables.cells import behind, shown, table
from page_tables.runs import RESULTS
from tpl.bench.bounds import BOUNDS, trained_to_the_end
from tpl.bench.results import RunResult
from tpl.report.paper import Ranking

DIGITS = RESULTS / "digits-5t"
IN_SEEDS = "joint-ridge", "joint", "tpl-plus", "tpl", "ranpac", "finetune"  # methods with a run for each seed
SEEDS = range(3)


def title(method: str) -> str:
    """A row's method, and whether it is a bound."""
    return f"`{method}`, upper bound" if method in BOUNDS else f"`{method}`"


def digits_table() -> list[str]:
    """Last in every seed, and the means of all accuracies and of what is missing to the better bound."""
    found = {m: [RunResult.read(DIGITS / f"{m}-seed{seed}") for seed in SEEDS] for m in IN_SEEDS}
    assert all(trained_to_the_end(run.description) for method in BOUNDS for run in found[method])
    bound = max(statistics.mean(float(run.summary["last"]) for run in found[method]) for method in BOUNDS)

    def cells(runs: Sequence[RunResult], method: str) -> list[str]:
        seeds = [f"{100 * run.summary['last']:.1f}" for run in runs]
        means = [shown([run.summary[key] for run in runs], 1) for key in ("last", "aia", "til")]
        return [*seeds, *means, behind(bound, [run.summary["last"] for run in runs], method)]

    def rows() -> Iterator[list[str]]:
        for method, runs in found.items():
            yield [title(method), *cells(runs, method)]
            for part in runs[0].parts():
                yield [f"&emsp;`tpl-plus`, {part} alone", *cells([run.parts()[part] for run in runs], method)]

    seeds = " | ".join(f"seed {seed}" for seed in SEEDS)
    return table(f"method | {seeds} | Last, mean | AIA | TIL | rectified forgetting", rows(), 1)


def digits_ranking() -> Ranking:
    """Our order of the methods with seed 0 against the paper's on another data set of ten classes in five tasks."""
    return ranking(sorted(DIGITS.glob("*-seed0")), "c10-5t")


def digits_methods_table() -> list[str]:
    """Every method with seed 0, the best first."""
    places = {place.method: place for place in digits_ranking().places}
    runs = {place.name.removesuffix("-seed0"): RunResult.read(place) for place in DIGITS.glob("*-seed0")}

    def cells(run: RunResult) -> list[str]:
        return [f"{100 * run.summary[key]:.1f}" for key in ("last", "aia", "til")]

    def rows() -> Iterator[list[str]]:
        for method, run in sorted(runs.items(), key=lambda entry: (-entry[1].summary["last"], entry[0])):
            size = f"{(run.summary['network_bytes'] + run.summary['memory_bytes']) / 1e6:.1f}"
            yield [title(method), *cells(run), size, *beside_the_paper(places.get(method))]
            for part, alone in run.parts().items():
                yield [f"&emsp;`tpl-plus`, {part} alone", *cells(alone), "–", "–", ""]

    paper = "paper's Last on C10-5T (DeiT-S, 611) | place, ours / paper's"
    return table(f"method | Last | AIA | TIL | network and memory, MB | {paper}", rows(), 1)
