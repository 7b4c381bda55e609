"""Suites: the grid of runs behind a table, from a TOML file or from options.

methods = ["tpl", "hat"]         the grid: every method on every benchmark in every class order with every seed
benchmarks = ["digits-5t"]
orders = ["natural", "random:1"]     (by default natural alone)
seeds = [0, 1]                       (by default 0 alone)

[run]                            settings of all runs, named like the options of `tpl run`
[options]                        options of all methods that have them
[method.NAME]                    options of one method
[benchmark.NAME]                 settings for one benchmark, where they differ
[benchmark.NAME.options]         options of all methods on this benchmark

The more specific table wins: [method.NAME], then [benchmark.NAME.options], then [options], then the benchmark's own.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpl.bench.benchmarks import find_benchmark
from tpl.errors import TplError
from tpl.files import at_home, read_bounded
from tpl.names import method_names, refuse_unknown
from tpl.stream import check_order

if TYPE_CHECKING:  # mistakes in a file are reported before torch is imported, which takes seconds
    from tpl.bench.spec import RunSpec

Table = Mapping[str, Any]

GRID: dict[str, type] = {"methods": str, "benchmarks": str, "orders": str, "seeds": int}
DEFAULTS: dict[str, list[Any]] = {"orders": ["natural"], "seeds": [0]}
# The keys of [run], and the types of their values.
SETTINGS: dict[str, tuple[type, ...]] = {
    "encoder": (str,),
    "weights": (str,),
    "data": (str,),
    "download": (bool,),
    "per_task": (int, list),
    "tasks": (int,),
    "validation": (float, int),
    "held_out": (float, int),
    "device": (str,),
    "precision": (str,),
    "compile": (str,),
    "accept_contaminated_encoder": (bool,),
}
ONE_FOR_ALL = ("device",)  # workers are started for it
PATHS = ("data", "weights")
MAX_BYTES = 1 << 20  # of a suite file


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
        """All runs: by method, then by benchmark, class order and seed."""
        return [
            self._spec(method, benchmark, order, seed)
            for method in self.methods
            for benchmark in self.benchmarks
            for order in self.orders
            for seed in self.seeds
        ]

    def to_dict(self) -> dict[str, Any]:
        """The content of a suite file that describes this suite."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value}

    def _spec(self, method: str, benchmark: str, order: str, seed: int) -> RunSpec:
        from tpl.bench.spec import RunSpec

        special = dict(self.benchmark.get(benchmark, {}))
        common = self.options | special.pop("options", {})
        settings: dict[str, Any] = self.run | special
        settings |= {name: at_home(settings[name]) for name in PATHS if name in settings}
        if isinstance(settings.get("per_task"), list):
            settings["per_task"] = tuple(settings["per_task"])
        known = _options_of(method)
        options = {name: value for name, value in common.items() if name in known} | self.method.get(method, {})
        return RunSpec(benchmark, method, order=order, seed=seed, options=options, **settings)


