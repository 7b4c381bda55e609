"""The tables of results on the front page, in results/README.md and the documentation, made from the runs in results/.

python recipes/result_tables.py            # write them into the pages, beneath their marks
python recipes/result_tables.py --check    # do they agree? Exits with 1 if not

A mark is a comment `<!-- table: NAME -->`; the table beneath it, up to the next empty line, is the recipe's.

A run counts for the table of its benchmark if its directory is results/*/BENCHMARK-ENCODER-NAME-ORDER, with a NAME of
`ROWS` and the order as run.json has it (`random:1` is `random-1`). A row without such a run says "not run".
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from tpl.bench.bounds import BOUNDS, bound_name, trained_to_the_end
from tpl.bench.paper import AVERAGE, find_rows, load_rows
from tpl.bench.results import RunResult
from tpl.methods.bank.bank import FULL
from tpl.report.find import find_runs, group_runs
from tpl.report.paper import RankedMethod, Ranking, ranking_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
RUNS = RESULTS / "c100"
BASELINES = RUNS / "baselines-vit-tiny-natural"
PAGES = {
    "results/README.md": (
        "tpl",
        "family",
        "c10-5t",
        "c100-10t",
        "c100-20t",
        "c100-50t",
        "t-5t",
        "t-10t",
        "t-100t",
        "study-c100-10t",
        "study-c10-5t",
        "as-long",
        "everywhere",
        "small",
        "baselines",
        "scores",
        "betas",
        "scratch",
        "parts",
    ),
    "README.md": ("front",),
    "docs/not-reached.md": ("below", "never-run"),
    "docs/beyond.md": ("answers", "kinds", "inference"),
    "docs/which-method.md": ("overview", "family", "answers", "memory"),
}
ORDERS = "natural", "random-1", "random-2"
SETTINGS = {
    "c100-10t-vit-tiny": "C100-10T, ViT-tiny",
    "c100-20t-vit-tiny": "C100-20T, ViT-tiny",
    "c100-10t-deit-tiny": "C100-10T, DeiT-tiny",
    "c100-20t-deit-tiny": "C100-20T, DeiT-tiny",
}
FAMILY = "tpl", "row", "more", "hat"
FAMILY_BENCHMARKS = "c10-5t", "c100-10t", "c100-20t", "t-5t", "t-10t"
SCRATCH = "c100-10t", "c100-20t"
SCRATCH_ROWS = {  # a run, and what it is called
    "tpl": "TPL, changed (`scratch-rotations`)",
    "tpl-mirrored": "the same, `tta=flip`",
    "tpl-upright": "the same, `tta=none`",
    "tpl-rate": "`tta=none lr=0.1`",
    "tpl-plain": "TPL as the paper describes it (`scratch-plain`)",
    "row": "ROW",
    "more": "MORE",
    "hat": "HAT",
    "der": "DER",
    "replay": "replay",
    "finetune": "fine-tuning",
    "joint": "all classes at once",
}
FRONT = "vit-tiny"  # the encoder of the front page
COSTS = ROOT / "benchmarks" / "front-cpu.json"
FRONT_ROWS = {  # of the front page, as benchmarks/front.py names them, and what is said about them
    "joint-ridge": "upper bound: ridge regression on `joint`'s features",
    "joint": "the usual upper bound: all classes at once",
    "tpl-plus": "TPL beside a classifier over all classes",
    "tpl-plus --set passes=0": "that classifier alone",
    "tpl": "the paper's method",
    "anacp": "ridge regression on features moved apart",
    "ranpac": "ridge regression on random features",
    "slca": "the whole network trained, slowly",
    "klda": "discriminant analysis on random features",
    "slda": "discriminant analysis, nothing trained",
    "replay": "one network, 200 stored digits or 2000 images",
    "ease": "adapters for each task, class means in all of them",
    "finetune": "one network, nothing stored",
}
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
BASELINE_ROWS = (  # baselines that are to be trained as long as `tpl`
    "replay", "finetune", "slda", "aper", "pass", "l2p", "owm", "icarl", "agem", "eeil", "gd", "derpp", "hal", "der",
    "foster", "afc", "beef",
)  # fmt: skip
STUDIES = "c100-10t", "c10-5t"  # benchmarks of the study of detectors
EVERYWHERE = "c100-10t", "c100-20t", "c10-5t", "t-10t"  # benchmarks on which the paper's baselines are to be run
KINDS = "-first", "-best", "-none", "-grown", "-former", "-paper"  # ends of a NAME, no part of the method
BY_DEFAULT = {"ranpac": "ranpac-first", "tpl-plus": "tpl-plus-grown"}  # NAME of the runs with a method's own options
PARTS = "expert", "bank"  # of tpl-plus
GROWING = {"tpl-plus": "tpl-plus-grown", "tpl-plus-grown": "tpl-plus"}  # equal while adapters are not full
WITH_PARTS = tuple(GROWING)  # rows that are followed by those of their parts
FORMER = "tpl-plus-former"  # runs from before `expert_views=several`, `others=per_class` and w = 4 became defaults
NOT_RUN = "not run"


def runs_of(setting: str, method: str) -> list[RunResult]:
    """One a class order, as far as there are any."""
    places = [RUNS / f"{setting}-{method}-{order}" for order in ORDERS]
    return [RunResult.read(place) for place in places if place.is_dir()]


def encoders_of(benchmark: str) -> list[str]:
    """The encoders that have runs on a benchmark, by their names in directories; those of the paper's order first."""
    names = "|".join(map(re.escape, sorted(ROWS, key=len, reverse=True)))
    pattern = re.compile(rf"{benchmark}-(.+?)-(?:{names})-(?:natural|random-\d+|[^-]+)")
    found = {match[1] for place in RESULTS.glob(f"*/{benchmark}-*") if (match := pattern.fullmatch(place.name))}
    return sorted((name for name in found if not name.startswith("resnet")), key=lambda n: (n != FRONT, n))


