"""Concurrent questions share one pass through the network.

A single worker thread computes. While it is busy, questions gather; when it is free, all that have gathered go
together. A question that finds it idle waits a few milliseconds for company.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import TypeVar

from tpl.serve.served import Question, Reply, Served

Pending = tuple[Served, Question, "asyncio.Future[Reply]"]
Result = TypeVar("Result")


class Batcher:
    """Feeds the one thread that computes."""

    def __init__(
        self, largest: int = 32, window: float = 0.003, told: Callable[[int], None] = lambda size: None
    ) -> None:
        self.largest, self.window, self.told = largest, window, told
        self._waiting: asyncio.Queue[Pending] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Questions that nobody has begun to answer."""
        return self._waiting.qsize()

    def start(self) -> None:
        """Begin to answer; to be called in the event loop."""
        self._task = asyncio.create_task(self._serve())

    async def stop(self) -> None:
        """Finish the pass in hand and answer nothing more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def ask(self, served: Served, question: Question) -> Reply:
        """The answer of one snapshot to one question."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((served, question, future))
        return await future

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run something else where the model computes, between two passes."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def _serve(self) -> None:
        while True:
            batch = [await self._waiting.get()]
            if self._waiting.empty():
                await asyncio.sleep(self.window)
            while len(batch) < self.largest and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            # A client that left is not answered. One pass never mixes two models.
            present = [pending for pending in batch if not pending[2].done()]
            for _, group in groupby(present, key=lambda pending: id(pending[0])):
                await self._answer(list(group))

    async def _answer(self, group: list[Pending]) -> None:
        served, futures = group[0][0], [future for _, _, future in group]
        self.told(len(group))
        try:
            replies = await self.call(lambda: served.ask([question for _, question, _ in group]))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # whoever asked gets it, and the next batch is answered all the same
            for future in futures:
                if not future.done():
                    future.set_exception(error)
            return
        for future, reply in zip(futures, replies, strict=True):
            if not future.done():
                future.set_result(reply)
