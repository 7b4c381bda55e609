"""TPL, tpl-plus, their rivals and the upper bounds: a table for each benchmark, one of all, and the front page's."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from page_tables.cells import NOT_RUN, behind, label, recipe, shown, table
from page_tables.runs import (
    BENCHMARKS,
    BY_DEFAULT,
    FRONT,
    GROWING,
    PARTS,
    ROOT,
    ROWS,
    TITLES,
    bound_last,
    encoders_of,
    part_lasts,
    rows_of,
)
from tpl.bench.bounds import BOUNDS
from tpl.bench.paper import load_rows
from tpl.bench.results import RunResult

COSTS = ROOT / "benchmarks" / "front-cpu.json"
FRONT_ROWS = {  # of the front page, as benchmarks/front.py names them, and what is said about them
    "joint-ridge": "upper bound: ridge regression on the features of `joint`",
    "joint": "the usual upper bound: all classes at once",
    "tpl-plus": "TPL beside a classifier over all classes",
    "tpl-plus --set passes=0": "the classifier over all classes alone",
    "tpl": "the paper's method",
    "anacp": "ridge regression after a contrastive projection",
    "ranpac": "ridge regression on random features, as published",
    "ranpac --set ridge_criterion=entropy": "the same, its ridge chosen by cross-entropy",
    "slca": "the whole network fine-tuned slowly, its head aligned",
    "klda": "discriminant analysis on random features",
    "slda": "discriminant analysis, nothing trained",
    "replay": "one network, 200 stored digits or 2000 images",
    "ease": "adapters for each task, class prototypes in all of them",
    "finetune": "one network, nothing stored",
}
AT_ITS_BEST = {"ranpac --set ridge_criterion=entropy": "ranpac-best"}  # NAME of the runs with these options
WITH_PARTS = tuple(GROWING)  # rows that are followed by those of their parts


def lasts_of(found: Sequence[tuple[Path, RunResult]], part: str = "") -> str:
    """Last of a row's runs, or of one part of tpl-plus in them; their number in parentheses."""
    lasts = [each["last"] for each in part_lasts(found, part)] if part else [run.summary["last"] for _, run in found]
    return f"{shown(lasts)} ({len(lasts)})" if lasts else NOT_RUN


def benchmark_table(benchmark: str) -> list[str]:
    """Bounds, tpl-plus with its parts, TPL and its rivals on one benchmark, an encoder after the other."""

    def rows() -> Iterator[list[str]]:
        for encoder in encoders_of(benchmark):
            title, bound = TITLES.get(encoder, encoder), bound_last(benchmark, encoder)
            for name in ROWS:
                found = rows_of(benchmark, encoder, name)
                runs = [run for _, run in found]
                if not runs and name in BOUNDS and (same := rows_of(BENCHMARKS[benchmark], encoder, name)):
                    yield _from_elsewhere(title, name, [run for _, run in same], BENCHMARKS[benchmark])
                    continue
                if not runs:
                    yield [title, label(name, runs), *["–"] * 2, NOT_RUN, *["–"] * 3]
                    continue
                sha = runs[0].description["encoder"]["sha256"][:8]
                numbers = [shown([run.summary[key] for run in runs]) for key in ("last", "aia", "til")]
                lost = behind(bound, [run.summary["last"] for run in runs], name)
                yield [f"{title} ({sha})", label(name, runs), str(len(runs)), recipe(runs[0]), *numbers, lost]
                for part in PARTS if name in WITH_PARTS else ():
                    of = part_lasts(found, part)
                    numbers = [shown([each.get(key) for each in of]) for key in ("last", "aia", "til")]
                    cells = [*numbers, behind(bound, [each["last"] for each in of], name)]
                    cells = cells if of else [NOT_RUN, *["–"] * 3]
                    yield [f"{title} ({sha})", f"&emsp;`tpl-plus`, {part} alone", str(len(of)), "", *cells]
        if not encoders_of(benchmark):
            yield ["–", "every method", *["–"] * 2, NOT_RUN, *["–"] * 3]

    head = "encoder (hash) | method | class orders | recipe | Last | AIA | TIL | rectified forgetting"
    return table(head, rows(), 2)


def _from_elsewhere(title: str, name: str, runs: list[RunResult], benchmark: str) -> list[str]:
    """The row of a bound that was trained on the same images, divided into other tasks."""
    sha = runs[0].description["encoder"]["sha256"][:8]
    said = f"{label(name, runs)}, the run of {benchmark.upper()}"
    last = shown([run.summary["last"] for run in runs])
    return [f"{title} ({sha})", said, str(len(runs)), recipe(runs[0]), last, *["–"] * 3]


def overview_table() -> list[str]:
    """Last on every benchmark with one encoder; the number of class orders in parentheses."""

    found = {(benchmark, name): rows_of(benchmark, FRONT, name) for benchmark, name in product(BENCHMARKS, ROWS)}

    def cell(benchmark: str, name: str) -> str:
        other = BENCHMARKS[benchmark]
        if name in BOUNDS and not found[benchmark, name] and found[other, name]:
            return f"as {other.upper()}"
        return lasts_of(found[benchmark, name])

    def rows() -> Iterator[list[str]]:
        for name in ROWS:
            runs = [run for benchmark in BENCHMARKS for _, run in found[benchmark, name]]
            epochs = sorted({int(run.description["options"]["epochs"]) for run in runs if recipe(run) != "no training"})
            yield [
                label(name, runs),
                "–".join(map(str, dict.fromkeys((epochs[0], epochs[-1])))) if epochs else "–",
                *(cell(benchmark, name) for benchmark in BENCHMARKS),
            ]
            for part in PARTS if name in WITH_PARTS else ():
                cells = [lasts_of(found[benchmark, name], part) for benchmark in BENCHMARKS]
                yield [f"&emsp;`tpl-plus`, {part} alone", "", *cells]
        paper = {row.name: f"{row.last:.2f} (5)" for row in load_rows() if row.last is not None}
        yield ["TPL in the paper", "10–40", *(paper.get(f"encoders/{FRONT}/{name}", "–") for name in BENCHMARKS)]

    shas = {run.description["encoder"]["sha256"][:8] for runs in found.values() for _, run in runs}
    encoder = f"{TITLES[FRONT]} ({', '.join(sorted(shas))})"
    return table(" | ".join([encoder, "epochs", *(name.upper() for name in BENCHMARKS)]), rows(), 1)


def front_table() -> list[str]:
    """Accuracy, and what a method costs on a CPU; the number of class orders or seeds in parentheses."""

    def rows() -> Iterator[list[str]]:
        for name, title in FRONT_ROWS.items():
            method = name.split()[0]
            runs = rows_of("c100-10t", FRONT, AT_ITS_BEST.get(name) or BY_DEFAULT.get(method, method))
            cifar = lasts_of(runs, "expert" if name.endswith("passes=0") else "")
            found = [row for row in measured if row["row"] == name]
            digits = f"{100 * statistics.mean(row['last'] for row in found):.1f} ({len(found)})"
            costs = [min(row[key] for row in found) for key in ("seconds_to_learn", "ms_alone")]  # noise only adds
            size = max(row["network_and_memory_bytes"] for row in found) / 1e6
            yield [f"`{name}`", title, cifar, digits, *(f"{cost:.0f}" for cost in costs), f"{size:.1f}"]

    measured = json.loads(COSTS.read_text())["rows"]
    head = "`tpl run digits-5t --method` ... |  | C100-10T, % | digits, % | learn, s | answer, ms | MB"
    return table(head, rows(), 2)
