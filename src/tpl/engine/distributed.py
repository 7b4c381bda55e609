"""One run over several processes, a GPU each: all of them learn one network, each from its rows of every batch.

Every process draws the same batches and takes every n-th row of them. Gradients are added up in one flat bucket, each
process's weighed by its share of the rows that count, so that the sum is the gradient of the whole batch. After that
all do the same: whatever looks at gradients sees those of the whole batch, and the networks stay equal.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from tpl.engine.batches import IGNORED, Batches, Inputs
from tpl.engine.steps import Step
from tpl.errors import TplError

PATIENCE = timedelta(days=1)  # the others wait while the first process downloads images or measures


@dataclass(frozen=True)
class Processes:
    """The processes of a run, as one of them sees them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # its number on this machine
    records: bool = True  # whether sums on a GPU can be part of a recorded step

    @property
    def alone(self) -> bool:
        """Whether there is nobody else."""
        return self.size == 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and talks."""
        return self.rank == 0

    def own_device(self, name: str) -> str:
        """The device that this process computes on, where `name` is asked of all."""
        if self.alone or name == "cpu":
            return name
        if name != "cuda":
            raise TplError(f"Several processes cannot share '{name}': say --device cuda (a GPU each) or cpu.")
        return f"cuda:{self.local_rank}"

    def add_up(self, values: Tensor) -> None:
        """Replace the values by their sum over all processes, the same bits in each."""
        distributed.all_reduce(values)

    def take_from_first(self, values: Tensor) -> None:
        """Replace the values by those of the first process."""
        distributed.broadcast(values, 0)

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """What the first process does inside is done before any other begins with it."""
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
    """Everything that is trained inside is trained by all of them together."""
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
            f"Process {local + 1} on this machine finds no GPU of its own, there are {found}: start no more than that "
            "(--nproc-per-node), or compute with --device cpu."
        )
    if on_gpu:
        torch.cuda.set_device(local)
    processes = Processes(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), local, records=on_gpu)
    try:
        with _results_only():
            distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=PATIENCE)
        with working_with(processes):
            yield processes
    except RuntimeError as error:
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        lost = f"Process {processes.rank} has lost the others; the first to stop says why."
        raise TplError(f"{lost} ({str(error).splitlines()[0]})") from error
    # Not after an error: the others may be waiting for something that will never come.
    distributed.destroy_process_group()


@contextmanager
def _results_only() -> Iterator[None]:
    """Keep stdout for results: what a library prints inside goes to stderr. (Gloo tells of its connections.)"""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


class SharedStep(Step):
    """A training step whose batch several processes share."""

    def __init__(self, processes: Processes, *step: Any) -> None:
        super().__init__(*step)
        self.processes = processes

    def batch(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """This process's rows of the batch, as many new as replayed ones if those are equally many."""
        pixels, labels = super().batch(inputs)
        new, all_rows = inputs[0].shape[1], labels.shape[1]
        halves = [self._own(new, labels.device), new + self._own(all_rows - new, labels.device)]
        counted = torch.cat([rows < end for rows, end in zip(halves, (new, all_rows), strict=True)])
        rows = torch.cat(halves).clamp_max(all_rows - 1)  # where rows run out, any one stands in and does not count
        own = torch.where(counted, labels[:, rows], IGNORED)
        self.share = (own != IGNORED).sum(dim=1) / (labels != IGNORED).sum(dim=1)
        return pixels.unflatten(0, labels.shape)[:, rows].flatten(0, 1), own

    def _own(self, count: int, device: torch.device) -> Tensor:
        """Every n-th row of so many; as many rows in every process."""
        size = self.processes.size
        return size * torch.arange(math.ceil(count / size), device=device) + self.processes.rank

    def backward(self, losses: Tensor) -> Tensor:
        """The whole batch's gradients in all processes, and its losses.

        A mean over rows is the sum of the processes' means, each times its share of the rows that count. What rows do
        not enter, such as what a mask is charged, has the same gradient everywhere, and the shares add up to 1.
        """
        weighed = losses * self.share
        weighed.sum().backward()
        moving = [p for group in self.optimiser.param_groups for p in group["params"] if p.grad is not None]
        parts = [*(p.grad for p in moving), weighed.detach()]
        # No row that counts: the mean was 0 / 0, and so is all that comes of it.
        bucket = torch.where(self.share.amin() > 0, torch.cat([part.flatten() for part in parts]), 0)
        self.processes.add_up(bucket)
        gradients: list[Tensor] = list(bucket.split([part.numel() for part in parts]))
        total = gradients.pop()
        for p, gradient in zip(moving, gradients, strict=True):
            p.grad = gradient.view_as(p)
        return total

    def align(self) -> None:
        """Make the networks equal to the last bit, as the first process has them."""
        with torch.no_grad():
            for group in self.optimiser.param_groups:
                for p in group["params"]:
                    self.processes.take_from_first(p.data)


def check_agreement(processes: Processes, networks: Sequence[Batches]) -> None:
    """Stop where the processes are about to train on different images, or in another order."""
    seen = []
    for batches in networks:
        state = batches.generator.get_state().double()
        seen.append((state * torch.arange(1, len(state) + 1)).sum())
        for samples in (batches.new, batches.replay):
            labels = samples.labels.double().cpu() if samples is not None else torch.zeros(0, dtype=torch.float64)
            seen += [torch.tensor(float(len(labels))), (labels * torch.arange(1, len(labels) + 1)).sum()]
        if batches.replay is not None:
            seen.append(batches.replay.pixels.flatten(1).sum(dim=1).double().cumsum(0).sum().cpu())
    own = torch.stack([value.double() for value in seen])
    first = own.clone()
    processes.take_from_first(first)
    differing = (own != first).any().double().reshape(1)
    processes.add_up(differing)
    if float(differing):
        raise TplError(
            "The processes of this run would not train on the same images: is the data the same on every machine? "
            "Run it in one process, or with --set memory_policy=random, which no rounding can change."
        )
