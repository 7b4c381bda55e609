"""Kill a writer at random instants, again and again, and look at what is left of the model.

    python benchmarks/kill.py --kills 200

A small model learns, updates and removes classes in a child process that is ended by kill -9: half of the times
anywhere in its work, half of the times while it writes. Afterwards the model must be readable, must be, bit for bit,
the one before or the one after, and the same command must work. About a second a kill on one core; needs fork, so no
Windows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

Change = Callable[[Any], object]  # what is done to a learner


def changes() -> dict[str, Change]:
    """What is interrupted: one more task, more images of a class, a class less, a whole task less."""
    images = _digits()
    return {
        "learn": lambda learner: learner.learn(images[4] + images[5], ["four"] * 6 + ["five"] * 6, held_out=0.2),
        "update": lambda learner: learner.update(images[6], ["two"] * 6),
        "remove": lambda learner: learner.remove("one"),
        "remove a task": lambda learner: learner.remove("three"),
    }


def new_model(path: Path, encoder: str) -> None:
    """Three tasks, five classes."""
    from tpl import Learner

    images = _digits()
    learner = Learner("tpl", encoder, device="cpu", latent=4, epochs=1, batch_size=16, memory=10)
    for numbers, names in (((0, 1), ("zero", "one")), ((2,), ("two",)), ((3,), ("three",))):
        pictures = [image for n in numbers for image in images[n]]
        learner.learn(pictures, [name for name in names for _ in range(6)], held_out=0.2)
    learner.save(path)


def content(path: Path) -> dict[str, Any]:
    """A model as plain bytes: all that is in it but when it was learned and committed."""
    from tpl.store import ModelStore

    header, state, memory = ModelStore(path).read()
    header.pop("committed", None)
    header["tasks"] = [{k: v for k, v in task.items() if k != "learned"} for task in header["tasks"]]
    parts = [state.shared, memory, *state.tasks]
    return {"header": header, "tensors": [{k: _bytes(v) for k, v in part.items()} for part in parts]}


def leftovers(path: Path) -> list[str]:
    """Files that belong to no model."""
    from tpl.store import ModelStore

    known = {"model.json", ".lock", *ModelStore(path).files()}
    return sorted({str(f.relative_to(path)) for f in path.rglob("*") if f.is_file()} - known)


def work(path: Path, change: Change, tell: int | None = None) -> None:
    """Load, change, save; a byte goes to the pipe `tell` when the writing begins."""
    from tpl import Learner
    from tpl.store import ModelStore

    commit = ModelStore.commit

    def announced(self: ModelStore, *parts: Any, **options: Any) -> None:
        if tell is not None:
            os.write(tell, b"!")
        commit(self, *parts, **options)

    ModelStore.commit = announced  # type: ignore[method-assign]
    try:
        with Learner.changing(path, device="cpu") as learner:
            change(learner)
    finally:
        ModelStore.commit = commit  # type: ignore[method-assign]


def in_child(function: Callable[[], None]) -> int:
    """Start `function` in a copy of this process, which is warm already."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        function()
        status = 0
    finally:
        os._exit(status)


def finish(path: Path, change: Change) -> bool:
    """Do the work undisturbed; whether that went well."""
    _, status = os.waitpid(in_child(lambda: work(path, change)), 0)
    return status == 0


def timed(path: Path, change: Change) -> tuple[float, float]:
    """How long the whole work takes, and how long its writing, in seconds."""
    started = time.perf_counter()
    child, ear = _heard(path, change)
    os.read(ear, 1)
    wrote = time.perf_counter()
    _, status = os.waitpid(child, 0)
    os.close(ear)
    if status:
        raise SystemExit("The work fails even when nobody disturbs it.")
    return time.perf_counter() - started, time.perf_counter() - wrote


