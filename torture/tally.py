"""Counts of what happened, and the cases in which something went wrong."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECONDS, MEBIBYTES = 10.0, 512  # the most that any input may cost

SHOWN = 20  # broken promises of a part that are printed


class TooSlow(Exception):
    """A case takes more time than any case may."""


@dataclass
class Tally:
    """What one part of the programme found."""

    name: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def cases(self) -> int:
        """Number of cases."""
        return sum(self.counts.values())

    def fail(self, case: str) -> None:
        """Note a case in which a promise was broken; the first ones are printed at once."""
        self.counts["BROKEN"] += 1
        self.failures.append(case)
        if len(self.failures) <= SHOWN:
            print(f"BROKEN: {self.name}, seed {self.seed}: {case}", flush=True)

    def line(self) -> str:
        """The result in one line."""
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
        notes = "".join(f"; {what} {value}" for what, value in self.notes.items())
        seconds = time.monotonic() - self.started
        return f"{self.name}: seed {self.seed}, {self.cases} cases in {seconds:.0f} s: {counts}{notes}"


@contextmanager
def within(seconds: float = SECONDS) -> Iterator[None]:
    """Raise TooSlow in the main thread if the block takes longer."""

    def late(*_: object) -> None:
        raise TooSlow(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def peak() -> int:
    """The largest amount of memory that this process had since `forget_peak`, in MiB; 0 where that is not known."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) >> 10


def forget_peak() -> int:
    """Begin to measure anew; returns the memory in use now."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return 0
    return peak()
