"""Methods: one file per way of learning a stream of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from tpl.engine import Callback, Samples
from tpl.methods.bank import BankMethod
from tpl.methods.bank.training import run_jobs
from tpl.methods.base import Method, find_method, load_methods, register
from tpl.stream import Task

__all__ = ["Method", "find_method", "learn_together", "load_methods", "register"]


def learn_together(
    methods: Sequence[Method],
    tasks: Sequence[Task],
    callbacks: Sequence[Callback],
    held: Sequence[Samples | None] | None = None,
) -> None:
    """Each method learns its task; all of them do, or none if one fails. `held` are images that are not trained on.

    Bank methods with the same encoder, settings and number of images share the passes over the frozen trunk; the result
    is that of learning alone, up to rounding. Other methods learn one after the other.
    """
    held = held or [None] * len(methods)
    if len(methods) == 1:
        methods[0].learn(tasks[0], callbacks[0], held[0])
        return
    with ExitStack() as attempts:
        samples = [
            attempts.enter_context(method.learning(task, callback, apart))
            for method, task, callback, apart in zip(methods, tasks, callbacks, held, strict=True)
        ]
        rows = list(zip(methods, tasks, samples, callbacks, strict=True))
        run_jobs([m.training_job(task, own, callback) for m, task, own, callback in rows if isinstance(m, BankMethod)])
        for method, task, own, callback in rows:
            if isinstance(method, BankMethod):
                method.conclude(task, own)
            else:
                method.learn_task(task, own, callback)
