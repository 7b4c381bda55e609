"""Several methods learn a task each, side by side where they can."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from tpl.engine import Callback, Samples
from tpl.methods.bank import BankMethod
from tpl.methods.bank.training import run_jobs
from tpl.methods.base import Method
from tpl.stream import Task


def learn_together(
    methods: Sequence[Method],
    tasks: Sequence[Task],
    callbacks: Sequence[Callback],
    held: Sequence[Samples | None] | None = None,
) -> None:
    """Each method learns its task; all of them, or none if one fails. `held` are images that are not trained on.

    Methods over a bank share the passes over the frozen trunk, if their encoder, settings and numbers of images are
    the same; the answer is that of learning alone, to rounding. Others learn one after the other.
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