def rows_of(benchmark: str, encoder: str, name: str) -> list[tuple[Path, RunResult]]:
    """The runs of one row on test images, one a class order, with their directories.

    A run of `tpl-plus` whose adapters were never full is the same whether they may grow or not: where one of the two
    rows has no runs, it takes those of the other.
    """
    found = runs_named(benchmark, encoder, name)
    if not found and name in GROWING:
        found = runs_named(benchmark, encoder, GROWING[name])
        found = found if all((run.summary["capacity"] or {}).get("units", 1) < FULL for _, run in found) else []
    return found


def runs_named(benchmark: str, encoder: str, name: str) -> list[tuple[Path, RunResult]]:
    """The runs in directories of this NAME."""
    found = []
    for place in sorted(RESULTS.glob(f"*/{benchmark}-{encoder}-{name}-*")):
        if (place / "results.json").is_file():
            run = RunResult.read(place)
            order = str(run.description["order"]).replace(":", "-")
            if place.name == f"{benchmark}-{encoder}-{name}-{order}" and run.description["validation"] is None:
                found.append((place, run))
    return found


def percent(runs: list[RunResult], key: str) -> list[float]:
    """A number of every run."""
    return [100 * run.summary[key] for run in runs]


def auroc(runs: list[RunResult]) -> list[float]:
    """The pooled AUROC of every run's task scores."""
    return [100 * run.summary["detection"]["auroc_pooled"] for run in runs]


def mean(values: list[float], places: int = 2) -> str:
    """To so many decimals."""
    return f"{statistics.mean(values):.{places}f}"


def spread(values: list[float]) -> str:
    """Mean and deviation over class orders."""
    return f"{mean(values)} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean(values)


def variants(place: Path) -> dict[str, dict[str, Any]]:
    """What `tpl ablate` measured on a run, by the variant's name."""
    rows = json.loads((place / "ablate.json").read_text())
    # Earlier versions had other names for these options.
    return {row["variant"].replace("covered =", "mass =").replace("weight =", "expert weight ="): row for row in rows}


def table(head: str, rows: Iterator[list[str]], text_columns: int) -> list[str]:
    """Markdown; the first columns are text, the others numbers."""
    columns = head.count("|") + 1
    rule = ["---"] * text_columns + ["---:"] * (columns - text_columns)
    return [f"| {line} |" for line in (head, " | ".join(rule), *(" | ".join(row) for row in rows))]


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


