"""TPL and its family beside the paper's figures: what is reached, what is missed, what was never run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import product

from page_tables.cells import auroc, last_of, mean, percent, spread, table
from page_tables.runs import FRONT, RESULTS, SETTINGS, TITLES, natural_run, rows_of, runs_of
from page_tables.scratch import SCRATCH, SCRATCH_ROWS
from tpl.bench.paper import AVERAGE, find_rows, load_rows
from tpl.bench.results import RunResult

FAMILY = "tpl", "row", "more", "hat"
FAMILY_BENCHMARKS = "c10-5t", "c100-10t", "c100-20t", "t-5t", "t-10t"


def tpl_table() -> list[str]:
    """Every TPL run, with the paper's numbers beneath each setting."""

    def rows() -> Iterator[list[str]]:
        for setting, title in SETTINGS.items():
            runs = runs_of(setting, "tpl")
            for number, run in enumerate(runs):
                found = run.summary
                cells = [f"{100 * found[key]:.2f}" for key in ("last", "aia", "til", "tp")]
                rate = f"{found['training_images_per_second']:,.0f}".replace(",", " ")
                cost = [rate, f"{found['peak_device_bytes'] / 1e9:.1f} GB"] if number == 0 else ["", ""]
                name = [title, str(run.description["options"]["epochs"])] if number == 0 else ["", ""]
                order = run.description["order"]
                yield [*name, order, *cells, mean(auroc([run]), 1), f"{found['drift']:g}", *cost]
            values = {key: percent(runs, key) for key in ("last", "aia", "til", "tp")}
            bold = f"**{spread(values['last'])}**", mean(values["aia"]), f"**{mean(values['til'])}**"
            yield ["", "", "**mean**", *bold, mean(values["tp"]), mean(auroc(runs), 1), "", "", ""]
            benchmark, encoder = setting[:8], setting[9:]
            (paper,) = find_rows([f"encoders/{encoder}/{benchmark}"])
            yield ["", "40", "paper", f"{paper.last:.2f}", "–", f"{paper.til:.2f}", "", "", "", "", ""]

    head = "TPL | epochs | order | Last | AIA | TIL | task prediction | AUROC | drift | images/s | GPU memory"
    return table(head, rows(), 1)


def family_table() -> list[str]:
    """HAT, MORE, ROW and TPL with ViT-tiny, on the benchmarks where all have the same class orders."""

    def rows() -> Iterator[list[str]]:
        for benchmark in FAMILY_BENCHMARKS:
            for number, method in enumerate(FAMILY):
                runs = [run for _, run in rows_of(benchmark, FRONT, method)]
                (paper,) = find_rows([f"main/{method}/{benchmark}"])
                measured = mean(percent(runs, "aia")), mean(percent(runs, "til")), mean(auroc(runs), 1)
                title = f"{benchmark.upper()}, {TITLES[FRONT]}" if number == 0 else ""
                yield [title, method.upper(), spread(percent(runs, "last")), *measured, f"{paper.last:.2f}"]

    head = " | method | Last | AIA | TIL | AUROC of the task score | the paper's Last (DeiT-S, 611 classes)"
    return table(head, rows(), 2)


def small_table() -> list[str]:
    """TPL, ROW and MORE trained with half of the memory, beside the usual one; natural order."""

    def rows() -> Iterator[list[str]]:
        for benchmark, method in product(("c10-5t", "c100-10t"), ("tpl", "row", "more")):
            usual, small = natural_run(benchmark, method), natural_run(benchmark, f"{method}-small")
            stored = ", ".join(str(run.description["options"]["memory"]) for _, run in filter(None, (usual, small)))
            printed = [find_rows([f"{name}/{method}/{benchmark}"])[0].last for name in ("main", "small-memory")]
            lasts = [last_of(usual), last_of(small), *(f"{last:.2f}" for last in printed)]
            yield [benchmark.upper(), f"`{method}`", stored, *lasts]

    head = " | method | images stored | Last | Last, small memory | paper's Last (DeiT-S, 611) | paper's, small memory"
    return table(head, rows(), 3)


def below_table() -> list[str]:
    """Runs with the paper's own encoder that stay below the paper's Last."""

    def rows() -> Iterator[list[str]]:
        pairs = [
            (f"{benchmark}-resnet18", name, f"resnet18/{name.removesuffix('-plain')}/{benchmark}", "ResNet-18")
            for benchmark, name in product(SCRATCH, ("tpl", "tpl-plain", "row", "more", "hat", "der"))
        ]
        pairs += [(setting, "tpl", f"encoders/{setting.split('t-', 1)[1]}/{setting[:8]}", "") for setting in SETTINGS]
        printed = {row.name: row for row in load_rows()}
        for setting, name, row, encoder in pairs:
            runs, paper = runs_of(setting, name), printed.get(row)
            if not runs or paper is None or paper.last is None:
                continue
            ours = statistics.mean(percent(runs, "last"))
            if ours < paper.last:
                title = SCRATCH_ROWS.get(name, name) if encoder else name.upper()
                where = f"{setting[:8].upper()}, {encoder or SETTINGS[setting].split(', ')[1]}"
                numbers = f"{ours:.2f}", f"{paper.last:.2f}", f"{paper.last - ours:.2f}"
                yield [where, title, str(len(runs)), *numbers]

    return table(" | method | class orders | Last | the paper's Last | below it by", rows(), 2)


def never_run_table() -> list[str]:
    """How many rows of each of the paper's tables have a run here: the same method, benchmark and encoder."""

    def rows() -> Iterator[list[str]]:
        made = {
            (run.description["benchmark"], run.description["method"], run.description["encoder"]["name"])
            for run in (RunResult.read(file.parent) for file in sorted(RESULTS.rglob("results.json")))
            if run.description["validation"] is None
        }
        tables: dict[str, list[tuple[bool, str]]] = {}
        for row in load_rows():
            if row.benchmark != AVERAGE:
                has = (row.benchmark, row.method, row.encoder) in made
                tables.setdefault(row.table, []).append((has, row.encoder))
        for name, found in tables.items():
            lacking = sorted({encoder for has, encoder in found if not has})
            yield [name, str(len(found)), str(sum(has for has, _ in found)), ", ".join(f"`{e}`" for e in lacking)]

    return table("table of the paper | rows | with a run here | encoders of the rows without one", rows(), 1)