def read_suite(file: Path) -> dict[str, Any]:
    """The content of a TOML file, unchecked: options of the command line may still replace parts of it."""
    try:
        return tomllib.loads(read_bounded(file, MAX_BYTES).decode())
    except FileNotFoundError:
        raise TplError(f"There is no suite file {file}; docs/suites.md shows what one looks like.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TplError(f"{file} cannot be read: {error}.") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise TplError(f"{file} is not TOML: {error}.") from error


def over(content: Table, grid: Table, settings: Table, options: Table) -> dict[str, Any]:
    """`content` with its values replaced by all others given that are not None, in the tables for single names, too.

    An option METHOD.NAME is for one method, any other for all. Tables of methods and benchmarks that are no longer in
    the grid are dropped.
    """
    merged = {name: dict(value) if isinstance(value, Mapping) else value for name, value in content.items()}
    given = {name: list(v) if isinstance(v, tuple) else v for name, v in settings.items() if v is not None}
    everywhere = {name: value for name, value in options.items() if "." not in name}
    for kind in ("method", "benchmark"):
        dropped = set(content.get(f"{kind}s") or ()) - set(grid.get(f"{kind}s") or content.get(f"{kind}s") or ())
        tables = _as_table(kind, content.get(kind, {}))
        stale = everywhere if kind == "method" else given
        merged[kind] = {
            name: {key: value for key, value in _as_table(f"{kind}.{name}", table).items() if key not in stale}
            for name, table in tables.items()
            if name not in dropped
        }
    for name, table in merged["benchmark"].items():
        if "options" in table:
            special = _as_table(f"benchmark.{name}.options", table["options"])
            table["options"] = {key: value for key, value in special.items() if key not in everywhere}
    merged |= {name: value for name, value in grid.items() if value is not None}
    merged["run"] = _as_table("run", content.get("run", {})) | given
    merged["options"] = _as_table("options", content.get("options", {})) | everywhere
    for name in options.keys() - everywhere.keys():
        wanted, _, option = name.rpartition(".")
        # The command line writes every - of an option as _, also in the method's name.
        method = next((m for m in merged.get("methods", []) if m.replace("-", "_") == wanted), wanted)
        merged["method"].setdefault(method, {})[option] = options[name]
    return merged


def check_suite(content: Table) -> Suite:
    """The suite described by a file, by options or by both; every mistake is reported before anything runs."""
    _check_keys("A suite", content, [*GRID, "run", "options", "method", "benchmark"])
    grid = {name: _grid_list(name, content) for name in GRID}
    tables = {name: _as_table(name, content.get(name, {})) for name in ("run", "options", "method", "benchmark")}
    for method in grid["methods"]:
        refuse_unknown("method", method, method_names())
    for benchmark in grid["benchmarks"]:
        find_benchmark(benchmark)
    for order in grid["orders"]:
        check_order(order)
    _check_settings("[run]", tables["run"])
    for kind in ("method", "benchmark"):
        for name in tables[kind]:
            if name not in grid[f"{kind}s"]:
                raise TplError(f"[{kind}.{name}] is for a {kind} that is not in {kind}s = {grid[f'{kind}s']}.")
            _as_table(f"{kind}.{name}", tables[kind][name])
    _check_options("[options]", tables["options"], grid["methods"])
    for name, table in tables["method"].items():
        _check_options(f"[method.{name}]", table, [name])
    for name, table in tables["benchmark"].items():
        place = f"[benchmark.{name}]"
        _check_settings(place, {key: value for key, value in table.items() if key != "options"}, more=["options"])
        _check_options(
            f"[benchmark.{name}.options]", _as_table(f"{place}.options", table.get("options", {})), grid["methods"]
        )
        if fixed := [key for key in ONE_FOR_ALL if key in table]:
            raise TplError(f"{place}: {fixed[0]} is the same for all runs; say it in [run].")
    checked: dict[str, Any] = {**grid, **tables}
    suite = Suite(**checked)
    for spec in suite.specs():
        try:
            spec.all_options()
            spec.check_encoder()
        except TplError as error:
            raise TplError(f"{spec.method} on {spec.benchmark}: {error}") from error
    return suite


def _grid_list(name: str, content: Table) -> list[Any]:
    """One list of the grid: not empty, of the right type, without duplicates."""
    values = content.get(name, DEFAULTS.get(name, []))
    kind = GRID[name]
    if not isinstance(values, list) or not values or any(type(value) is not kind for value in values):
        what = "whole numbers" if kind is int else "names"
        example = {"methods": '["tpl", "hat"]', "benchmarks": '["digits-5t"]', "orders": '["natural"]'}.get(name, "[0]")
        raise TplError(f"A suite needs {name}, a list of {what} such as {name} = {example}.")
    if len(set(values)) < len(values):
        twice = next(value for value in values if values.count(value) > 1)
        raise TplError(f"{name} names {twice} twice.")
    if kind is int and min(values) < 0:
        raise TplError(f"seeds must be 0 or more; got {min(values)}.")
    return list(values)


def _as_table(name: str, value: Any) -> dict[str, Any]:
    """A copy of `value`, which must be a table."""
    if not isinstance(value, Mapping):
        raise TplError(f"{name} must be a table of names and values; got '{value}'.")
    return dict(value)


def _check_keys(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse unknown keys; the error suggests the nearest known one."""
    known = list(known)
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" (do you mean '{near[0]}'?)" if near else ""
            raise TplError(f"{where} has no key '{key}'{hint}; there are {', '.join(known)}.")


def _check_settings(where: str, table: Table, more: Iterable[str] = ()) -> None:
    """Check the names and types of settings, and that paths exist."""
    _check_keys(where, table, [*SETTINGS, *more])
    for name, value in table.items():
        if type(value) not in SETTINGS[name]:
            kinds = " or a ".join(kind.__name__ for kind in SETTINGS[name])
            raise TplError(f"{where}: {name} must be a {kinds}; got {value!r}.")
        if name in PATHS and not at_home(value).exists() and not table.get("download"):
            raise TplError(f"{where}: {name} = {value!r} is not there. Paths are relative to the current folder.")
        if isinstance(value, list) and not all(type(size) is int for size in value):
            raise TplError(f"{where}: {name} must be a number of classes, or a list of them; got {value!r}.")


def _check_options(where: str, table: Table, methods: list[str]) -> None:
    """Refuse options that no method of the suite has."""
    known = sorted({name for method in methods for name in _options_of(method)})
    _check_keys(where, table, known)


def _options_of(method: str) -> list[str]:
    """The names of a method's options."""
    from tpl.methods import find_method

    return [option.name for option in dataclasses.fields(find_method(method).config_class)]
