"""The paper's numbers beside ours: its values for the same method and protocol, and its order of the methods.

Values can only be compared with the same encoder and data; the order of methods can be compared with any encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpl.bench.paper import QUANTITIES, load_rows
from tpl.bench.paper import Row as PaperRow
from tpl.bench.paper.evidence import fits
from tpl.report.columns import CONTINUAL
from tpl.report.find import Experiment, Group

# Columns that the paper has, too; its times are left out because they are another machine's.
_COLUMNS = ("last", "aia", "til", "auroc", "forgetting_last", "forgetting_aia", "parameters")


@dataclass(frozen=True)
class PaperValue:
    """A number of the paper: as text, in our unit, and the name of its row (see `tpl reproduce --list`)."""

    text: str
    value: float
    row: str


def paper_values(group: Group) -> dict[str, PaperValue]:
    """The paper's values by column key; empty if it has no row with this method, benchmark, encoder and options."""
    found: dict[str, PaperValue] = {}
    for row in load_rows():
        if row.benchmark != group.runs[0].description["benchmark"] or not all(fits(run, row, {}) for run in group.runs):
            continue
        for key in set(row.values) & set(_COLUMNS) - set(found):
            printed, target = row.values[key], row.target(key)
            right = f"{target:.{printed.decimals}f}"
            text = str(printed) if target == printed.mean else right  # the corrected number instead of a misprint
            found[key] = PaperValue(text, target / QUANTITIES[key].scale, row.name)
    return found


def paper_of(experiment: Experiment) -> dict[str, dict[str, PaperValue]]:
    """The paper's values for each group of an experiment."""
    return {group.name: paper_values(group) for group in experiment.groups}


MIN_METHODS = 4  # for an order worth comparing


@dataclass(frozen=True)
class RankedMethod:
    """One method's Last accuracy and rank, ours and the paper's (1 is best; ties share the mean rank)."""

    method: str
    ours: float
    paper: float
    our_place: float
    paper_place: float


@dataclass(frozen=True)
class Ranking:
    """An experiment's continual methods by our Last accuracy, and the rank correlation with the paper's order."""

    encoder: str  # the paper's
    places: tuple[RankedMethod, ...]
    spearman: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "encoder": self.encoder,
            "spearman": self.spearman,
            "places": [vars(place) for place in self.places],
        }

    @property
    def sentence(self) -> str:
        """The rank correlation as a sentence."""
        return (
            f"Spearman's rank correlation with the paper's order ({self.encoder}) over {len(self.places)} methods: "
            f"{self.spearman:.2f}"
        )


def ranking_of(experiment: Experiment, benchmark: str | None = None) -> Ranking | None:
    """The order of an experiment's methods; None if too few of them are in the paper's table of its benchmark.

    A method that was run with several settings is left out. The paper's order may be that on another `benchmark`.
    """
    benchmark = benchmark or experiment.benchmark
    table = "resnet18" if experiment.encoder.startswith("resnet18") else "main"
    printed: dict[str, PaperRow] = {}
    for row in load_rows():
        if row.table == table and row.benchmark == benchmark and "last" in row.values:
            printed.setdefault(row.method, row)  # the first of a method is the table's own encoder
    lasts = {row["name"]: row["last"] for row in experiment.rows}
    once = [
        (group.method, lasts[group.name])
        for group in experiment.groups
        if group.role == CONTINUAL and sum(other.method == group.method for other in experiment.groups) == 1
    ]
    both = [(method, last, printed[method].target("last") / 100) for method, last in once if method in printed]
    if len(both) < MIN_METHODS:
        return None
    methods, ours, paper = zip(*sorted(both, key=lambda entry: -entry[1]), strict=True)
    columns = zip(methods, ours, paper, _ranks(ours), _ranks(paper), strict=True)
    encoder = printed[methods[0]].encoder
    from scipy.stats import spearmanr  # takes a second

    return Ranking(encoder, tuple(RankedMethod(*column) for column in columns), float(spearmanr(ours, paper).statistic))


def _ranks(values: Sequence[float]) -> list[float]:
    from scipy.stats import rankdata

    return [float(rank) for rank in rankdata([-value for value in values])]
