"""The n-th file operation fails, n = 1, 2, ... until the command succeeds, while a model is written or read.

A failed command leaves the model before, bit for bit, or the model after, and says which; a failed sync is not passed
over in silence; a failed load is an error in words. Every method there is has its turn.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from torture.operations import Countdown, Operation, watching
from torture.small_models import answers, learned
from torture.tally import Tally
from torture.writers import Found, Writer, commands, found_in
from tpl import Learner, TplError
from tpl.methods import load_methods
from tpl.methods.bank import bank
from tpl.versions import history

ERRORS = (errno.ENOSPC, errno.EIO, errno.EINTR, errno.EACCES, errno.EMFILE, errno.EROFS)
FIRST = ("tpl", "closed-form")  # with all their commands; of other methods all but those that train
TRAINING = ("observe", "serve-learning")
GROWN = "tpl-plus with grow_adapters"


def run(seed: int, cases: int, place: Path, methods: tuple[str, ...] = (), command: str | None = None) -> Tally:
    """Make every operation fail, with an error that is drawn, until there were that many failures."""
    tally, draw = Tally("failing operations", seed), random.Random(seed)
    chosen = methods or (*FIRST, GROWN, *sorted(set(load_methods()) - set(FIRST)))
    if not methods:
        with mock.patch.object(bank, "FULL", 0.0):  # each task has adapters of its own
            learned(place / f"base-{GROWN}", "tpl-plus", grow_adapters="when_full")
    done = 0
    for method in itertools.cycle(chosen):  # one command of each method at a time
        known = commands(place, method)
        names = [name for name in known if method in FIRST or name not in TRAINING]
        with suppress(TplError):  # a method that cannot remove a class
            writer = known[command or names[done // len(chosen) % len(names)]]()
            _writes(tally, draw, writer, place / "model", cases)
        if done < len(chosen):
            _reads(tally, draw, place / f"base-{method}", cases)
        done += 1
        if tally.cases >= cases:
            break
    tally.notes["methods"] = min(done, len(chosen))
    return tally


def failing(number: int, code: int) -> Countdown:
    """The n-th operation fails with an error of the system."""

    def fail(operation: Operation) -> None:
        raise OSError(code, os.strerror(code), operation.path)

    return Countdown(number, fail)


class Syncs:
    """The folders and files that are not on disk, as a sync failed: a deletion and the lock may be lost."""

    def __init__(self, fault: Countdown) -> None:
        self.fault, self.changed, self.failed = fault, set[str](), ""

    def see(self, operation: Operation) -> None:
        """Before an operation."""
        if operation.kind == "sync" and self.fault.seen + 1 == self.fault.number:
            self.failed = operation.path
        self.fault(operation)

    def done(self, operation: Operation) -> None:
        """After an operation that succeeded."""
        path, name = os.path.split(operation.target or operation.path)
        if operation.kind in ("create", "make", "rename") and not name.startswith(".lock"):
            self.changed.add(path)
        elif operation.kind == "write":
            self.changed.add(operation.path)
        elif operation.kind == "sync":
            self.changed.discard(operation.path)

    @property
    def lost(self) -> bool:
        """Whether what should have been synced still is not."""
        return self.failed in self.changed


def _writes(tally: Tally, draw: random.Random, writer: Writer, model: Path, cases: int) -> None:
    writer.start(model)
    old = found_in(model)
    writer.write(model)
    new = found_in(model)
    for number in range(1, 10_000):
        if tally.cases >= cases:
            return
        writer.start(model)
        fault, said, where = failing(number, draw.choice(ERRORS)), "", f"{writer.name}, operation {number}"
        syncs = Syncs(fault)
        try:
            with watching(syncs.see, syncs.done):
                writer.write(model)
        except TplError as error:
            said = str(error)
        except Exception as error:
            tally.fail(f"{where}: {type(error).__name__}: {error}")
            continue
        if fault.seen < number:
            return
        found = found_in(model)
        whole = _wherever(found) == _wherever(new)
        before = found == old or (writer.name == "observe" and _wherever(found) == _wherever(old))
        if not (before or whole) or (said.endswith("as it was.") and not before) or not (said or whole):
            tally.fail(f"{where}: not what was said ({said})")
        elif syncs.lost and not said:
            tally.fail(f"{where}: the sync of {syncs.failed} failed in silence")
        else:
            tally.counts["write: refused" if said else "write: went on"] += 1


def _wherever(content: Found) -> Found:
    """A model without its date and the names of its files: what could not be read for a comparison is written again.

    Without the images that wait, too: a call that failed may have taken them already.
    """
    if content is None:
        return None
    left_out = ("files", "newest", "parts", "committed", "older")
    header = {k: v for k, v in content["header"].items() if k not in left_out}
    header["tasks"] = [{k: v for k, v in task.items() if k != "file"} for task in header["tasks"]]
    return content | {"header": header, "waiting": {}}


def _reads(tally: Tally, draw: random.Random, base: Path, cases: int) -> None:
    reads: dict[str, Callable[[Path], Any]] = {"loading": _answers, "the history of": history}
    for what, read in reads.items():
        wanted = read(base)
        for number in range(1, 10_000):
            if tally.cases >= cases:
                return
            fault = failing(number, draw.choice(ERRORS))
            try:
                with watching(fault):
                    found = read(base)
            except TplError:
                tally.counts["read: refused"] += 1
                continue
            except Exception as error:
                tally.fail(f"{what} {base.name}, operation {number}: {type(error).__name__}: {error}")
                continue
            if fault.seen < number:
                break
            tally.counts["read: went on"] += 1
            if found != wanted:
                tally.fail(f"{what} {base.name}, operation {number}: another result")


def _answers(base: Path) -> list[dict[str, Any]]:
    return answers(Learner.load(base, device="cpu"))
