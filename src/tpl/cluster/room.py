"""How much room a cluster has, and how it is shared out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpl.errors import TplError

MOST_ON_CPU = 8  # on one machine: each piece of work takes the memory of a whole run


@dataclass(frozen=True)
class Room:
    """What one machine offers."""

    cpus: float
    gpus: float

    @classmethod
    def of_all(cls, ray: Any) -> list[Room]:
        """Every machine of the cluster that is alive."""
        offers = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return [cls(offer.get("CPU", 0.0), offer.get("GPU", 0.0)) for offer in offers]


@dataclass(frozen=True)
class Share:
    """What one piece of work takes of a machine."""

    cpus: float
    gpus: float
    threads: int

    def fits(self, rooms: Sequence[Room]) -> int:
        """How many such shares the machines hold."""
        if self.gpus:
            return sum(int(room.gpus) * _to_a_gpu(self.gpus) for room in rooms)
        return sum(int(room.cpus // self.cpus) for room in rooms)

    def __str__(self) -> str:
        return f"{self.gpus:g} GPU" if self.gpus else f"{self.cpus:g} CPU"


def share_out(
    rooms: Sequence[Room], device: str, pieces: int, workers: int | None = None, gpu_share: float | None = None
) -> Share:
    """What each of `pieces` takes: a part of a GPU; without GPUs, the cores divided by those at work at a time."""
    if device not in ("auto", "cpu", "cuda"):
        raise TplError(f"On a cluster the device is auto, cpu or cuda; got '{device}'. Ray chooses the GPU.")
    if gpu_share is not None and not 0 < gpu_share <= 1:
        raise TplError(f"--gpu-share takes a part of a GPU, above 0 and at most 1, such as 0.5; got {gpu_share:g}.")
    with_gpu = [] if device == "cpu" else [room for room in rooms if room.gpus >= 1]
    if not with_gpu and (device == "cuda" or gpu_share is not None):
        reason = "--device cpu was given" if device == "cpu" else "no machine of the cluster has a GPU"
        raise TplError(f"There is no GPU to share: {reason}. Leave out --gpu-share and --device cuda.")
    if with_gpu:
        share = gpu_share or 1.0
        cores = min(room.cpus / (int(room.gpus) * _to_a_gpu(share)) for room in with_gpu)
        return Share(0, share, max(1, int(cores)))
    usual = sum(int(min(room.cpus, MOST_ON_CPU)) for room in rooms)
    at_a_time = max(1, min(pieces, workers or usual))
    # The most cores that as many can have; machines differ, and none lends a core to another.
    most = int(max((room.cpus for room in rooms), default=1))
    whole = (n for n in range(most, 1, -1) if Share(n, 0, n).fits(rooms) >= at_a_time)
    cores = next(whole, 1)
    return Share(cores, 0, int(cores))


def _to_a_gpu(share: float) -> int:
    return math.floor(1 / share + 1e-6)
