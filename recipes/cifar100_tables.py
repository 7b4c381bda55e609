"""The tables of results/README.md on CIFAR-100, made from the runs in results/c100.

python recipes/cifar100_tables.py            # write them into results/README.md, between their marks
python recipes/cifar100_tables.py --check    # do they agree? Exits with 1 if not

A mark is a comment `<!-- table: NAME -->`; the table beneath it, up to the next empty line, is the recipe's.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tpl.bench.paper import find_rows
from tpl.bench.results import RunResult

ROOT = Path(__file__).parents[1] / "results"
RUNS = ROOT / "c100"
ORDERS = "natural", "random-1", "random-2"
SETTINGS = {
    "c100-10t-vit-tiny": "C100-10T, ViT-tiny",
    "c100-20t-vit-tiny": "C100-20T, ViT-tiny",
    "c100-10t-deit-tiny": "C100-10T, DeiT-tiny",
    "c100-20t-deit-tiny": "C100-20T, DeiT-tiny",
}
FAMILY = "tpl", "row", "more", "hat"
AUTO = "passes = auto, covered = 0.8"  # the default of `covered`


def runs_of(setting: str, method: str) -> list[RunResult]:
    """One a class order, as far as there are any."""
    places = [RUNS / f"{setting}-{method}-{order}" for order in ORDERS]
    return [RunResult.read(place) for place in places if place.is_dir()]


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
    return {row["variant"]: row for row in json.loads((place / "ablate.json").read_text())}


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
    """HAT, MORE, ROW and TPL with ViT-tiny."""

    def rows() -> Iterator[list[str]]:
        for setting in ("c100-10t-vit-tiny", "c100-20t-vit-tiny"):
            first = True
            for method in FAMILY:
                if not (runs := runs_of(setting, method)):
                    continue
                (paper,) = find_rows([f"main/{method}/{setting[:8]}"])
                measured = mean(percent(runs, "aia")), mean(percent(runs, "til")), mean(auroc(runs), 1)
                title = SETTINGS[setting] if first else ""
                yield [title, method.upper(), spread(percent(runs, "last")), *measured, f"{paper.last:.2f}"]
                first = False

    head = " | method | Last | AIA | TIL | AUROC of the task score | the paper's Last (DeiT-S, 611 classes)"
    return table(head, rows(), 2)


def beyond_table() -> list[str]:
    """TPL, RanPAC and their product."""

    def rows() -> Iterator[list[str]]:
        for setting, title in SETTINGS.items():
            tasks = setting[5:7]
            for method, asked in (("tpl", tasks), ("ranpac", "0"), ("tpl-plus", tasks)):
                runs = runs_of(setting, method)
                cells = [spread(percent(runs, "last")), *(mean(percent(runs, key)) for key in ("aia", "til", "tp"))]
                yield [title if method == "tpl" else "", f"`{method}`", *cells, asked]
            found = [variants(RUNS / f"{setting}-tpl-plus-{order}")[AUTO] for order in ORDERS]
            last, tp, passes = ([row[key] for row in found] for key in ("last", "tp", "passes"))
            auto = spread([100 * x for x in last]), "", "", mean([100 * x for x in tp]), mean(passes, 1)
            yield ["", "`tpl-plus`, `passes=auto`", *auto]

    return table(" | | Last | AIA | TIL | task prediction | tasks asked", rows(), 2)


def scores_table() -> list[str]:
    """Every variant of TPL's score on the same trained models, natural order."""
    found = []
    for setting in SETTINGS:
        kept = RUNS / f"{setting}-tpl-ablated-natural"
        found.append(variants(kept if kept.is_dir() else RUNS / f"{setting}-tpl-natural"))

    def rows() -> Iterator[list[str]]:
        for name in found[0]:
            cells = [f"{100 * each[name]['last']:.2f} / {100 * each[name]['auroc']:.1f}" for each in found]
            yield [name, *cells]

    return table("variant | " + " | ".join(SETTINGS.values()), rows(), 1)


TABLES: dict[str, Callable[[], list[str]]] = {
    "tpl": tpl_table,
    "family": family_table,
    "beyond": beyond_table,
    "scores": scores_table,
}


def filled(text: str) -> str:
    """The page with every table as the runs have it."""
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- table: {name} -->\n)(?:\|.*\n)*")
        if not pattern.search(text):
            raise SystemExit(f"results/README.md has no mark <!-- table: {name} -->.")
        lines = "".join(line.rstrip() + "\n" for line in make())
        text = pattern.sub(lambda match, lines=lines: match[1] + lines, text)
    return text


def main() -> None:
    """Write the tables, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the page says otherwise")
    page = ROOT / "README.md"
    before = page.read_text(encoding="utf-8")
    after = filled(before)
    if parser.parse_args().check:
        sys.exit(f"{page.name} does not show what the runs say: run this without --check." if after != before else 0)
    page.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
