"""Work on pieces of a large set in several threads: what decodes and resizes images lets others run meanwhile."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_CHUNK = 32

Result = TypeVar("Result")


def in_chunks(work: Callable[[range], Result], count: int) -> Generator[Result]:
    """`work` of the positions 0 .. count-1, a chunk at a time, in order; close it to stop early.

    It runs only a few chunks ahead of whoever takes the results: all of them at once may not fit in memory.
    """
    workers = _workers()
    pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="decode")
    ahead: deque[Future[Result]] = deque()
    try:
        for start in range(0, count, _CHUNK):
            ahead.append(pool.submit(work, range(start, min(start + _CHUNK, count))))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _workers() -> int:
    # Affinity rather than the machine's core count: containers are often given a part of it.
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(16, available))
