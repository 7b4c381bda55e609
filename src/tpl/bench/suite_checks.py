"""What a suite may say: names, types and values, each mistake with an error of its own."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpl.errors import TplError

if TYPE_CHECKING:
    from tpl.bench.spec import RunSpec

Table = Mapping[str, Any]

GRID: dict[str, type] = {"methods": str, "benchmarks": str, "orders": str, "seeds": int}
DEFAULTS: dict[str, list[Any]] = {"orders": ["natural"], "seeds": [0]}
# What [run] may say, and the types of its values.
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
}
ONE_FOR_ALL = ("device",)  # workers are started for it
PATHS = ("data", "weights")


def grid_list(name: str, content: Table) -> list[Any]:
    """One side of the grid, each value named once."""
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


def as_table(name: str, value: Any) -> dict[str, Any]:
    """A copy of a table that must be one."""
    if not isinstance(value, Mapping):
        raise TplError(f"{name} must be a table of names and values; got '{value}'.")
    return dict(value)


def check_keys(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """No key may be unknown; the nearest one is named."""
    known = list(known)
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" (do you mean '{near[0]}'?)" if near else ""
            raise TplError(f"{where} has no key '{key}'{hint}; there are {', '.join(known)}.")


def check_settings(where: str, table: Table, more: Iterable[str] = ()) -> None:
    """Settings of runs: their names, types, and that paths lead somewhere."""
    check_keys(where, table, [*SETTINGS, *more])
    for name, value in table.items():
        if type(value) not in SETTINGS[name]:
            kinds = " or a ".join(kind.__name__ for kind in SETTINGS[name])
            raise TplError(f"{where}: {name} must be a {kinds}; got {value!r}.")
        if name in PATHS and not Path(value).expanduser().exists() and not table.get("download"):
            raise TplError(f"{where}: {name} = {value!r} is not there. Paths are relative to the current folder.")
        if isinstance(value, list) and not all(type(size) is int for size in value):
            raise TplError(f"{where}: {name} must be a number of classes, or a list of them; got {value!r}.")


def check_options(where: str, table: Table, methods: list[str]) -> None:
    """Every option must be one of some method in the suite: one that none has is a mistake."""
    known = sorted({name for method in methods for name in options_of(method)})
    check_keys(where, table, known)


def check_spec(spec: RunSpec) -> None:
    """All options of a run, as its method will take them."""
    try:
        spec.all_options()
    except TplError as error:
        raise TplError(f"{spec.method} on {spec.benchmark}: {error}") from error


def options_of(method: str) -> list[str]:
    """The names of a method's options."""
    from tpl.methods import find_method

    return [option.name for option in dataclasses.fields(find_method(method).config_class)]
