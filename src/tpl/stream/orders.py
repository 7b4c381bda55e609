"""The order in which classes arrive: natural, random by seed, or read from a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tpl.stream.errors import DataError

_FORMS = '"natural", "random:SEED" or "FILE.json:ID"'


def class_order(spec: str | int, dataset: str, n: int) -> list[int]:
    """The original class numbers of `dataset`, which has `n` classes, in order of arrival.

    `spec` is "natural", "random:SEED" (a bare whole number is such a seed too), or "FILE.json:ID", where the
    file looks like {"cifar100": {"1": [49, 98, ...]}}.
    """
    text = f"random:{spec}" if isinstance(spec, int) else spec.strip()
    if text == "natural":
        return list(range(n))
    kind, colon, key = text.rpartition(":")
    if not colon or not key:
        raise DataError(f"class order {text!r} is not understood: give {_FORMS}.")
    if kind == "random":
        return _random(key, n)
    if not kind.lower().endswith(".json"):
        raise DataError(f"class order {text!r} is not understood: give {_FORMS}.")
    return _from_file(Path(kind).expanduser(), key, dataset, n)


def check_order(spec: str) -> None:
    """Refuse a class order, as far as that can be told without its data set."""
    kind = spec.rpartition(":")[0]
    if not kind.lower().endswith(".json"):
        class_order(spec, "", 1)
    elif not Path(kind).expanduser().is_file():
        raise DataError(f"there is no class-order file {kind}: check the path.")


def _random(seed: str, n: int) -> list[int]:
    if not seed.isdecimal():
        raise DataError(f"the seed of a random class order must be a whole number, 0 or more, not {seed!r}.")
    return [int(number) for number in np.random.default_rng(int(seed)).permutation(n)]


def _from_file(path: Path, key: str, dataset: str, n: int) -> list[int]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"there is no class-order file {path}: check the path.") from error
    except (OSError, ValueError) as error:
        raise DataError(f"the class-order file {path} cannot be read as JSON: {error}") from error
    orders = _entry(content, dataset, f"{path} has no class orders for the data set")
    order = _entry(orders, key, f"{path} has, for {dataset}, no class order")
    if not isinstance(order, list) or not all(type(number) is int for number in order):
        raise DataError(f"{path}: class order {key!r} of {dataset} must be a list of whole numbers.")
    if len(order) != n:
        raise DataError(f"{path}: class order {key!r} of {dataset} has {len(order)} entries for {n} classes.")
    if sorted(order) != list(range(n)):
        raise DataError(f"{path}: class order {key!r} of {dataset} must hold each of 0 to {n - 1} exactly once.")
    return order


def _entry(table: object, key: str, complaint: str) -> object:
    known = table if isinstance(table, dict) else {}
    if key not in known:
        raise DataError(f"{complaint} {key!r}; it has: {', '.join(sorted(known)) or 'none'}.")
    return known[key]
