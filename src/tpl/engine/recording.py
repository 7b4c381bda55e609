"""Where steps and answers are recorded once and replayed, and how."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

RECORDING = {"cuda"}  # kinds of devices that can


def records(device: torch.device) -> bool:
    """Whether steps and answers are recorded once on this device and replayed; all then have the same shapes."""
    return device.type in RECORDING


@contextmanager
def recorded(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Take down on `graph` what is done within.

    Python's collector waits until that is over: if it came across a recording that nobody needs any more, CUDA would
    refuse to free it now, and spoil this one.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            yield
    finally:
        if collecting:
            gc.enable()