def kill(path: Path, change: Change, seconds: float, writing: bool) -> bool:
    """Do the work and end it after some seconds, of its writing if so asked; whether it was still at it."""
    child, ear = _heard(path, change)
    if writing:
        os.read(ear, 1)
    os.close(ear)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)  # it is not waited for yet, so the number is still its own
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def _heard(path: Path, change: Change) -> tuple[int, int]:
    ear, mouth = os.pipe()
    child = in_child(lambda: work(path, change, mouth))
    os.close(mouth)
    return child, ear


def judge(path: Path, old: dict[str, Any], new: dict[str, Any], again: Callable[[], bool]) -> str:
    """old or new, or what is wrong with the model that was left."""
    from tpl import TplError
    from tpl.store import ModelStore

    try:
        found = content(path)
        if found not in (old, new):
            return "neither the model before nor the one after"
        if found == old and not again():
            return "the command does not work any more"
        with ModelStore(path).writing():  # the next writer sweeps
            pass
        if content(path) != new:
            return "the command gives another model now"
        return f"left behind: {leftovers(path)}" if leftovers(path) else ("old" if found == old else "new")
    except TplError as error:
        return f"unreadable: {error}"


def run(kills: int, seed: int, encoder: str, place: Path) -> dict[str, Any]:
    """How often which model was left, by command; `broken` lists what should never be."""
    draw = random.Random(seed)
    base, model = place / "base", place / "model"
    new_model(base, encoder)
    old = content(base)
    after, whole, writing = {}, {}, {}
    for name, change in changes().items():
        for _ in range(2):  # the first warms caches up
            _fresh(base, model)
            whole[name], writing[name] = timed(model, change)
        after[name] = content(model)
    left: Counter[str] = Counter()
    broken: list[dict[str, Any]] = []
    tries = killed = 0
    spared = set(after)  # commands that were always finished before the kill: short ones often are
    while (killed < kills or spared) and tries < 5 * kills:
        name = list(after)[tries % len(after)]
        change = changes()[name]
        while_writing = tries // len(after) % 2 == 0
        _fresh(base, model)
        seconds = draw.random() * (writing if while_writing else whole)[name]
        in_time = kill(model, change, seconds, while_writing)
        verdict = judge(model, old, after[name], lambda change=change: finish(model, change))  # type: ignore[misc]
        tries, killed = tries + 1, killed + in_time
        if in_time:
            spared.discard(name)
            left[f"{name}: {verdict if verdict in ('old', 'new') else 'broken'}"] += 1
        if verdict not in ("old", "new"):
            broken.append({"try": tries, "command": name, "seconds": seconds, "verdict": verdict})
    milliseconds = {name: round(1000 * seconds) for name, seconds in writing.items()}
    return {"kills": killed, "seed": seed, "left": dict(sorted(left.items())), "broken": broken} | {
        "finished_before": tries - killed,
        "milliseconds_writing": milliseconds,
    }


@cache
def _digits() -> list[list[Any]]:
    """Six pictures of each digit."""
    import numpy as np
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels = np.rint(data.images * (255 / 16)).astype(np.uint8)
    return [list(pixels[data.target == c][:6]) for c in range(7)]


def _bytes(tensor: Any) -> tuple[str, tuple[int, ...], bytes]:
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().numpy().tobytes()


def _fresh(base: Path, model: Path) -> None:
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(base, model)


def main() -> int:
    """Run from the command line; 1 if a model was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--encoder", default="compact")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)  # a process with threads of its own cannot be copied by fork
    with tempfile.TemporaryDirectory() as place:
        started = time.perf_counter()
        result = run(given.kills, given.seed, given.encoder, Path(place))
    result["seconds"] = round(time.perf_counter() - started, 1)
    if given.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{result['kills']} kills in {result['seconds']} s, {len(result['broken'])} broken models")
        for what, count in result["left"].items():
            print(f"  {what}: {count}")
        for entry in result["broken"]:
            print(f"  {entry}")
    return 1 if result["broken"] else 0


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before torch and numpy are imported
    sys.exit(main())
