"""The baselines: after as many epochs as TPL, on every benchmark of the paper, and after three epochs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from page_tables.cells import NOT_RUN, behind, label, last_of, recipe, shown, table
from page_tables.runs import BY_DEFAULT, FRONT, KINDS, ROWS, RUNS, bound_last, natural_run
from tpl.bench.bounds import BOUNDS, bound_name
from tpl.bench.paper import find_rows
from tpl.bench.results import RunResult
from tpl.report.find import find_runs, group_runs
from tpl.report.paper import RankedMethod, Ranking, ranking_of

BASELINES = RUNS / "baselines-vit-tiny-natural"
BASELINE_ROWS = (  # baselines that are to be trained as long as `tpl`
    "replay", "finetune", "slda", "aper", "pass", "l2p", "owm", "icarl", "agem", "eeil", "gd", "derpp", "hal", "der",
    "foster", "afc", "beef",
)  # fmt: skip
EVERYWHERE = "c100-10t", "c100-20t", "c10-5t", "t-10t"  # benchmarks on which the paper's baselines are to be run


def ranking(places: Sequence[Path], benchmark: str | None = None) -> Ranking:
    """Our order of the methods that have runs there against the paper's, on the same or on another benchmark."""
    (experiment,) = group_runs(find_runs(places).runs)
    found = ranking_of(experiment, benchmark)
    assert found is not None
    return found


def as_long_runs(benchmark: str = "c100-10t") -> dict[str, tuple[Path, RunResult]]:
    """The runs of every method with its own options on a benchmark with ViT-tiny, natural order, by NAME."""
    own = set(BY_DEFAULT.values())
    without = {name for name in ROWS if name in BY_DEFAULT or (name.endswith(KINDS) and name not in own)}
    names = [name for name in (*ROWS, *BASELINE_ROWS) if name not in without]
    found = {name: natural_run(benchmark, name) for name in names}
    return {name: row for name, row in found.items() if row}


def as_long_ranking(benchmark: str = "c100-10t") -> Ranking:
    """The order of the methods that were trained as long as `tpl`."""
    return ranking([place for place, _ in as_long_runs(benchmark).values()])


def as_long_table() -> list[str]:
    """Every method that was trained as long as `tpl` on C100-10T with ViT-tiny, the best first; the rest is not run."""
    runs, bound = as_long_runs(), bound_last("c100-10t", FRONT)
    places = {each.method: each for each in ranking([place for place, _ in runs.values()]).places}

    def rows() -> Iterator[list[str]]:
        for name, (_, run) in sorted(runs.items(), key=lambda entry: -entry[1][1].summary["last"]):
            found = run.summary
            numbers = [shown([found[key]]) for key in ("last", "aia", "til")]
            lost = behind(bound, [found["last"]], name)
            fell = [f"{loss:.3f}" for loss in (found.get("loss_by_epoch") or [])[-2:]] or ["–", "–"]
            size = [f"{found[key] / 1e6:.1f}" for key in ("network_bytes", "memory_bytes")]
            printed = beside_the_paper(places.get(run.description["method"]))
            yield [label(name, [run]), recipe(run), *numbers, lost, *fell, *size, *printed]
            for part, alone in run.parts().items():
                numbers = [shown([alone.summary[key]]) for key in ("last", "aia", "til")]
                lost = behind(bound, [alone.summary["last"]], name)
                yield [f"&emsp;`tpl-plus`, {part} alone", "", *numbers, lost, *["–"] * 5, ""]
        for name in BASELINE_ROWS:
            if name not in runs:
                yield [label(name, []), "–", NOT_RUN, *["–"] * 9]

    head = (
        "method | recipe | Last | AIA | TIL | rectified forgetting | loss, last epoch but one | last epoch | "
        "network, MB | memory, MB | paper's Last (DeiT-S, 611) | place, ours / paper's"
    )
    return table(head, rows(), 2)


def everywhere_table() -> list[str]:
    """Last of the baselines on the paper's benchmarks, natural order, beside the paper's."""

    def rows() -> Iterator[list[str]]:
        paper = {(row.method, row.benchmark): row.last for row in find_rows(["main"]) if "-pfi/" not in row.name}
        for name in ("tpl", *sorted(BASELINE_ROWS)):
            lasts = [paper.get((name, benchmark)) for benchmark in EVERYWHERE]
            printed = ["–" if last is None else f"{last:.2f}" for last in lasts]
            yield [f"`{name}`", *(last_of(natural_run(benchmark, name)) for benchmark in EVERYWHERE), *printed]
        orders = [as_long_ranking(benchmark) for benchmark in EVERYWHERE]
        ranks = [f"{order.spearman:.2f} ({len(order.places)})" for order in orders]
        yield ["rank correlation with the paper", *ranks, *["–"] * len(EVERYWHERE)]

    ours = " | ".join(name.upper() for name in EVERYWHERE)
    theirs = " | ".join(f"paper, {name.upper()}" for name in EVERYWHERE)
    return table(f"method | {ours} | {theirs}", rows(), 1)


def baselines_ranking() -> Ranking:
    """The order after 3 epochs."""
    return ranking([BASELINES])


def baselines_table() -> list[str]:
    """Every method after the same number of epochs."""
    places = {place.method: place for place in baselines_ranking().places}
    runs = {place.name: RunResult.read(place) for place in sorted(BASELINES.iterdir())}
    bound = bound_last("c100-10t", FRONT)

    def rows() -> Iterator[list[str]]:
        for method, run in sorted(runs.items(), key=lambda entry: -entry[1].summary["last"]):
            found = run.summary
            cells = [f"{100 * found[key]:.2f}" for key in ("last", "aia", "til")]
            lost = behind(bound, [found["last"]], method)
            cost = [f"{found[key] / 1e6:.1f}" for key in ("network_bytes", "memory_bytes")]
            printed = beside_the_paper(places.get(method))
            rate = str(run.description["options"].get("lr", "–"))
            name = bound_name(run.description) if method in BOUNDS else method
            yield [name, *cells, lost, *cost, f"{found['seconds_per_task']:.0f}", rate, *printed]
            if method == "tpl-plus":
                yield ["&emsp;tpl-plus, expert alone", NOT_RUN, *["–"] * 8, ""]

    head = (
        "method | Last | AIA | TIL | rectified forgetting | network, MB | memory, MB | s a task | rate | "
        "paper's Last (DeiT-S, 611) | place, ours / paper's"
    )
    return table(head, rows(), 1)


def beside_the_paper(place: RankedMethod | None) -> list[str]:
    """The paper's Last of a method, and both places; a dash where one of the two lacks it."""
    return [f"{100 * place.paper:.2f}", f"{place.our_place:g} / {place.paper_place:g}"] if place else ["–", ""]
