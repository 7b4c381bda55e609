"""The n-th file operation fails, n = 1, 2, ... until the command succeeds, while a model is written or read.

A failed save leaves the model before, bit for bit, or the model after; a failed load is an error in words.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

from torture.operations import Countdown, Operation, watching
from torture.small_models import answers, changes, kill, learned
from torture.tally import Tally
from tpl import Learner, TplError

ERRORS = (errno.ENOSPC, errno.EIO, errno.EINTR, errno.EACCES, errno.EMFILE, errno.EROFS)
METHODS = ("tpl", "tpl-plus", "slda", "replay", "ease")  # of every kind of state


def run(seed: int, cases: int, place: Path, methods: tuple[str, ...] = METHODS) -> Tally:
    """Make every operation fail, with every error, until there were that many failures."""
    tally, draw = Tally("failing operations", seed), random.Random(seed)
    tally.notes["methods"] = len(methods)
    while tally.cases < cases:
        for method in methods:
            base, model = place / f"base-{method}", place / "model"
            if not base.exists():
                learned(base, method)
            names = list(changes()) if method == "tpl" else ["rename"]
            _writes(tally, draw, draw.choice(names), base, model, cases)
            _reads(tally, draw, base, cases)
    return tally


def failing(number: int, code: int) -> Countdown:
    """The n-th operation fails with an error of the system."""

    def fail(operation: Operation) -> None:
        raise OSError(code, os.strerror(code), operation.path)

    return Countdown(number, fail)


def _writes(tally: Tally, draw: random.Random, name: str, base: Path, model: Path, cases: int) -> None:
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(base, model)
    old, learner = kill.content(model), Learner.load(model, device="cpu")
    changes()[name](learner)
    erases = learner._erases
    learner.save(model)
    new: Any = kill.content(model)
    for number in range(1, 10_000):
        if tally.cases >= cases:
            return
        shutil.rmtree(model)
        shutil.copytree(base, model)
        learner._origin, learner._erases = (model.resolve(), old["header"]["commits"]), erases
        fault = failing(number, draw.choice(ERRORS))
        said = ""
        try:
            with watching(fault):
                learner.save(model)
        except TplError as error:
            said = str(error)
        except Exception as error:
            tally.fail(f"{name}, operation {number}: {type(error).__name__}: {error}")
            continue
        if fault.seen < number:
            return
        found = kill.content(model)
        same_as_new = _wherever(found) == _wherever(new)
        if (
            not (found == old or same_as_new)
            or (said.endswith("as it was.") and found != old)
            or not (said or same_as_new)
        ):
            tally.fail(f"{name}, operation {number}: not what was said ({said})")
        else:
            tally.counts["write: refused" if said else "write: went on"] += 1


def _wherever(content: dict[str, Any]) -> dict[str, Any]:
    """A model without its date and the names of its files: what could not be read for a comparison is written again."""
    header = {k: v for k, v in content["header"].items() if k not in ("files", "newest", "parts", "committed")}
    header["tasks"] = [{k: v for k, v in task.items() if k != "file"} for task in header["tasks"]]
    return content | {"header": header}


def _reads(tally: Tally, draw: random.Random, base: Path, cases: int) -> None:
    wanted = answers(Learner.load(base, device="cpu"))
    for number in range(1, 10_000):
        if tally.cases >= cases:
            return
        fault = failing(number, draw.choice(ERRORS))
        try:
            with watching(fault):
                learner = Learner.load(base, device="cpu")
        except TplError:
            tally.counts["read: refused"] += 1
            continue
        except Exception as error:
            tally.fail(f"reading, operation {number}: {type(error).__name__}: {error}")
            continue
        if fault.seen < number:
            return
        tally.counts["read: went on"] += 1
        if answers(learner) != wanted:
            tally.fail(f"reading, operation {number}: other answers")