def newest_plus(setting: str) -> str:
    """The name of the runs of `tpl-plus` with today's defaults, or else of those with the former ones."""
    return "tpl-plus" if runs_of(setting, "tpl-plus") else FORMER


def lasts(setting: str) -> list[str]:
    """Mean Last of `tpl`, of `ranpac` as published, and of `tpl-plus`."""
    found = [runs_of(setting, name) for name in ("tpl", "ranpac-first", newest_plus(setting))]
    tpl, ranpac, plus = (mean(percent(runs, "last")) if runs else NOT_RUN for runs in found)
    return [tpl, ranpac, f"**{plus}**"]


def plus_variants(setting: str) -> list[dict[str, dict[str, Any]]]:
    """What `tpl ablate` measured on `tpl-plus`, one a class order; `auto` is the variant with the run's own mass."""
    found = []
    for place in (RUNS / f"{setting}-{newest_plus(setting)}-{order}" for order in ORDERS):
        rows = variants(place)
        mass = RunResult.read(place).description["options"]["passes_mass"]
        found.append(rows | {"auto": rows[f"passes = auto, mass = {mass}"] | {"mass": mass}})
    return found


def few_passes(setting: str) -> list[str]:
    """Last with `passes=auto`, how many tasks' models it asks about an image, and at which mass.

    From runs of their own where there are some, else measured by `tpl ablate` on the runs of `tpl-plus`.
    """
    if runs := runs_of(setting, "tpl-plus-auto"):
        found = [run.summary | {"mass": run.description["options"]["passes_mass"]} for run in runs]
    else:
        found = [each["auto"] for each in plus_variants(setting)]
    last, passes = ([each[name] for each in found] for name in ("last", "passes"))
    return [mean([100 * each for each in last]), f"{mean(passes, 2)} of {setting[5:7]}", f"{found[0]['mass']:g}"]


def answers_table() -> list[str]:
    """Last of both halves of `tpl-plus`, of their product, and of the product where few tasks are asked."""

    def rows() -> Iterator[list[str]]:
        for setting, title in SETTINGS.items():
            found = plus_variants(setting)
            expert = [100 * each["expert alone"]["last"] for each in found]
            tpl, ranpac, plus = lasts(setting)
            title += ", former defaults" if newest_plus(setting) == FORMER else ""
            yield [title, tpl, ranpac, mean(expert), plus, *few_passes(setting)]

    head = (
        " | `tpl` | `ranpac` as published | expert | `tpl-plus` | `passes=auto` | task models queried | `passes_mass`"
    )
    return table(head, rows(), 1)


def label(name: str, runs: Sequence[RunResult]) -> str:
    """A row's method, and what must be known about it."""
    if name in BOUNDS and runs and not trained_to_the_end(runs[0].description):
        return bound_name(runs[0].description)
    said = f", {ROWS[name]}" if ROWS.get(name) else ""
    method = next((name.removesuffix(kind) for kind in KINDS if name.endswith(kind)), name)
    return f"`{method}`{said}"


def recipe(run: RunResult) -> str:
    """How a run was trained."""
    options = run.description["options"]
    if "epochs" not in options or options.get("adapt") == "none":
        return "no training"
    schedule, augment = options.get("schedule", "constant"), options.get("augment", "none")  # not in early versions
    return (
        f"{options['epochs']} epochs, rate {options['lr']:g} {schedule}, {augment.replace('none', 'no')} augmentation"
    )


def part_lasts(found: Sequence[tuple[Path, RunResult]], part: str) -> list[dict[str, float | None]]:
    """Accuracies of one part of tpl-plus in every run: measured with the run, or after it by `tpl ablate`."""
    if all(part in run.part_matrices for _, run in found):
        return [run.parts()[part].summary for _, run in found]
    if all((place / "ablate.json").is_file() for place, _ in found):
        return [{"last": variants(place)[f"{part} alone"]["last"]} for place, _ in found]
    return []


