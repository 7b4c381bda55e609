"""What a run's method is called in every table: one that its benchmark has changed does not stand under its plain name.

Imports no torch, as a report does not, so an option counts as changed if the benchmark sets it and it is none of those
that only say how a method is trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tpl.bench.benchmarks import BENCHMARKS, TRAINED_WITH
from tpl.bench.paper.recipes import Recipe, load_recipes
from tpl.pretraining import pretrained_on

SHOWN_OPTIONS = 3  # in a name


def method_label(description: Mapping[str, Any]) -> str:
    """The method of a run, given its run.json, with what the benchmark or the encoder has changed in it.

    Such a run is named by the recipe that it follows, as in "tpl (scratch-rotations)", or else by the changed options,
    as in "tpl, changed: calibration=shift".
    """
    method, changed = str(description["method"]), changed_options(description)
    if not changed:
        return method
    recipe = followed_recipe(description)
    if recipe is not None:
        return f"{method} ({recipe.name})"
    named = [f"{name}={shown_option(value)}" for name, value in changed.items()]
    return f"{method}, changed: {', '.join(named[:SHOWN_OPTIONS])}{', …' if len(named) > SHOWN_OPTIONS else ''}"


def options_in_label(description: Mapping[str, Any]) -> set[str]:
    """The options that the label of a run's method stands for, so that they need not be named again."""
    changed = changed_options(description)
    recipe = followed_recipe(description) if changed else None
    if recipe is None:
        return set(list(changed)[:SHOWN_OPTIONS])
    return set(recipe.values(description["method"], description["encoder"]["name"], description["benchmark"]) or ())


def changed_options(description: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the method itself that the benchmark has set for it and the encoder.

    Early runs did not record this: for them, those options count that the benchmark sets today to the value they had.
    """
    options = description.get("options") or {}
    found = description.get("benchmark_options")
    if found is None:
        prescribed = _prescribed(description)
        found = {name: value for name, value in prescribed.items() if name in options and options[name] == value}
    return {name: value for name, value in found.items() if name not in TRAINED_WITH}


def followed_recipe(description: Mapping[str, Any]) -> Recipe | None:
    """The first named recipe whose settings a run had."""
    return next((recipe for recipe in load_recipes().values() if recipe.matches(description)), None)


def shown_option(value: Any) -> str:
    """The value of an option as it is typed, cut off if it is long."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 16 else text[:15] + "…"


def _prescribed(description: Mapping[str, Any]) -> dict[str, Any]:
    benchmark = BENCHMARKS.get(str(description.get("benchmark")))
    if benchmark is None:
        return {}
    pretrained = bool(pretrained_on(str(description["encoder"]["name"])))
    return benchmark.prescribed(str(description["method"]), pretrained)
