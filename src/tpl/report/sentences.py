"""The sentences of a report page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tpl.bench.results import contamination_of
from tpl.report.columns import CONTINUAL, LOWER, UPPER, Row, contaminated_by, percent

_FACTS = {
    "benchmark": "Benchmark",
    "encoder": "Encoder",
    "order": "Class order",
    "seed": "Seed",
    "precision": "Precision",
}
_MAX_VALUES = 5  # listed before an ellipsis


def lead(classes: Sequence[Sequence[str]]) -> str:
    """The experiment in one sentence."""
    sizes = sorted({len(names) for names in classes})
    total = _count(sum(len(names) for names in classes), "class", "classes")
    if len(classes) == 1:
        return f"{total} in a single task: a method must distinguish them."
    each = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return (
        f"{total} arrive in {len(classes)} tasks of {each}, one task after the other; after each, a "
        "method must distinguish all classes so far, without the task of an image and, except for a "
        "replay memory, without the images of earlier tasks."
    )


def finding(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The result in one sentence: pieces of text, each with its emphasis."""
    measured = [row for row in rows if row["last"] is not None]
    found = {role: [row for row in measured if row["role"] == role] for role in (LOWER, CONTINUAL, UPPER)}
    if not found[CONTINUAL]:
        return []
    winner = max(found[CONTINUAL], key=lambda row: float(row["last"]))
    start = "After the final task " + ("the best, " if len(found[CONTINUAL]) > 1 else "")
    pieces = [
        (start, ""),
        (str(winner["name"]), "strong"),
        (", classifies " if len(found[CONTINUAL]) > 1 else " classifies ", ""),
        (f"{percent(winner['last'])} %", "strong"),
        (" of the test images correctly", ""),
    ]
    others = []
    if found[UPPER]:
        bound = max(found[UPPER], key=lambda row: float(row["last"]))
        others.append(f"{bound['name']}, which trains on all data at once, reaches {percent(bound['last'])} %")
    if found[LOWER]:
        others.append(f"plain fine-tuning, the lower bound, reaches {percent(found[LOWER][0]['last'])} %")
    return [*pieces, (f"; {' and '.join(others)}." if others else ".", "")]


def facts(descriptions: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Benchmark, encoder and so on, each with its values in these runs."""
    found = [("Test images", " or ".join(_distinct(f"{sum(d['test_images']):,}" for d in descriptions)))]
    for key, label in _FACTS.items():
        values = [value for value in _distinct(fact(description, key) for description in descriptions) if value]
        if values:
            plural = label if len(values) == 1 else f"{label}s"
            found.append((plural, ", ".join(values[:_MAX_VALUES]) + (", …" if len(values) > _MAX_VALUES else "")))
    return found


def machines(descriptions: Sequence[Mapping[str, Any]]) -> str:
    """The machines on which the runs were made."""
    names = _distinct(str((d.get("environment") or {}).get("device") or "not recorded") for d in descriptions)
    return ", ".join(names[:_MAX_VALUES]) + (", …" if len(names) > _MAX_VALUES else "")


def summary(descriptions: Sequence[Mapping[str, Any]]) -> str:
    """The content of a page with several experiments in one sentence."""
    methods, benchmarks, encoders = (
        len(_distinct(fact(description, key) for description in descriptions))
        for key in ("method", "benchmark", "encoder")
    )
    what = f"{_count(len(descriptions), 'run', 'runs')} of {_count(methods, 'method', 'methods')}"
    where = f"{_count(benchmarks, 'benchmark', 'benchmarks')} with {_count(encoders, 'encoder', 'encoders')}"
    return f"{what} on {where}."


def cautions(descriptions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Warnings about numbers that are not strictly comparable."""
    found = []
    seen = sorted({name for description in descriptions for name in contamination_of(description)})
    if seen:
        found.append(f"{contaminated_by(seen)}: these numbers do not say how well the classes were learned.")
    if any(description.get("validation") for description in descriptions):
        found.append("Measured on images held out from the training data, not on the test set.")
    images: dict[str, set[str]] = {}
    for description in descriptions:
        tasks = json.dumps([description["classes"], description.get("validation") and description["seed"]])
        images.setdefault(tasks, set()).add(json.dumps(description.get("data"), sort_keys=True))
    if any(len(hashes) > 1 for hashes in images.values()):
        found.append("The runs did not use the same images; their numbers are not strictly comparable.")
    methods: dict[str, set[str]] = {}
    for description in descriptions:
        methods.setdefault(str(description["method"]), set()).add(json.dumps(description["classes"]))
    if len({frozenset(orders) for orders in methods.values()}) > 1:
        found.append("Not every method was run in the same class orders; differences may be those of the orders.")
    return found


def fact(description: Mapping[str, Any], key: str) -> str:
    """An entry of run.json as text; for an encoder its name."""
    value = description.get(key)
    return str(value.get("name", "")) if isinstance(value, dict) else "" if value is None else str(value)


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