def shown(values: Sequence[float | None], places: int = 2) -> str:
    """Mean and deviation in percent; a dash where a run lacks the number."""
    numbers = [100 * value for value in values if value is not None]
    return spread(numbers) if numbers and len(numbers) == len(values) else "–"


def bound_last(benchmark: str, encoder: str) -> float | None:
    """Last of the better upper bound over the same images; None without one that was trained to the end."""
    lasts = []
    for name, where in product(BOUNDS, (benchmark, BENCHMARKS[benchmark])):
        runs = [run for _, run in rows_of(where, encoder, name) if trained_to_the_end(run.description)]
        lasts += [statistics.mean(run.summary["last"] for run in runs)] if runs else []
    return max(lasts, default=None)


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
                behind = _behind(bound, [run.summary["last"] for run in runs], name)
                yield [f"{title} ({sha})", label(name, runs), str(len(runs)), recipe(runs[0]), *numbers, behind]
                for part in PARTS if name in WITH_PARTS else ():
                    of = part_lasts(found, part)
                    numbers = [shown([each.get(key) for each in of]) for key in ("last", "aia", "til")]
                    cells = [*numbers, _behind(bound, [each["last"] for each in of], name)]
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


def _behind(bound: float | None, lasts: Sequence[float | None], name: str) -> str:
    known = [last for last in lasts if last is not None]
    if bound is None or name in BOUNDS or len(known) < len(lasts) or not known:
        return "–"
    return f"{100 * (bound - statistics.mean(known)):.2f}"


def front_table() -> list[str]:
    """Accuracy, and what a method costs on a CPU; the number of class orders or seeds in parentheses."""

    def cifar(name: str) -> str:
        method, *options = name.split()
        found = rows_of("c100-10t", FRONT, BY_DEFAULT.get(method, method))
        lasts = (
            [each["last"] for each in part_lasts(found, "expert")]
            if options
            else [run.summary["last"] for _, run in found]
        )
        return f"{shown(lasts)} ({len(lasts)})"

    def rows() -> Iterator[list[str]]:
        for method, title in FRONT_ROWS.items():
            found = [row for row in measured if row["row"] == method]
            digits = f"{100 * statistics.mean(row['last'] for row in found):.1f} ({len(found)})"
            costs = [statistics.median(row[key] for row in found) for key in ("seconds_to_learn", "ms_alone")]
            size = statistics.median(row["network_and_memory_bytes"] for row in found) / 1e6
            yield [f"`{method}`", title, cifar(method), digits, *(f"{cost:.0f}" for cost in costs), f"{size:.1f}"]

    measured = json.loads(COSTS.read_text())["rows"]
    head = "`tpl run digits-5t --method` ... |  | C100-10T, % | digits, % | learn, s | answer, ms | MB"
    return table(head, rows(), 2)


def overview_table() -> list[str]:
    """Last on every benchmark with one encoder; the number of class orders in parentheses."""

    def lasts_of(benchmark: str, name: str, part: str = "") -> tuple[str, list[RunResult]]:
        found = rows_of(benchmark, FRONT, name)
        runs = [run for _, run in found]
        values = [each["last"] for each in part_lasts(found, part)] if part else [run.summary["last"] for run in runs]
        if values and found:
            return f"{shown(values)} ({len(values)})", runs
        other = BENCHMARKS[benchmark]
        if name in BOUNDS and rows_of(other, FRONT, name):
            return f"as {other.upper()}", []
        return NOT_RUN, []

    def rows() -> Iterator[list[str]]:
        for name in ROWS:
            cells, made = zip(*(lasts_of(benchmark, name) for benchmark in BENCHMARKS), strict=True)
            runs = [run for each in made for run in each]
            epochs = sorted({int(run.description["options"]["epochs"]) for run in runs if recipe(run) != "no training"})
            yield [
                label(name, runs),
                "–".join(map(str, dict.fromkeys((epochs[0], epochs[-1])))) if epochs else "–",
                *cells,
            ]
            for part in PARTS if name in WITH_PARTS else ():
                cells = tuple(lasts_of(benchmark, name, part)[0] for benchmark in BENCHMARKS)
                yield [f"&emsp;`tpl-plus`, {part} alone", "", *cells]
        paper = {row.name: f"{row.last:.2f} (5)" for row in load_rows() if row.last is not None}
        yield ["TPL in the paper", "10–40", *(paper.get(f"encoders/{FRONT}/{name}", "–") for name in BENCHMARKS)]

    shas = {
        run.description["encoder"]["sha256"][:8]
        for benchmark, name in product(BENCHMARKS, ROWS)
        for _, run in rows_of(benchmark, FRONT, name)
    }
    encoder = f"{TITLES[FRONT]} ({', '.join(sorted(shas))})"
    return table(" | ".join([encoder, "epochs", *(name.upper() for name in BENCHMARKS)]), rows(), 1)


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


