"""The study of twenty OOD detectors as task predictors."""

from __future__ import annotations

import json
from collections.abc import Iterator

from page_tables.cells import table
from page_tables.runs import RESULTS

STUDIES = "c100-10t", "c10-5t"  # benchmarks of the study of detectors


def study_table(benchmark: str) -> list[str]:
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
