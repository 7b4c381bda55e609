"""How sizes, shares, names and the state of a model are put into words."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.markup import escape

from tpl.cli.app import err
from tpl.lines import printable

SHOWN = 10  # entries of a long list that are printed
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def memory_text(memory: dict[str, Any]) -> str:
    """A model's memory, from `Learner.facts`, in words."""
    if memory["kind"] == "images" and not memory["budget"] and not memory["images"]:
        return "no images are kept"
    if memory["kind"] == "images":
        return f"{memory['images']} images of at most {memory['budget']}, {size(memory['bytes'])}"
    kept = "statistics of features" if memory["kind"] == "features" else "a few sums"
    return f"no images: {kept}, {size(memory['bytes'])} with statistics of held-out images"


def bytes_on_disk(model: Path) -> int:
    """The size of all files of a model directory."""
    total = 0
    for folder, _, names in os.walk(model):
        for name in names:
            with suppress(OSError):  # a writer may be deleting old files
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def capacity_text(capacity: dict[str, float] | None) -> str:
    """How much of the network is in use, in words."""
    if capacity is None:
        return "unlimited: no task uses up units of the network"
    sets = int(capacity.get("sets", 1))
    where = f"{sets} sets of adapters; in the newest " if sets > 1 else ""
    free = f"{percent(1 - capacity['units'])} of the units are free, {percent(capacity['frozen'])} of the weights fixed"
    return where + free


def covariance_text(estimators: Sequence[str]) -> str:
    """How the tasks' covariances were estimated, in words."""
    words = {"none": "not shrunk", "oas": "shrunk by OAS, as images are few", "auto": "not recorded"}
    tasks = {name: [str(t) for t, each in enumerate(estimators) if each == name] for name in dict.fromkeys(estimators)}
    if len(tasks) == 1:
        return words.get(estimators[0], f"shrunk by {estimators[0]}")
    return "; ".join(f"{words.get(name, f'shrunk by {name}')} in task {', '.join(own)}" for name, own in tasks.items())


def unknown_text(floor: float | None) -> str:
    """The smallest --reject that can detect unknown images, in words; None: the method has no unknown score."""
    if floor is None:
        return "cannot be detected: this method has no unknown score; tpl, tpl-plus and closed-form have one"
    if floor >= 1:
        return "cannot be detected yet: too few images to compare with"
    return f"can be detected with --reject {round_up(floor):g} or more"


def round_up(share: float) -> float:
    """Round up to two significant digits: a share that somebody types must not be a little too small."""
    step = 10.0 ** (math.floor(math.log10(share)) - 1)
    return round(math.ceil(share / step - 1e-6) * step, 12)


def size(count: float) -> str:
    """A number of bytes in a readable unit."""
    for unit, factor in UNITS:
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} bytes"


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f} %"


def listed(names: Sequence[str], most: int = SHOWN) -> str:
    """Names joined by commas; of more than `most`, the first ones and a count."""
    return ", ".join(names) if len(names) <= most else f"{', '.join(names[:most])} and {len(names) - most} more"


def warn(text: str) -> None:
    """Print a warning as one line on stderr."""
    err.print(f"[yellow]warning:[/] {escape(printable(text))}", soft_wrap=True, highlight=False)


def warn_about_names(groups: Sequence[Sequence[str]]) -> None:
    """Warn about every group of class names that are nearly equal."""
    for group in groups:
        warn(f"{' and '.join(map(repr, group))} are almost the same name; each is a class of its own.")


def weighting_text(weighting: dict[str, Any]) -> str:
    """The weights of the tasks' models and of the classifier over all classes, in words."""
    images = weighting["fitted_on"]
    origin = f"fitted on {images} held-out image{'s' * (images != 1)}" if images else "as the options say"
    return f"task models ^ {weighting['bank']:g} x classifier over all classes ^ {weighting['expert']:g}, {origin}"
