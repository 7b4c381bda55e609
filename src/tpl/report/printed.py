"""What the paper prints for a group of runs, where they can be compared with it."""

from __future__ import annotations

from dataclasses import dataclass

from tpl.bench.paper import QUANTITIES, load_rows
from tpl.bench.paper.judge import Run, fits
from tpl.report.scenes import Group

# The paper's quantities by the columns of our tables; time is another machine's, so it is left out.
_COLUMNS = ("last", "aia", "til", "auroc", "forgetting_last", "forgetting_aia", "parameters")


@dataclass(frozen=True)
class PaperValue:
    """A number of the paper: as it is shown, in our unit, and the row it stands in (see `tpl reproduce --list`)."""

    text: str
    value: float
    row: str


def paper_values(group: Group) -> dict[str, PaperValue]:
    """By column; empty where no table of the paper has this method, benchmark and encoder with these options."""
    runs = [_evidence(group, n) for n in range(len(group.runs))]
    found: dict[str, PaperValue] = {}
    for row in load_rows():
        if row.benchmark != group.runs[0].what["benchmark"] or not all(fits(run, row, {}) for run in runs):
            continue
        for key in set(row.values) & set(_COLUMNS) - set(found):
            printed, target = row.values[key], row.target(key)
            right = f"{target:.{printed.decimals}f}"
            text = str(printed) if target == printed.mean else right  # a misprint gives way to the right number
            found[key] = PaperValue(text, target / QUANTITIES[key].scale, row.name)
    return found


def _evidence(group: Group, number: int) -> Run:
    run = group.runs[number]
    return Run(run.place, run.result)
