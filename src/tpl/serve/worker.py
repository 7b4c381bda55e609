"""The process that learns one task, or more images of known classes: `python -m tpl.serve.worker`.

jobs.py starts it. It is a separate process because training would hold the server's interpreter lock and interfere with
its CUDA graphs, and because a crash leaves the server and the committed model unchanged. It reads one JSON line, writes
one JSON line for every step, and ends when the server does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tpl import program
from tpl.errors import TplError

if TYPE_CHECKING:
    from tpl.answers import TaskRecord
    from tpl.learner import Learner

READING, TRAINING = 0.1, 0.95  # progress at the end of reading and of training
MAX_NAMED = 5  # unreadable files in a warning

Send = Callable[..., None]  # sends a report to the server, as keywords


@dataclass(frozen=True)
class JobSpec:
    """The task to learn: a zip of class folders, and how to compute."""

    model: str
    archive: str
    title: str  # the file's name as the client gave it
    name: str
    device: str = "auto"
    precision: str = "auto"
    weights: str | None = None
    pixels: int = 0
    epochs: int | None = None  # None: by the number of images
    held_out: float = 0.1

    def to_json(self) -> str:
        """The specification as one line."""
        return json.dumps(asdict(self)) + "\n"


class Progress:
    """Callback that turns training events into reports of progress between 0 and 1."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.read = self.encoded = 0

    def __call__(self, event: Any) -> None:
        """Report one event; events without progress are ignored."""
        data = event.data
        if event.kind == "prepare":
            self.read += data["done"]
            share = READING * min(1.0, self.read / max(1, data["images"]))
            self.send(progress=share, message=f"reading {data['images']} images")
        elif event.kind == "encode":
            self.encoded += data["done"]
            self._learning(self.encoded / max(1, data["images"]), f"encoding {data['images']} images")
        elif event.kind == "epoch":
            self._learning(data["epoch"] / data["epochs"], f"epoch {data['epoch']} of {data['epochs']}")
        elif event.kind == "warning":
            self.send(warning=data["text"])

    def _learning(self, share: float, message: str) -> None:
        self.send(progress=READING + (TRAINING - READING) * min(1.0, share), message=message)


def learn_task(spec: JobSpec, send: Send) -> None:
    """Learn the task and commit it; the model directory is locked meanwhile."""
    from dataclasses import replace

    from tpl.learner import Learner
    from tpl.schedule import epochs_for
    from tpl.serve.uploads import Limits, check_images
    from tpl.stream import Task
    from tpl.stream.labelled import labelled_images, readable
    from tpl.stream.task import hold_out

    send(progress=0.0, message="starting")
    archive = Path(spec.archive)
    check_images(archive, Limits(pixels=spec.pixels))
    found = labelled_images(archive)
    loading = {"weights": spec.weights, "device": spec.device, "precision": spec.precision}
    with Learner.changing(spec.model, **loading) as learner:
        images, problems = readable(found.images, learner.method.preprocess.shrink)
        usable = found.with_images(images)
        _report_problems(problems, set(found.class_names) - set(usable.class_names), spec, send)
        task = Task(spec.name, usable.class_names, usable.images)
        method, (train, _) = learner.method, hold_out(task, spec.held_out, [learner.method.seed])
        if hasattr(method.config, "epochs"):
            method.set_options(epochs=spec.epochs or epochs_for(method, len(train)))
        known = [name for name in usable.class_names if name in learner.classes_]
        if len(known) == len(usable.class_names):
            learner.update(task, callback=Progress(send), held_out=spec.held_out)
            done = replace(learner.tasks_[-1], name=spec.name, classes=tuple(known), images=len(usable.images))
            done = replace(done, held_out=0, accuracy=None)
        else:
            learner.learn(task, name=spec.name, held_out=spec.held_out, callback=Progress(send), source=spec.title)
            done = learner.tasks_[-1]
        send(progress=TRAINING, message="writing the model", outcome=_outcome(learner, done, known, usable.counts))
    send(done=asdict(done))


def _outcome(learner: Learner, done: TaskRecord, known: list[str], counts: dict[str, int]) -> dict[str, Any]:
    """What was learned, in counts: how well the new classes are recognised, and what became of older ones."""
    measured = None if done.measured is None else done.measured.to_dict() | {"held_out": done.held_out > 0}
    new = set(counts) - set(known)  # an update measures nothing
    confused = [{"true": t, "predicted": p, "count": n} for t, p, n in learner.held_out_confusions()] if new else []
    return {
        "learned": [name for name in counts if name not in known],
        "updated": {name: counts[name] for name in known},
        "measured": measured,
        "confused": confused,
        "old_classes": learner.effect_.to_dict() if new and learner.effect_ is not None else None,
    }


def _report_problems(problems: list[str], lost: set[str], spec: JobSpec, send: Send) -> None:
    """Warn about files that cannot be read; a class without any readable image is an error."""
    if lost:
        raise TplError(f"No image of {', '.join(sorted(lost))} can be read: {problems[0]}")
    if problems:
        named = "; ".join(problem.replace(spec.archive + "/", "") for problem in problems[:MAX_NAMED])
        more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
        send(warning=f"Left out, as they cannot be read: {named}{more}")


def main() -> None:
    """Learn the task that is specified on stdin."""
    program.claim()
    with suppress(AttributeError, OSError):
        os.nice(10)  # predictions have priority
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not get between the reports
    spec = JobSpec(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with, args=(sys.stdin,), daemon=True).start()

    def send(**report: Any) -> None:
        reports.write(json.dumps(report) + "\n")
        reports.flush()

    try:
        learn_task(spec, send)
    except TplError as error:
        send(failed=str(error).replace(spec.archive + "/", "").replace(spec.archive, spec.title))
    # Do not wait for threads of libraries: the commit is on disk.
    reports.close()
    os._exit(0)


def _end_with(stdin: IO[str]) -> None:
    """End as soon as the server does, even if it was killed: its end of the pipe closes."""
    with suppress(OSError, ValueError):
        stdin.read()
    os._exit(3)


if __name__ == "__main__":
    main()