def kinds_table() -> list[str]:
    """What `tpl` and `tpl-plus` lose without stored images."""
    setting = "c100-10t-vit-tiny"

    def rows() -> Iterator[list[str]]:
        for method in ("tpl", "tpl-plus", FORMER):
            for kind in ("images", "features", "none"):
                runs = runs_of(setting, method if kind == "images" else f"{method}-{kind}")
                if not runs:
                    continue
                kept = f"{statistics.mean(run.summary['memory_bytes'] for run in runs) / 1000:,.0f}".replace(",", " ")
                cells = mean(percent(runs, "aia")), mean(percent(runs, "til")), mean(percent(runs, "tp")), kept
                title = f"`{method}`" if method in ROWS and not ROWS[method] else label(method, runs)
                yield [f"{title}, {kind}", spread(percent(runs, "last")), *cells]

    return table(" | Last | AIA | TIL | task prediction | kB kept of old images", rows(), 1)


def inference_table() -> list[str]:
    """Images a second against the number of tasks."""
    found = json.loads((ROOT / "benchmarks/inference-vit-tiny-h200.json").read_text())["rows"]

    def rate(value: float) -> str:
        return f"{value:,.0f}".replace(",", " ") if value >= 10 else f"{value:.1f}"

    def rows() -> Iterator[list[str]]:
        for row in sorted(found, key=lambda row: (row["batch"], row["tasks"])):
            speed = row["images_per_second"]
            gain = f"{row['batched_over_naive']:.1f}"
            numbers = rate(speed["naive"]), rate(speed["batched"]), gain, rate(speed["some"])
            yield [str(row["batch"]), str(row["tasks"]), *numbers]

    return table("batch | T | naive | all tasks, shared passes | times faster | three tasks", rows(), 0)


def study_of(benchmark: str) -> list[str]:
    """Every detector on one benchmark, the best first, beside the paper's."""
    folder = RESULTS / benchmark.split("-")[0] / "study-vit-tiny-natural"
    found = json.loads((folder / "study.json").read_text())["rows"]

    def rows() -> Iterator[list[str]]:
        for row in sorted(found, key=lambda row: -row["last"]):
            ours = [f"{row[key]:.1f}" for key in ("auroc", "last", "last_calibrated", "til")]
            paper = [f"{row['paper'][key]:.1f}" for key in ("auroc", "last", "til")]
            yield [row["detector"], row["kind"], *ours, *paper]

    head = "detector | | AUROC | Last | Last, calibrated | TIL | paper (DeiT-S, 611): AUROC | Last | TIL"
    return table(head, rows(), 2)


def ranking(places: Sequence[Path]) -> Ranking:
    """Our order of the methods that have runs there against the paper's."""
    (experiment,) = group_runs(find_runs(places).runs)
    found = ranking_of(experiment)
    assert found is not None
    return found


def baselines_ranking() -> Ranking:
    """The order after 3 epochs."""
    return ranking([BASELINES])


def natural_run(benchmark: str, name: str) -> tuple[Path, RunResult] | None:
    """The run of a row in the natural class order, with its directory."""
    return next((row for row in rows_of(benchmark, FRONT, name) if row[1].description["order"] == "natural"), None)


def last_of(row: tuple[Path, RunResult] | None) -> str:
    """Last of a run, or that there is none."""
    return shown([row[1].summary["last"]]) if row else NOT_RUN


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


