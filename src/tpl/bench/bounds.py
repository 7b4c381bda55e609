"""Upper bounds: the runs that rectified forgetting is measured against.

There are two, joint training and a ridge on its features. The better one counts: the higher Last, over the same classes
and images with the same encoder. A bound over these images in other tasks, such as one of c100-10t for a run of
c100-20t, ends where this one would, so its Last counts if there is none over the same tasks; nothing else of it does.
A bound must be trained to the end, so one with few epochs is named as too short.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tpl.bench.benchmarks import BOUNDS, FEWEST_EPOCHS
from tpl.bench.results import RunResult, all_classes, same_images, same_tasks

__all__ = [
    "BOUNDS",
    "FEWEST_EPOCHS",
    "better_bound",
    "bound_name",
    "bounds_of",
    "bounds_sentence",
    "elsewhere",
    "fits",
    "is_bound",
    "last_alone",
    "trained_to_the_end",
]


def is_bound(description: Mapping[str, Any]) -> bool:
    """Whether a run, given its run.json, is an upper bound."""
    return description.get("method") in BOUNDS


def fits(run: RunResult, candidate: RunResult) -> bool:
    """Whether a run is an upper bound of another one: over the same classes and images, with the same encoder."""
    return (
        is_bound(candidate.description)
        and candidate.description.get("encoder") == run.description.get("encoder")
        and math.isfinite(candidate.summary.get("last") or math.nan)
        and same_images(run.description, candidate.description)
    )


def bounds_of(run: RunResult, candidates: Iterable[RunResult]) -> list[RunResult]:
    """The bounds of a run, the best first: preferably those over its tasks, then in its class order, with its seed."""
    found = [each for each in candidates if fits(run, each)]
    for preferred in (same_tasks, _same_order, _same_seed):
        found = [each for each in found if preferred(run.description, each.description)] or found
    return sorted(found, key=lambda each: -float(each.summary["last"]))


def _same_order(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all_classes(one) == all_classes(other)


def _same_seed(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.get("seed") == other.get("seed")


def better_bound(run: RunResult, candidates: Iterable[RunResult]) -> RunResult | None:
    """The bound that forgetting is measured against; None without one, or if the run is a bound itself."""
    return None if is_bound(run.description) else next(iter(bounds_of(run, candidates)), None)


def last_alone(bound: RunResult) -> RunResult:
    """A bound over other tasks, for the table of a run: all but its Last depends on how the images came in tasks."""
    return RunResult(bound.description, {"last": bound.summary.get("last")}, {})


def bound_name(description: Mapping[str, Any], run: Mapping[str, Any] | None = None) -> str:
    """A bound's method and epochs, with a remark if these are too few.

    With the description of the `run` that is measured against it, the name says if it is over other tasks.
    """
    epochs = (description.get("options") or {}).get("epochs")
    name = str(description["method"])
    if epochs is not None:
        name += f", {epochs} epoch{'' if epochs == 1 else 's'}"
    if run is not None:
        name += elsewhere(description, run)
    return name if trained_to_the_end(description) else f"{name}, not a bound"


def elsewhere(bound: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """What is added to a bound's name if it is of another benchmark or over other tasks than a run; else nothing."""
    if bound.get("benchmark") != run.get("benchmark"):
        return f", run of {bound.get('benchmark')}"
    return "" if same_tasks(run, bound) else ", run over other tasks"


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
        return "Rectified forgetting is not shown: no run has a bound over the same images."
    return f"Rectified forgetting is measured against {names}; {rest}."
