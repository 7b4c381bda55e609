"""Small models to break: real ones that learned a few digits, and bare directories of a few numbers."""

from __future__ import annotations

import atexit
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tpl import ArrayImages, Learner, Task
from tpl.methods import find_method
from tpl.store import ModelStore, State

ROOT = Path(__file__).parents[1]
SMALL: dict[str, Any] = {"latent": 4, "epochs": 1, "batch_size": 16, "memory": 10, "random_features": 32}


def load_module(file: Path) -> ModuleType:
    """A module of the tests or benchmarks."""
    if file.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        sys.modules[file.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[file.stem]


kill = load_module(ROOT / "benchmarks" / "kill.py")  # judges models after a kill
ENCODER: str = load_module(ROOT / "tests" / "small_encoder.py").SMALL_VIT  # random weights: quick


_TEMPLATES = tempfile.TemporaryDirectory(prefix="tpl-torture-")
atexit.register(_TEMPLATES.cleanup)


def learned(path: Path, method: str = "tpl", **options: Any) -> None:
    """A model of two tasks, stored at `path`; each method learns once in a process."""
    template = Path(_TEMPLATES.name) / "-".join([method, *options])
    if not template.exists():
        learner, images = new_learner(method, **options), kill._digits()
        for number, names in enumerate((("zero", "one"), ("two", "three"))):
            pictures = images[2 * number] + images[2 * number + 1]
            learner.learn(pictures, [name for name in names for _ in range(6)], name=f"task {number}", held_out=0.2)
        learner.save(template)
    shutil.copytree(template, path)


def apart(path: Path, method: str = "tpl") -> None:
    """A model of one other task, trained apart from that of `learned`."""
    images = kill._digits()
    new_learner(method).learn(images[4] + images[5], ["eight"] * 6 + ["nine"] * 6, name="apart").save(path)


def new_learner(method: str, **options: Any) -> Learner:
    """A small learner that has learned nothing yet."""
    known = {field.name for field in fields(find_method(method).config_class)}
    small = {name: value for name, value in SMALL.items() if name in known}
    return Learner(method, ENCODER, device="cpu", **(small | options))


def probes() -> list[Any]:
    """Images that every version of a model is asked about."""
    return [pictures[-1] for pictures in kill._digits()]


def answers(learner: Learner) -> list[dict[str, Any]]:
    """The answers for the probes."""
    return [answer.to_dict() for answer in learner.answers(probes())]


def changes() -> dict[str, Callable[[Learner], object]]:
    """What is done to a model of `learned`."""
    images = kill._digits()
    task = Task("more", ("four", "five"), two_classes(images[4] + images[5]))
    return {
        "learn": lambda learner: learner.learn(task, held_out=0.2),
        "update": lambda learner: learner.update(images[6], ["two"] * 6),
        "remove": lambda learner: learner.remove("three"),
        "rename": lambda learner: learner.rename("two", "deux"),
    }


def two_classes(pictures: list[Any]) -> ArrayImages:
    """Six images of each of two classes."""
    return ArrayImages(np.stack(pictures), [0] * 6 + [1] * 6)


Commit = tuple[dict[str, Any], State, dict[str, torch.Tensor]]


def bare(version: int, tasks: int) -> Commit:
    """A directory's content that no method can use, but that is quick to write: a number tells versions apart."""
    encoder = {"name": "compact", "sha256": "0" * 64, "fingerprint": "0" * 64, "weights": None}
    header: dict[str, Any] = {"method": "tpl", "options": {"k": 5}, "seed": version, "encoder": encoder}
    header["tasks"] = [{"classes": [f"class {t}"]} for t in range(tasks)]
    own = [{"n": torch.tensor([t if t < tasks - 1 else version])} for t in range(tasks)]
    return header, State({"n": torch.tensor([version])}, own), {"n": torch.tensor([version])}


def version_of(path: Path | str) -> int | None:
    """Which version of `bare` a directory holds; None for no model. AssertionError if it mixes versions."""
    return numbered(path)[1] if ModelStore(path).exists() else None


def numbered(path: Path | str) -> tuple[int, int]:
    """The number of commits of a directory, and which version of `bare` it holds."""
    header, state, memory = ModelStore(path).read()
    found = {header["seed"], int(state.shared["n"]), int(memory["n"]), int(state.tasks[-1]["n"])}
    assert len(found) == 1 and [int(own["n"]) for own in state.tasks[:-1]] == list(range(len(state.tasks) - 1)), found
    return int(header["commits"]), int(header["seed"])