def beside_the_paper(place: RankedMethod | None) -> list[str]:
    """The paper's Last of a method, and both places; a dash where one of the two lacks it."""
    return [f"{100 * place.paper:.2f}", f"{place.our_place:g} / {place.paper_place:g}"] if place else ["–", ""]


def as_long_table() -> list[str]:
    """Every method that was trained as long as `tpl` on C100-10T with ViT-tiny, the best first; the rest is not run."""
    runs, bound = as_long_runs(), bound_last("c100-10t", FRONT)
    places = {each.method: each for each in ranking([place for place, _ in runs.values()]).places}

    def rows() -> Iterator[list[str]]:
        for name, (_, run) in sorted(runs.items(), key=lambda entry: -entry[1][1].summary["last"]):
            found = run.summary
            numbers = [shown([found[key]]) for key in ("last", "aia", "til")]
            behind = _behind(bound, [found["last"]], name)
            fell = [f"{loss:.3f}" for loss in (found.get("loss_by_epoch") or [])[-2:]] or ["–", "–"]
            size = [f"{found[key] / 1e6:.1f}" for key in ("network_bytes", "memory_bytes")]
            printed = beside_the_paper(places.get(run.description["method"]))
            yield [label(name, [run]), recipe(run), *numbers, behind, *fell, *size, *printed]
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


def baselines_table() -> list[str]:
    """Every method after the same number of epochs."""
    places = {place.method: place for place in baselines_ranking().places}
    runs = {place.name: RunResult.read(place) for place in sorted(BASELINES.iterdir())}

    def rows() -> Iterator[list[str]]:
        for method, run in sorted(runs.items(), key=lambda entry: -entry[1].summary["last"]):
            found, lost = run.summary, run.against(runs["joint"])
            cells = [f"{100 * found[key]:.2f}" for key in ("last", "aia", "til")]
            behind = [
                f"{100 * value:.1f}" if value is not None and method != "joint" else "–"
                for value in (lost["forgetting_last"], lost["forgetting_aia"])
            ]
            cost = [f"{found[key] / 1e6:.1f}" for key in ("network_bytes", "memory_bytes")]
            printed = beside_the_paper(places.get(method))
            rate = str(run.description["options"].get("lr", "–"))
            name = bound_name(run.description) if method in BOUNDS else method
            yield [name, *cells, *behind, *cost, f"{found['seconds_per_task']:.0f}", rate, *printed]

    head = (
        "method | Last | AIA | TIL | behind joint, Last | AIA | network, MB | memory, MB | s a task | rate | "
        "paper's Last (DeiT-S, 611) | place, ours / paper's"
    )
    return table(head, rows(), 1)


def ablations() -> list[dict[str, dict[str, Any]]]:
    """What `tpl ablate` measured on TPL in every setting, natural order."""
    found = []
    for setting in SETTINGS:
        kept = RUNS / f"{setting}-tpl-ablated-natural"
        found.append(variants(kept if kept.is_dir() else RUNS / f"{setting}-tpl-natural"))
    return found


def memory_table() -> list[str]:
    """TPL's memory, cut down after training."""
    found = ablations()
    names = {"as trained": "2000", "memory = 50 %": "half", "memory = 25 %": "a quarter", "memory = 10 %": "a tenth"}
    cells = [[kept, *(f"{100 * each[name]['last']:.2f}" for each in found)] for name, kept in names.items()]
    return table("images kept | " + " | ".join(SETTINGS.values()), iter(cells), 0)


def scores_table() -> list[str]:
    """Every variant of TPL's score on the same trained models, natural order."""
    return table("variant | " + " | ".join(SETTINGS.values()), score_rows(ablations()), 1)


