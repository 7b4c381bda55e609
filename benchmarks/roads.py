"""How many files of the package a prediction and a task pass through: what a reader has to follow.

A file counts if a function of it is called; a hop is a pair of functions in two files, one of which calls the other.
The compact encoder, two tasks of digits, one epoch, on the CPU; the first answer is not counted, as it prepares things,
nor are the threads that decode image files.

python benchmarks/roads.py              # a few seconds
python benchmarks/roads.py --list       # and the names of the files
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import tpl
from tpl import ArrayImages, Learner, Task

PACKAGE = str(Path(tpl.__file__).parent)


class Road:
    """The files that calls pass through, and the calls from one to another."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.hops: set[tuple[CodeType, CodeType]] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call, for `sys.setprofile`."""
        file, caller = frame.f_code.co_filename, frame.f_back
        if (
            event != "call"
            or threading.current_thread().name.startswith("decode")
            or not file.startswith(PACKAGE)
            or frame.f_code.co_name == "<module>"
        ):
            return
        self.files.add(file.removeprefix(PACKAGE).lstrip("/"))
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != file:
            self.hops.add((caller.f_code, frame.f_code))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Follow what happens inside."""
        sys.setprofile(self)
        threading.setprofile(self)  # training on a CPU has a thread of its own
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def task(number: int) -> Task:
    """Two digits, 20 images each."""
    digits = load_digits()
    rows = [np.flatnonzero(digits.target == c)[:20] for c in (2 * number, 2 * number + 1)]
    pixels = np.rint(digits.images[np.concatenate(rows)] * (255 / 16)).astype(np.uint8)
    images = ArrayImages(pixels, np.repeat([0, 1], 20))
    return Task(f"task {number}", (str(2 * number), str(2 * number + 1)), images)


def learn_second(learner: Learner) -> None:
    """Learn the second task."""
    learner.learn(task(1))


def main() -> None:
    """Measure both roads for the paper's method and for the product's default; print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the files")
    wanted = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for method in ("tpl", "tpl-plus"):
        learner = Learner(method, "compact", device="cpu", epochs=1, latent=8, memory=20)
        learner.learn(task(0))
        images = task(1).train
        learner.predict(images)
        roads: dict[str, Callable[[], Any]] = {
            "predict": partial(learner.predict, images),
            "learn": partial(learn_second, learner),
        }
        for name, go in roads.items():
            road = Road()
            with road.recorded():
                go()
            found[f"{method} {name}"] = {"files": len(road.files), "hops": len(road.hops)}
            if wanted.list:
                found[f"{method} {name}"]["names"] = sorted(road.files)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
