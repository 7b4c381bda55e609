"""How many threads a worker computes with."""

from __future__ import annotations

import os
import sys

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def chosen_threads(usual: int) -> int:
    """As many as you have set for this process, or else `usual`."""
    set_ = (os.environ[name] for name in THREADS if os.environ.get(name, "").isdecimal())
    return max(1, int(next(set_, usual)))


def use_threads(number: int) -> None:
    """Compute with so many, from here on: this process may have computed with another number before."""
    os.environ.update(dict.fromkeys(THREADS, str(number)))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(number)
