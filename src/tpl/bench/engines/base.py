"""The seam between a suite and what carries out its runs.

A suite hands over jobs, which are plain data, and hears events, which are plain data too. An engine therefore may be
processes on this machine, or on many. Results are no events: they lie in the run directories, where an engine whose
workers are elsewhere puts them before it tells of them.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from tpl.bench.spec import RunSpec

# torch is imported where a job is carried out: an engine itself starts and counts processes, no more.

STARTED, RETRIED, FINISHED, FAILED = "started", "retried", "finished", "failed"
ATTEMPTS = 2  # a run whose process dies is taken up once more
_PATHS = ("data", "weights")


@dataclass(frozen=True)
class Job:
    """One run to be made, or to go on with: what, and in which directory."""

    name: str  # tells jobs of a suite apart
    directory: str
    spec: dict[str, Any]  # the fields of a RunSpec, as JSON has them
    track: list[str] = field(default_factory=list)  # trackers that hear of the run

    @classmethod
    def of(cls, spec: RunSpec, place: Path, track: Sequence[str] = ()) -> Job:
        """The job of making a run in a directory. Its paths hold whatever the current folder of a worker is."""
        content = dataclasses.asdict(spec)
        for name in _PATHS:
            content[name] = None if content[name] is None else str(content[name].expanduser().absolute())
        return cls(place.name, str(place.absolute()), content, list(track))

    def run_spec(self) -> RunSpec:
        """What to run."""
        from tpl.bench.spec import RunSpec

        paths = {name: None if self.spec[name] is None else Path(self.spec[name]) for name in _PATHS}
        sizes = self.spec["per_task"]
        return RunSpec(**self.spec | paths | {"per_task": tuple(sizes) if isinstance(sizes, list | tuple) else sizes})

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The job of that line."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class JobEvent:
    """Something happened to a job.

    Either its life: `started` (attempt), `retried` (error), `finished`, `failed` (error); the last two end it. Or what
    its run tells while it works: the kinds of `tpl.engine.Event`.
    """

    job: str
    kind: str
    data: dict[str, Any] = field(default_factory=dict)


class Engine(ABC):
    """Carries out jobs, several at a time."""

    name: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()  # what else it can be told, beside the device and how many workers

    @abstractmethod
    def slots(self, jobs: int) -> int:
        """How many of so many jobs are carried out at a time."""

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> Generator[JobEvent]:
        """Carry out all jobs. Ends when each has finished or failed; closed earlier, it ends its workers first.

        Whatever happens to one job, a crash of its process included, happens to no other. A job whose process dies
        starts again, up to ATTEMPTS times in all, and goes on from what lies in its directory.
        """
