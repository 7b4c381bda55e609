"""The order of the methods against the paper's.

Values can only be compared with the same encoder and data; the order of methods says something with any encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpl.bench.paper import Row as PaperRow
from tpl.bench.paper import load_rows
from tpl.report.scenes import Scene
from tpl.report.sheets import Cell, Sheet
from tpl.report.tables import CONTINUAL

FEWEST = 4  # methods that make an order worth comparing


@dataclass(frozen=True)
class Place:
    """One method's Last accuracy, ours and the paper's, and its place by each (1 is best; equal ones share)."""

    method: str
    ours: float
    paper: float
    our_place: float
    paper_place: float


@dataclass(frozen=True)
class Ranking:
    """A scene's competing methods by our Last accuracy, and how far the paper's order is the same."""

    encoder: str  # the paper's
    places: tuple[Place, ...]
    spearman: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "encoder": self.encoder,
            "spearman": self.spearman,
            "places": [vars(place) for place in self.places],
        }

    @property
    def words(self) -> str:
        """The finding in a sentence."""
        return (
            f"Spearman's rank correlation with the paper's order ({self.encoder}) over {len(self.places)} methods: "
            f"{self.spearman:.2f}"
        )

    def sheet(self, title: str) -> Sheet:
        """As a table."""
        head = ("Method", "Last (%)", "place", "paper's Last (%)", "paper's place")
        rows = [
            (p.method, f"{100 * p.ours:.1f}", f"{p.our_place:g}", f"{100 * p.paper:.1f}", f"{p.paper_place:g}")
            for p in self.places
        ]
        return Sheet(f"{title}. {self.words}", head, tuple(tuple(Cell(text) for text in row) for row in rows))


def ranking_of(scene: Scene) -> Ranking | None:
    """The order of a scene's methods; None where too few are in the paper's table of its benchmark.

    A method that was run with several settings is left out: none of them is the one to compare.
    """
    table = "resnet18" if scene.encoder.startswith("resnet18") else "main"
    printed: dict[str, PaperRow] = {}
    for row in load_rows():
        if row.table == table and row.benchmark == scene.benchmark and "last" in row.values:
            printed.setdefault(row.method, row)  # the first of a method is the table's own encoder
    lasts = {row["name"]: row["last"] for row in scene.rows}
    once = [
        (group.method, lasts[group.name])
        for group in scene.groups
        if group.role == CONTINUAL and sum(other.method == group.method for other in scene.groups) == 1
    ]
    both = [(method, last, printed[method].target("last") / 100) for method, last in once if method in printed]
    if len(both) < FEWEST:
        return None
    from scipy.stats import spearmanr

    methods, ours, paper = zip(*sorted(both, key=lambda entry: -entry[1]), strict=True)
    columns = zip(methods, ours, paper, _places(ours), _places(paper), strict=True)
    encoder = printed[methods[0]].encoder
    return Ranking(encoder, tuple(Place(*column) for column in columns), float(spearmanr(ours, paper).statistic))


def _places(values: Sequence[float]) -> list[float]:
    from scipy.stats import rankdata

    return [float(place) for place in rankdata([-value for value in values])]
