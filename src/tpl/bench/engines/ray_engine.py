"""Runs on a Ray cluster: a task of Ray each, on whichever machine has room."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from tpl.bench.engines.base import Engine, Job, JobEvent
from tpl.bench.engines.process import without_interrupts
from tpl.bench.engines.ray_crew import Crew
from tpl.bench.engines.work import CarryOut, carry_out
from tpl.cluster import Room, Share, connect, load_ray, share_out
from tpl.errors import TplError


class RayEngine(Engine):
    """Tasks on a Ray cluster, or on one of this machine alone."""

    name: ClassVar[str] = "ray"
    options: ClassVar[tuple[str, ...]] = ("address", "gpu_share")

    def __init__(
        self,
        device: str = "auto",
        workers: int | None = None,
        address: str | None = None,
        gpu_share: float | None = None,
    ) -> None:
        self.ray = load_ray()
        self.device, self.workers, self.gpu_share = device, workers, gpu_share
        if device != "cpu":
            share_out([Room(1, 1)], device, 1, workers, gpu_share)  # a mistake is told before anything is started
        self.own = connect(address)
        self.carry_out: CarryOut = carry_out  # what a worker does with a job
        self.in_place = True  # a machine that sees the suite's directory works in it; False: all directories travel
        try:
            self.share(1)
        except TplError:
            self._leave()
            raise

    def share(self, jobs: int) -> Share:
        """What one of so many jobs takes of a machine."""
        return share_out(Room.of_all(self.ray), self.device, jobs, self.workers, self.gpu_share)

    def slots(self, jobs: int) -> int:
        """As many as there is room for now, or `workers` if these are fewer."""
        room = self.share(jobs).fits(Room.of_all(self.ray))
        return max(1, min(jobs, room, self.workers or room))

    def run(self, jobs: Sequence[Job]) -> Generator[JobEvent]:
        """Carry out all jobs, each in a task of Ray."""
        with _mark(jobs, self.in_place) as mark:
            crew = Crew(self.ray, jobs, self.share(len(jobs)), self.workers, self.carry_out, mark)
            try:
                while crew.busy:
                    yield from crew.engage()
                    yield from crew.hear()
            finally:
                with without_interrupts():  # an impatient second Ctrl-C leaves nobody behind
                    crew.dismiss()
                    self._leave()

    def _leave(self) -> None:
        if self.own:
            self.ray.shutdown()


@contextmanager
def _mark(jobs: Sequence[Job], wanted: bool) -> Iterator[Path | None]:
    """A file beside the run directories, of a name that is nowhere else: a machine that has it sees this directory."""
    if not wanted or not jobs:
        yield None
        return
    file = Path(jobs[0].directory).parent / f".here-{uuid.uuid4().hex}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    try:
        yield file
    finally:
        with suppress(OSError):
            file.unlink()
