"""One run over several processes, a GPU each: all train one network, each on its rows of every batch.

Every process draws the same batches and uses every n-th row of them. Gradients are summed in one flat bucket, weighted
by each process's share of the rows that count, so that the sum is the gradient of the whole batch. After that all
processes compute the same, and the networks stay equal. The step itself is `SharedStep` in `train`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed

from tpl.errors import TplError

PATIENCE = timedelta(days=1)  # the others wait while the first process downloads images or measures


@dataclass(frozen=True)
class Processes:
    """The processes of a run, from the point of view of one of them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # its number on this machine
    captures: bool = True  # whether sums on a GPU can be part of a captured step

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self.size == 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def own_device(self, name: str) -> str:
        """The device of this process, if the run was started with device `name`."""
        if self.alone or name == "cpu":
            return name
        if name != "cuda":
            raise TplError(f"Several processes cannot share '{name}': use --device cuda (a GPU each) or cpu.")
        return f"cuda:{self.local_rank}"

    def add_up(self, values: Tensor) -> None:
        """Replace the values by their sum over all processes, the same bits in each."""
        distributed.all_reduce(values)

    def take_from_first(self, values: Tensor) -> None:
        """Replace the values by those of the first process."""
        distributed.broadcast(values, 0)

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """A block that the first process runs before all others."""
        if not self.leads:
            self._meet()
        yield
        if self.leads and not self.alone:
            self._meet()

    def _meet(self) -> None:
        distributed.all_reduce(torch.zeros(1))  # on the CPU: a GPU would be kept busy waiting


ALONE = Processes()
_current: ContextVar[Processes] = ContextVar("processes", default=ALONE)


def current() -> Processes:
    """The processes that this one works with."""
    return _current.get()


@contextmanager
def working_with(processes: Processes) -> Iterator[Processes]:
    """A context in which these processes train together."""
    token = _current.set(processes)
    try:
        yield processes
    finally:
        _current.reset(token)


def launched() -> bool:
    """Whether this process is one of several that torchrun, or something like it, has started."""
    known = all(name in os.environ for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    return known and int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def joined(device: str) -> Iterator[Processes]:
    """Work with the processes that were started beside this one, on that kind of device; alone if there are none."""
    if not launched():
        yield ALONE
        return
    on_gpu = device != "cpu" and torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if on_gpu and local >= (found := torch.cuda.device_count()):
        raise TplError(
            f"Process {local + 1} on this machine has no GPU, there are {found}: start no more processes than that "
            "(--nproc-per-node), or compute with --device cpu."
        )
    if on_gpu:
        torch.cuda.set_device(local)
    processes = Processes(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), local, captures=on_gpu)
    try:
        with _results_only():
            distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=PATIENCE)
        with working_with(processes):
            yield processes
    except RuntimeError as error:
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        lost = f"Process {processes.rank} has lost connection to the others; the first that stopped reports the reason."
        raise TplError(f"{lost} ({str(error).splitlines()[0]})") from error
    # Not after an error: the others may be waiting for something that will never come.
    distributed.destroy_process_group()


@contextmanager
def _results_only() -> Iterator[None]:
    """Redirect stdout to stderr, since stdout is for results and Gloo prints its connections."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
