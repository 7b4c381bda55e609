"""tpl-plus: its two parts and few passes, what it loses without stored images, and the time of an answer."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from typing import Any

from page_tables.cells import NOT_RUN, label, mean, percent, spread, table
from page_tables.runs import FORMER, ORDERS, ROOT, ROWS, RUNS, SETTINGS, runs_of, variants
from tpl.bench.results import RunResult


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


def newest_plus(setting: str) -> str:
    """The name of the runs of `tpl-plus` with today's defaults, or else of those with the former ones."""
    return "tpl-plus" if runs_of(setting, "tpl-plus") else FORMER


def lasts(setting: str) -> list[str]:
    """Mean Last of `tpl`, of `ranpac` as published, and of `tpl-plus`."""
    found = [runs_of(setting, name) for name in ("tpl", "ranpac-first", newest_plus(setting))]
    tpl, ranpac, plus = (mean(percent(runs, "last")) if runs else NOT_RUN for runs in found)
    return [tpl, ranpac, plus]


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