def betas_table() -> list[str]:
    """TPL's two scales in the paper's range, in units of the encoder's own inverse means; natural order."""
    found = [variants(RESULTS / "choices/cifar100/betas" / benchmark) for benchmark in ("c100-10t", "c10-5t")]

    def rows() -> Iterator[list[str]]:
        for beta1 in ("0.78", "1", "1.3"):
            names = [
                "as trained" if beta1 == beta2 == "1" else f"beta1 = {beta1} and beta2 = {beta2} inverse means"
                for beta2 in ("0.78", "1", "1.3")
            ]
            yield [f"beta1 = {beta1}x", *(f"{100 * each[name]['last']:.2f}" for each in found for name in names)]

    columns = [f"{title}, beta2 = 0.78x | 1x | 1.3x" for title in ("C100-10T", "C10-5T")]
    return table(" | ".join(["Last", *columns]), rows(), 1)


def score_rows(found: list[dict[str, dict[str, Any]]]) -> Iterator[list[str]]:
    """Last and AUROC of every variant, a column a model."""
    for name in found[0]:
        yield [name, *(f"{100 * each[name]['last']:.2f} / {100 * each[name]['auroc']:.1f}" for each in found)]


def scratch_table() -> list[str]:
    """ResNet-18 from scratch, beside the paper's."""

    def rows() -> Iterator[list[str]]:
        printed = {row.name: f"{row.last:.1f}" for row in find_rows(["resnet18"])}
        for benchmark, (name, title) in product(SCRATCH, SCRATCH_ROWS.items()):
            paper = printed.get(f"resnet18/{name.removesuffix('-plain')}/{benchmark}", "–")
            for run in runs_of(f"{benchmark}-resnet18", name):
                found, used = run.summary, run.summary.get("capacity")
                keys = ("last", "aia", "til", "tp") if len(run.description["classes"]) > 1 else ("last",)
                cells = [f"{100 * found[key]:.2f}" for key in keys] + ["–"] * (4 - len(keys))
                full = [f"{100 * used[key]:.0f} %" for key in ("units", "frozen")] if used else ["–", "–"]
                kept = [mean(auroc([run]), 1), f"{found['drift']:g}"] if used else ["–", "–"]
                yield [benchmark.upper(), title, *cells, *kept, *full, paper]

    head = " | | Last | AIA | TIL | task prediction | AUROC | drift | units in use | kernels frozen | paper's Last"
    return table(head, rows(), 2)


def parts_table() -> list[str]:
    """TPL's score taken apart, ResNet-18 from scratch."""
    names = [f"{benchmark}-resnet18-{run}-natural" for run, benchmark in product(("tpl", "tpl-plain"), SCRATCH)]
    head = "variant | changed, C100-10T | C100-20T | as the paper describes it, C100-10T | C100-20T"
    return table(head, score_rows([variants(RUNS / name) for name in names]), 1)


TABLES: dict[str, Callable[[], list[str]]] = {
    name.removesuffix("_table").replace("_", "-"): make
    for name, make in list(globals().items())
    if name.endswith("_table") and make is not benchmark_table
}
TABLES |= {benchmark: partial(benchmark_table, benchmark) for benchmark in BENCHMARKS}
TABLES |= {f"study-{benchmark}": partial(study_of, benchmark) for benchmark in STUDIES}


def filled(text: str, names: Sequence[str]) -> str:
    """A page with every one of these tables as the runs have it."""
    for name in names:
        pattern = re.compile(rf"(<!-- table: {name} -->\n)(?:\|.*\n)*")
        if not pattern.search(text):
            raise SystemExit(f"The page has no mark <!-- table: {name} -->.")
        lines = "".join(line.rstrip() + "\n" for line in TABLES[name]())
        text = pattern.sub(partial(_replaced, lines=lines), text)
    return text


def _replaced(match: re.Match[str], lines: str) -> str:
    return match[1] + lines


def main() -> None:
    """Write the tables, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page says otherwise")
    only_check = parser.parse_args().check
    wrong = []
    for name, tables in PAGES.items():
        page = ROOT / name
        before = page.read_text(encoding="utf-8")
        after = filled(before, tables)
        if after != before and only_check:
            wrong.append(name)
        elif after != before:
            page.write_text(after, encoding="utf-8")
    print(baselines_ranking().sentence, as_long_ranking().sentence, sep="\n")
    if wrong:
        sys.exit(f"{', '.join(wrong)}: not what the runs say. Run this without --check.")


if __name__ == "__main__":
    main()
