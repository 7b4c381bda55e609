"""One task learned in a process of its own: `python -m tpl.serve.worker`, started by jobs.py and by nobody else.

A process, because training would take the server's interpreter lock and mix with its captured passes, and because
whatever kills it leaves the server and the committed model as they were. It reads one JSON line, writes one JSON line
for every step, and ends when the server does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from tpl.errors import TplError

READING, TRAINING = 0.1, 0.95  # the progress at which reading and training end; writing is the rest
NAMED = 5  # unreadable files told by name


@dataclass(frozen=True)
class Order:
    """What is to be learned: class folders in a zip, under the name of a task."""

    model: str
    archive: str
    title: str  # what the person who sent the zip calls it
    name: str
    device: str = "auto"
    precision: str = "auto"
    weights: str | None = None
    pixels: int = 0
    epochs: int | None = None  # None: by the number of images
    held_out: float = 0.1

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self)) + "\n"


class Progress:
    """Turns training events into a share between 0 and 1, and says so."""

    def __init__(self, tell: Any) -> None:
        self.tell = tell
        self.read = 0

    def __call__(self, event: Any) -> None:
        """Tell one event; of no interest are those that bring no progress."""
        data = event.data
        if event.kind == "prepare":
            self.read += data["done"]
            share = READING * min(1.0, self.read / max(1, data["images"]))
            self.tell(progress=share, message=f"reading {data['images']} images")
        elif event.kind == "epoch":
            share = READING + (TRAINING - READING) * data["epoch"] / data["epochs"]
            self.tell(progress=share, message=f"epoch {data['epoch']} of {data['epochs']}")
        elif event.kind == "warning":
            self.tell(warning=data["text"])


def carry_out(order: Order, tell: Any) -> None:
    """Learn and commit. Nobody else writes to the directory from the first read to the commit."""
    from tpl.intake import hold_out
    from tpl.learner import Learner
    from tpl.schedule import epochs_for
    from tpl.serve.limits import Limits, check_images
    from tpl.stream import Task
    from tpl.stream.inputs import labelled_images, readable

    tell(progress=0.0, message="starting")
    archive = Path(order.archive)
    check_images(archive, Limits(pixels=order.pixels))
    found = labelled_images(archive)
    loading = {"weights": order.weights, "device": order.device, "precision": order.precision}
    with Learner.changing(order.model, **loading) as learner:
        images, problems = readable(found.images, learner.method.preprocess.shrink)
        usable = found.with_images(images)
        _tell_problems(problems, set(found.class_names) - set(usable.class_names), order, tell)
        task = Task(order.name, usable.class_names, usable.images)
        method, (train, _) = learner.method, hold_out(task, order.held_out, [learner.method.seed])
        method.config = method.config.replace(epochs=order.epochs or epochs_for(method, len(train)))
        learner.learn(task, name=order.name, held_out=order.held_out, callback=Progress(tell), source=order.title)
        tell(progress=TRAINING, message="writing the model")
    tell(done=asdict(learner.tasks_[-1]))


def _tell_problems(problems: list[str], lost: set[str], order: Order, tell: Any) -> None:
    """Go on without files that cannot be read, but not without a whole class."""
    if lost:
        raise TplError(f"No image of {', '.join(sorted(lost))} can be read: {problems[0]}")
    if problems:
        named = "; ".join(problem.replace(order.archive + "/", "") for problem in problems[:NAMED])
        more = f"; and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        tell(warning=f"Left out, as they cannot be read: {named}{more}")


def main() -> None:
    """Carry out the order on stdin."""
    with suppress(AttributeError, OSError):
        os.nice(10)  # predictions go first
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not come between the reports
    order = Order(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with, args=(sys.stdin,), daemon=True).start()

    def tell(**report: Any) -> None:
        reports.write(json.dumps(report) + "\n")
        reports.flush()

    try:
        carry_out(order, tell)
    except TplError as error:
        tell(failed=str(error).replace(order.archive + "/", "").replace(order.archive, order.title))
    # Not by returning: threads of libraries may still be at work, and the commit is on disk.
    reports.close()
    os._exit(0)


def _end_with(stdin: IO[str]) -> None:
    """End as soon as the server has gone, even by kill -9: its end of the pipe closes."""
    with suppress(OSError, ValueError):
        stdin.read()
    os._exit(3)


if __name__ == "__main__":
    main()
