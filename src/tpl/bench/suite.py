"""Suites: the grid of runs behind a table, from a TOML file or from options.

methods = ["tpl", "hat"]         the grid: every method on every benchmark in every class order with every seed
benchmarks = ["digits-5t"]
orders = ["natural", "random:1"]     (by default natural alone)
seeds = [0, 1]                       (by default 0 alone)

[run]                            settings of all runs, named as the options of `tpl run`
[options]                        options of all methods that have them
[method.NAME]                    options of one method
[benchmark.NAME]                 settings for one benchmark, where they differ
[benchmark.NAME.options]         options of all methods on it

What is more special wins: [method] over [benchmark.NAME.options] over [options] over the benchmark's own.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpl.bench.benchmarks import find_benchmark
from tpl.bench.suite_checks import (
    GRID,
    ONE_FOR_ALL,
    PATHS,
    Table,
    as_table,
    check_keys,
    check_options,
    check_settings,
    check_spec,
    grid_list,
    options_of,
)
from tpl.errors import TplError
from tpl.names import method_names, refuse_unknown
from tpl.stream import check_order

if TYPE_CHECKING:  # a mistake in a file is told before torch is there
    from tpl.bench.spec import RunSpec


@dataclass(frozen=True)
class Suite:
    """A checked grid of runs."""

    methods: list[str]
    benchmarks: list[str]
    orders: list[str]
    seeds: list[int]
    run: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    method: dict[str, dict[str, Any]] = field(default_factory=dict)
    benchmark: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """Where the runs compute."""
        return str(self.run.get("device", "auto"))

    def specs(self) -> list[RunSpec]:
        """All runs, the first method's first."""
        return [
            self._spec(method, benchmark, order, seed)
            for method in self.methods
            for benchmark in self.benchmarks
            for order in self.orders
            for seed in self.seeds
        ]

    def to_dict(self) -> dict[str, Any]:
        """The suite as its file would say it."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value}

    def _spec(self, method: str, benchmark: str, order: str, seed: int) -> RunSpec:
        from tpl.bench.spec import RunSpec
        from tpl.nets.compact import NAME as COMPACT

        special = dict(self.benchmark.get(benchmark, {}))
        common = self.options | special.pop("options", {})
        settings: dict[str, Any] = {"encoder": COMPACT} | self.run | special
        settings |= {name: Path(settings[name]).expanduser() for name in PATHS if name in settings}
        if isinstance(settings.get("per_task"), list):
            settings["per_task"] = tuple(settings["per_task"])
        known = options_of(method)
        options = {name: value for name, value in common.items() if name in known} | self.method.get(method, {})
        return RunSpec(benchmark, method, order=order, seed=seed, options=options, **settings)


def read_suite(file: Path) -> dict[str, Any]:
    """What a TOML file says, unchecked: options of the command line may still be put over it."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TplError(f"There is no suite file {file}; docs/suites.md shows what one looks like.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TplError(f"{file} cannot be read: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise TplError(f"{file} is not TOML: {error}.") from error


def over(content: Table, grid: Table, settings: Table, options: Table) -> dict[str, Any]:
    """`content` with what else was given (not None) put over it, special tables included.

    An option METHOD.NAME is for one method, any other for all. A shorter grid leaves out the tables of what it drops.
    """
    merged = {name: dict(value) if isinstance(value, Mapping) else value for name, value in content.items()}
    given = {name: list(v) if isinstance(v, tuple) else v for name, v in settings.items() if v is not None}
    everywhere = {name: value for name, value in options.items() if "." not in name}
    for kind in ("method", "benchmark"):
        dropped = set(content.get(f"{kind}s") or ()) - set(grid.get(f"{kind}s") or content.get(f"{kind}s") or ())
        tables = as_table(kind, content.get(kind, {}))
        stale = everywhere if kind == "method" else given
        merged[kind] = {
            name: {key: value for key, value in as_table(f"{kind}.{name}", table).items() if key not in stale}
            for name, table in tables.items()
            if name not in dropped
        }
    for name, table in merged["benchmark"].items():
        if "options" in table:
            special = as_table(f"benchmark.{name}.options", table["options"])
            table["options"] = {key: value for key, value in special.items() if key not in everywhere}
    merged |= {name: value for name, value in grid.items() if value is not None}
    merged["run"] = as_table("run", content.get("run", {})) | given
    merged["options"] = as_table("options", content.get("options", {})) | everywhere
    for name in options.keys() - everywhere.keys():
        wanted, _, option = name.rpartition(".")
        # An option's name is given with - or _; a method's has only one spelling.
        method = next((m for m in merged.get("methods", []) if m.replace("-", "_") == wanted), wanted)
        merged["method"].setdefault(method, {})[option] = options[name]
    return merged


def check_suite(content: Table) -> Suite:
    """The suite that a file, options, or both describe; every mistake is named before anything runs."""
    check_keys("A suite", content, [*GRID, "run", "options", "method", "benchmark"])
    grid = {name: grid_list(name, content) for name in GRID}
    tables = {name: as_table(name, content.get(name, {})) for name in ("run", "options", "method", "benchmark")}
    for method in grid["methods"]:
        refuse_unknown("method", method, method_names())
    for benchmark in grid["benchmarks"]:
        find_benchmark(benchmark)
    for order in grid["orders"]:
        check_order(order)
    check_settings("[run]", tables["run"])
    for kind in ("method", "benchmark"):
        for name in tables[kind]:
            if name not in grid[f"{kind}s"]:
                raise TplError(f"[{kind}.{name}] is for a {kind} that is not in {kind}s = {grid[f'{kind}s']}.")
            as_table(f"{kind}.{name}", tables[kind][name])
    check_options("[options]", tables["options"], grid["methods"])
    for name, table in tables["method"].items():
        check_options(f"[method.{name}]", table, [name])
    for name, table in tables["benchmark"].items():
        place = f"[benchmark.{name}]"
        check_settings(place, {key: value for key, value in table.items() if key != "options"}, more=["options"])
        check_options(
            f"[benchmark.{name}.options]", as_table(f"{place}.options", table.get("options", {})), grid["methods"]
        )
        if fixed := [key for key in ONE_FOR_ALL if key in table]:
            raise TplError(f"{place}: {fixed[0]} is the same for all runs; say it in [run].")
    checked: dict[str, Any] = {**grid, **tables}
    suite = Suite(**checked)
    for spec in suite.specs():
        check_spec(spec)
    return suite
