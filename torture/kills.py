"""A writer is killed at its n-th file operation, n = 1, 2, ... until it succeeds, and at random instants.

Each time the directory must hold, bit for bit, the model before or the model after; the next writer must clear up; and
the same command must work.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

from torture.operations import Countdown, watching
from torture.small_models import ENCODER, changes, kill, learned
from torture.tally import Tally
from tpl import Learner, TplError
from tpl.store import ModelStore

KILLED = 77  # exit status of a child that ended at its operation


def run(seed: int, cases: int, place: Path) -> Tally:
    """Kill writers of every command until there were that many kills."""
    tally, draw = Tally("kills", seed), random.Random(seed)
    base, model = place / "base", place / "model"
    learned(base)
    while tally.cases < cases:
        for name, change in changes().items():
            _fresh(base, model)
            old = kill.content(model)
            learner = Learner.load(model, device="cpu")
            change(learner)
            learner.save(model)
            new = kill.content(model)
            step = draw.randint(1, 3) if tally.cases else 1  # every operation in the first round
            number = draw.randint(1, step)
            while tally.cases < cases and _kill_at(tally, number, name, learner, base, model, old, new):
                number += step
    return tally


def _kill_at(
    tally: Tally, number: int, name: str, learner: Learner, base: Path, model: Path, old: Any, new: Any
) -> bool:
    """Kill the writer at one operation; whether it was still at work then."""
    _fresh(base, model)
    learner._origin = model.resolve(), old["header"]["commits"]

    def save() -> None:
        with watching(Countdown(number, lambda operation: os._exit(KILLED))):
            learner.save(model)

    _, status = os.waitpid(kill.in_child(save), 0)
    if os.waitstatus_to_exitcode(status) != KILLED:
        return False
    try:
        found = kill.content(model)
        with ModelStore(model).writing():  # the next writer clears up
            pass
        if found not in (old, new):
            tally.fail(f"{name}, operation {number}: neither the model before nor the one after")
        elif kill.content(model) != found or kill.leftovers(model):
            tally.fail(f"{name}, operation {number}: left behind {kill.leftovers(model)}")
        else:
            tally.counts[f"{name}: {'old' if found == old else 'new'}"] += 1
    except TplError as error:
        tally.fail(f"{name}, operation {number}: {error}")
    return True


def at_random(seed: int, cases: int, place: Path) -> Tally:
    """Kills at random instants of learning, updating and removing, training included."""
    tally = Tally("kills at random instants", seed)
    found = kill.run(cases, seed, ENCODER, place)
    tally.counts.update(found["left"])
    for entry in found["broken"]:
        tally.fail(str(entry))
    return tally


def _fresh(base: Path, model: Path) -> None:
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(base, model)
