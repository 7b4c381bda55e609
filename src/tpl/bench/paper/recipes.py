"""Named recipes (recipes.toml): which settings a run must have to count as evidence of that name.

A recipe is chosen by its name and by the settings in run.json, never by the name of a folder. Imports no torch.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from tpl.names import refuse_unknown

UNDECLARED = "undeclared"  # stands for a recipe's name: settings that no recipe has


@dataclass(frozen=True)
class Scope:
    """Methods, encoders and benchmarks, as patterns; empty: all of them."""

    methods: tuple[str, ...] = ()
    encoders: tuple[str, ...] = ()
    benchmarks: tuple[str, ...] = ()

    def covers(self, method: str, encoder: str, benchmark: str) -> bool:
        """Whether a run of this method, encoder and benchmark is in it."""
        pairs = ((self.methods, method), (self.encoders, encoder), (self.benchmarks, benchmark))
        return all(not patterns or any(fnmatchcase(name, each) for each in patterns) for patterns, name in pairs)


@dataclass(frozen=True)
class Recipe:
    """Settings of training and answering that have a name."""

    name: str
    summary: str
    by_paper: bool  # whether the paper describes it
    scope: Scope
    options: Mapping[str, tuple[Any, ...]]  # the values that count, the first one being what `tpl reproduce` runs
    cases: tuple[tuple[Scope, Mapping[str, tuple[Any, ...]]], ...] = field(default=())

    def values(self, method: str, encoder: str, benchmark: str) -> dict[str, tuple[Any, ...]] | None:
        """The values that count for each option; None if the recipe is not for this method, encoder and benchmark."""
        if not self.scope.covers(method, encoder, benchmark):
            return None
        if not self.cases:
            return dict(self.options)
        fitting = [more for scope, more in self.cases if scope.covers(method, encoder, benchmark)]
        return dict(self.options) | dict(fitting[0]) if fitting else None

    def matches(self, description: Mapping[str, Any], leave_out: Sequence[str] = ()) -> bool:
        """Whether a run (its run.json) followed this recipe, whatever the options in `leave_out` are."""
        values = self.values(description["method"], description["encoder"]["name"], description["benchmark"])
        if values is None:
            return False
        given = absent() | dict(description["options"])
        return all(
            given[name] in allowed for name, allowed in values.items() if name in given and name not in leave_out
        )


@cache
def load_recipes() -> dict[str, Recipe]:
    """All recipes by name, in the order of the file."""
    return {name: _recipe(name, content) for name, content in _content()["recipes"].items()}


def find_recipe(name: str) -> Recipe:
    """A recipe by name, or an error that lists them all."""
    refuse_unknown("recipe", name, load_recipes())
    return load_recipes()[name]


def recipe_for(method: str, encoder: str, benchmark: str) -> Recipe | None:
    """The first recipe that is for a method, encoder and benchmark."""
    return next((r for r in load_recipes().values() if r.values(method, encoder, benchmark) is not None), None)


def paper_orders() -> int:
    """The number of class orders behind the paper's means."""
    return int(_content()["paper_orders"])


def absent() -> dict[str, Any]:
    """What runs did that were made before these options existed."""
    return dict(_content()["absent"])


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names in which settings differ."""
    names = dict.fromkeys(name for each in settings for name in each)
    return [name for name in names if len({json.dumps(each.get(name), sort_keys=True) for each in settings}) > 1]


@cache
def _content() -> dict[str, Any]:
    return tomllib.loads((files(__package__) / "recipes.toml").read_text(encoding="utf-8"))


def _recipe(name: str, content: Mapping[str, Any]) -> Recipe:
    cases = tuple((_scope(case), _values(case["options"])) for case in content.get("cases", ()))
    by_paper = bool(content.get("by_paper", False))
    return Recipe(name, content["summary"], by_paper, _scope(content), _values(content["options"]), cases)


def _scope(content: Mapping[str, Any]) -> Scope:
    return Scope(*(tuple(content.get(key, ())) for key in ("methods", "encoders", "benchmarks")))


def _values(options: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(value) if isinstance(value, list) else (value,) for name, value in options.items()}
