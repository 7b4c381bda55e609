"""What a run tells the world while it works: plain events, drawn or written down by whoever listens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """Something happened. `kind` is one of: run, task, prepare, epoch, capacity, warning, stage."""

    kind: str
    data: dict[str, Any] = field(default_factory=dict)


Listener = Callable[[Event], None]


def silent(event: Event) -> None:
    """Nobody listens."""
