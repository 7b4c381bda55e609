"""Upper bounds: the runs that rectified forgetting is measured against.

There are two, joint training and a ridge on its features. The better one counts: the higher Last, over the same tasks
and images with the same encoder. A bound must be trained to the end, so one with few epochs is named as too short.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tpl.bench.benchmarks import BOUNDS, FEWEST_EPOCHS
from tpl.bench.results import RunResult

__all__ = [
    "BOUNDS",
    "FEWEST_EPOCHS",
    "better_bound",
    "bound_name",
    "bounds_of",
    "bounds_sentence",
    "is_bound",
    "trained_to_the_end",
]

ALIKE = ("benchmark", "encoder", "classes", "data", "validation")  # what a run and its bound have in common


def is_bound(description: Mapping[str, Any]) -> bool:
    """Whether a run, given its run.json, is an upper bound."""
    return description.get("method") in BOUNDS


def bounds_of(run: RunResult, candidates: Iterable[RunResult]) -> list[RunResult]:
    """The bounds of a run, the best first: those over its tasks and images, preferably with its seed."""
    fitting = [
        each
        for each in candidates
        if is_bound(each.description)
        and all(each.description.get(key) == run.description.get(key) for key in ALIKE)
        and math.isfinite(each.summary.get("last") or math.nan)
    ]
    same = [each for each in fitting if each.description.get("seed") == run.description.get("seed")]
    return sorted(same or fitting, key=lambda each: -float(each.summary["last"]))


def better_bound(run: RunResult, candidates: Iterable[RunResult]) -> RunResult | None:
    """The bound that forgetting is measured against; None without one, or if the run is a bound itself."""
    return None if is_bound(run.description) else next(iter(bounds_of(run, candidates)), None)


def bound_name(description: Mapping[str, Any]) -> str:
    """A bound's method and epochs, with a remark if these are too few."""
    epochs = (description.get("options") or {}).get("epochs")
    name = str(description["method"])
    if epochs is not None:
        name += f", {epochs} epoch{'' if epochs == 1 else 's'}"
    return name if trained_to_the_end(description) else f"{name}, not a bound"


def trained_to_the_end(description: Mapping[str, Any]) -> bool:
    """Whether a joint run has enough epochs for an upper bound; True where its epochs are not known."""
    epochs = (description.get("options") or {}).get("epochs")
    return epochs is None or int(epochs) >= FEWEST_EPOCHS


def bounds_sentence(bounds: Sequence[RunResult], used: Iterable[str]) -> str:
    """Which bound forgetting is measured against, given all bounds and the `bound_name` of those that are used."""
    present = [method for method in BOUNDS if any(bound.description["method"] == method for bound in bounds)]
    if not present:
        return f"Rectified forgetting is not shown: it needs a run of {' or '.join(BOUNDS)} to compare with."
    names = " or ".join(sorted(set(used)))
    lacking = [method for method in BOUNDS if method not in present]
    rest = f"there is no run of {lacking[0]}" if lacking else f"the better of {' and '.join(BOUNDS)}"
    if not names:
        return "Rectified forgetting is not shown: no run has a bound over the same tasks and images."
    return f"Rectified forgetting is measured against {names}; {rest}."
