"""A writer is killed at its n-th file operation, n = 1, 2, ... until it succeeds, and at random instants.

Each time the directory must hold, bit for bit, the model before or the model after; the next writer must clear up; and
the same command must work. After every operation of every command, further kills strike directories that an earlier
kill has left as they are.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

from torture.operations import Countdown, watching
from torture.small_models import ENCODER, kill
from torture.tally import Tally
from torture.writers import Found, Writer, commands, found_in
from tpl import TplError
from tpl.store import ModelStore

KILLED = 77  # exit status of a child that ended at its operation
METHODS = {  # with the commands of each; a command that trains is killed with a method that does not
    "tpl": ("learn", "update", "remove", "rename", "undo", "undo --keep", "merge"),
    "closed-form": ("serve-learning", "observe", "merge", "undo", "learn"),
}


def run(seed: int, cases: int, place: Path) -> Tally:
    """Kill every command at every operation, then at drawn ones, until there were that many kills."""
    tally, draw = Tally("kills", seed), random.Random(seed)
    models, model, left = place / "models", place / "model", place / "left"
    models.mkdir()
    known, ends, lengths = [], [], []
    for method, names in METHODS.items():
        ready = commands(models, method)
        for name in names:
            known.append(ready[name]())
            ends.append(_undisturbed(known[-1], model))
            number = 1
            while tally.cases < cases and _kill_at(tally, number, known[-1], model, *ends[-1]):
                number += 1
            lengths.append(number)
            if tally.cases >= cases:
                return tally
    tally.notes["operations of all commands"] = sum(lengths) - len(lengths)
    while tally.cases < cases:
        at = draw.randrange(len(known))
        writer = known[at]
        if draw.random() < 0.7:  # in what another kill has left
            writer.start(left)
            _killed(writer, left, draw.randint(1, lengths[at]))
            if left.exists() and found_in(left) == ends[at][0]:
                writer = Writer(f"{writer.name}, again", left, writer.write)
        _kill_at(tally, draw.randint(1, lengths[at]), writer, model, *ends[at])
    return tally


def _undisturbed(writer: Writer, model: Path) -> tuple[Found, Found]:
    """The model before the command and the one after it."""
    writer.start(model)
    before = found_in(model)
    _, status = os.waitpid(kill.in_child(lambda: writer.write(model)), 0)
    if status:
        raise RuntimeError(f"{writer.name} fails even if nobody disturbs it")
    return before, found_in(model)


def _killed(writer: Writer, model: Path, number: int) -> bool:
    """Do the work in another process, which is killed at an operation; whether it was still at work then."""

    def write() -> None:
        with watching(Countdown(number, lambda operation: os._exit(KILLED))):
            writer.write(model)

    _, status = os.waitpid(kill.in_child(write), 0)
    return os.waitstatus_to_exitcode(status) == KILLED


def _kill_at(tally: Tally, number: int, writer: Writer, model: Path, before: Found, after: Found) -> bool:
    """Kill the writer at one operation and judge what is left; whether it was still at work then."""
    writer.start(model)
    if not _killed(writer, model, number):
        return False
    where = f"{writer.name}, operation {number}"
    try:
        found = found_in(model)
        waits = _without_waiting(found) == _without_waiting(before) and found != before  # not learned, but not lost
        if not (found in (before, after) or (waits and writer.name.startswith("observe"))):
            tally.fail(f"{where}: neither the model before nor the one after")
            return True
        if found == before and (found is None or tally.cases % 4 == 0):
            writer.write(model)  # the same command works, and clears up
            found, where = found_in(model), f"{where}, and again"
            if found != after:
                tally.fail(f"{where}: not the model after")
                return True
        elif found is not None:
            with ModelStore(model).writing():  # the next writer clears up
                pass
        left = set(kill.leftovers(model)) - {"waiting.bin"}
        if left or found_in(model) != found:
            tally.fail(f"{where}: left behind {sorted(left)}")
        else:
            tally.counts[f"{writer.name}: {'old' if where.endswith('again') or found != after else 'new'}"] += 1
    except TplError as error:
        tally.fail(f"{where}: {error}")
    return True


def _without_waiting(found: Found) -> Found:
    return None if found is None else found | {"waiting": {}}


def at_random(seed: int, cases: int, place: Path) -> Tally:
    """Kills at random instants of learning, updating and removing, training included."""
    tally = Tally("kills at random instants", seed)
    found = kill.run(cases, seed, ENCODER, place)
    tally.counts.update(found["left"])
    for entry in found["broken"]:
        tally.fail(str(entry))
    return tally
