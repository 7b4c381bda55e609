"""The paper's tables as data: every printed number, with the run it would take to get it.

One TOML file a table. A row of `tpl reproduce` is one cell group of a table, for example
`encoders/vit-tiny/c100-10t`: what the paper prints for ViT-tiny on C100-10T. Misprints stay as printed,
with a note on what is wrong; where the right number is known, runs are compared with that one.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from tpl.errors import TplError

TABLES = (
    "main",
    "encoders",
    "small-memory",
    "resnet18",
    "forgetting",
    "scores",
    "beta",
    "ood",
    "imagenet380",
    "sizes",
    "times",
)
AVERAGE = "average"  # stands for a benchmark: the mean over the five of them
FIVE = ("c10-5t", "c100-10t", "c100-20t", "t-5t", "t-10t")


@dataclass(frozen=True)
class Quantity:
    """A quantity in the paper's tables: its name, its direction, and the factor from a run's unit to the paper's."""

    key: str
    title: str
    better: int  # 1: higher is better, -1: lower is better, 0: shown without a verdict
    scale: float = 100.0  # runs measure fractions, the paper prints percent


QUANTITIES = {
    q.key: q
    for q in (
        Quantity("last", "Last", 1),
        Quantity("aia", "AIA", 1),
        Quantity("til", "TIL", 1),
        Quantity("auroc", "AUROC", 1),
        Quantity("forgetting_last", "Forg. Last", -1),
        Quantity("forgetting_aia", "Forg. AIA", -1),
        Quantity("parameters", "Parameters, M", 0, 1e-6),
        Quantity("minutes", "Minutes a task", 0, 1 / 60),
    )
}


@dataclass(frozen=True)
class Printed:
    """A number as printed."""

    mean: float
    std: float | None = None
    decimals: int = 2

    def __str__(self) -> str:
        spread = "" if self.std is None else f" ± {self.std:.2f}"
        return f"{self.mean:.{self.decimals}f}{spread}"


@dataclass(frozen=True)
class Row:
    """What the paper prints for one method on one benchmark, and the run it takes."""

    name: str  # table/row/benchmark
    table: str
    label: str  # the row's name in print
    method: str
    encoder: str
    benchmark: str  # or AVERAGE
    values: Mapping[str, Printed]  # as printed, by the keys of QUANTITIES
    options: Mapping[str, Any] = field(default_factory=dict)  # where this row differs from the protocol
    misprint: str | None = None
    corrected: Mapping[str, float] = field(default_factory=dict)
    note: str | None = None

    @property
    def last(self) -> float | None:
        """Last accuracy as printed."""
        return self._mean("last")

    @property
    def aia(self) -> float | None:
        """Average incremental accuracy as printed."""
        return self._mean("aia")

    @property
    def til(self) -> float | None:
        """Task-incremental accuracy as printed."""
        return self._mean("til")

    def target(self, quantity: str) -> float:
        """The number to reach: the printed one, or the corrected one for a misprint."""
        return self.corrected.get(quantity, self.values[quantity].mean)

    def parts(self) -> list[Row]:
        """The row of each benchmark: the row itself, or the five behind an average."""
        if self.benchmark != AVERAGE:
            return [self]
        table = {other.name: other for other in load_rows()}
        stem = self.name.removesuffix(AVERAGE)
        return [table.get(stem + name) or replace(self, name=stem + name, benchmark=name) for name in FIVE]

    def required(self) -> dict[str, Any]:
        """Options that a run must share with the paper's to be comparable, if its method has them."""
        fixed = _load("protocols")
        needed: dict[str, Any] = dict(fixed["methods"].get(self.method, {}))
        if self.benchmark != AVERAGE:
            needed["memory"] = fixed["benchmarks"][self.benchmark]["memory"]
            needed["memory_kind"] = "images"
        return needed | dict(self.options)

    def _mean(self, quantity: str) -> float | None:
        return self.values[quantity].mean if quantity in self.values else None


def task_sizes(benchmark: str) -> list[int]:
    """The number of classes of each task of one of the paper's benchmarks."""
    fixed = _load("protocols")["benchmarks"][benchmark]
    return [fixed["classes"] // fixed["tasks"]] * fixed["tasks"]


@cache
def load_rows() -> tuple[Row, ...]:
    """All rows of all tables, in the paper's order."""
    return tuple(row for table in TABLES for row in _rows(table, _load(table)))


def find_rows(patterns: Sequence[str]) -> list[Row]:
    """The rows matching names, prefixes or globs such as `encoders/*tiny/c100*`."""
    rows = load_rows()
    found: dict[str, Row] = {}
    for pattern in patterns:
        stem = pattern.rstrip("/")
        matching = [r for r in rows if r.name.startswith(stem + "/") or fnmatchcase(r.name, stem)]
        matching = matching or [r for r in rows if r.name.startswith(stem)]
        if not matching:
            raise TplError(f"The paper has no row '{pattern}'{_nearest(pattern)}; `tpl reproduce --list` shows all.")
        found |= {row.name: row for row in matching}
    return list(found.values())


def _nearest(pattern: str) -> str:
    """Similar names of rows or tables, as a hint in parentheses."""
    names = {"/".join(row.name.split("/")[:depth]): None for depth in (1, 2, 3) for row in load_rows()}
    near = difflib.get_close_matches(pattern.lower(), names, n=3, cutoff=0.6)
    return f" (near: {', '.join(near)})" if near else ""


@cache
def _load(name: str) -> dict[str, Any]:
    text = (files(__package__) / f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text, parse_float=Decimal)  # a Decimal remembers how many digits are printed


def _rows(table: str, content: Mapping[str, Any]) -> Iterator[Row]:
    columns = [*content["benchmarks"], AVERAGE]
    for key, entry in content["rows"].items():
        for index, benchmark in enumerate(columns):
            values = _values(entry, index, benchmark)
            if not values:
                continue
            marks, right = entry.get("misprint", {}), entry.get("corrected", {}).get(benchmark, {})
            options = content.get("options", {}).get(benchmark, {}) | entry.get("options", {})
            yield Row(
                f"{table}/{key}/{benchmark}",
                table,
                entry["label"],
                entry.get("method", content.get("method", key)),
                entry.get("encoder", content.get("encoder", "")),
                benchmark,
                values,
                {name: float(v) if isinstance(v, Decimal) else v for name, v in options.items()},
                marks.get(benchmark, marks.get("all")),
                {name: float(v) for name, v in right.items()},
                entry.get("note"),
            )


def _values(entry: Mapping[str, Any], index: int, benchmark: str) -> dict[str, Printed]:
    if benchmark == AVERAGE:
        return {key: _printed(number) for key, number in entry.get(AVERAGE, {}).items()}
    found = {}
    for key in QUANTITIES:
        if key in entry:
            spread = entry.get(f"{key}_std")
            found[key] = _printed(entry[key][index], spread[index] if spread else None)
    return found


def _printed(number: Decimal, spread: Decimal | None = None) -> Printed:
    return Printed(float(number), None if spread is None else float(spread), -int(number.as_tuple().exponent))
