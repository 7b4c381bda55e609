"""Progress events of a run, and the callbacks that draw or log them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class RunLabel:
    """Which of a command's runs an event belongs to; a command with a single run needs no label."""

    name: str = ""  # what distinguishes the run from the others, e.g. its method
    number: int = 0  # counted from 0
    runs: int = 1  # of the whole command
    together: int = 1  # runs that learn side by side; their numbers are consecutive

    def within(self, outer: RunLabel) -> RunLabel:
        """The label in a command that makes several such groups of runs, of which `outer` is one."""
        name = ", ".join(part for part in (outer.name, self.name) if part)
        number, together = outer.number * self.runs + self.number, outer.together * self.together
        return RunLabel(name, number, outer.runs * self.runs, together)


@dataclass(frozen=True)
class Event:
    """An event of the run `run`.

    `kind` is one of: run, task, prepare and encode (some more images were read, or went through the frozen encoder),
    epoch, trained, capacity, warning, stage (a task of a benchmark is learned and measured), learned (a task of a model
    is), phase and step (work without training, in steps of about equal length).
    """

    kind: str
    data: dict[str, Any] = field(default_factory=dict)
    run: RunLabel = RunLabel()


FREQUENT = frozenset({"prepare", "encode"})  # kinds that come many times a second, and of no interest afterwards

Callback = Callable[[Event], None]


def no_callback(event: Event) -> None:
    """A callback that does nothing."""


def labelled(callback: Callback, label: RunLabel) -> Callback:
    """A callback that passes every event on to `callback` with the label of its run."""
    return lambda event: callback(replace(event, run=event.run.within(label)))
