"""Everything that writes a model directory: what can be prepared is done once, the rest is what gets interrupted."""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from torture.small_models import apart, changes, kill, learned
from tpl import Learner
from tpl.methods.closed_form import ClosedFormExperts
from tpl.methods.tpl import TPL
from tpl.serve.worker import JobSpec, learn_task
from tpl.store import ModelStore
from tpl.versions import prune, undo

MERGED = ("tpl", "tpl-plus", "closed-form")
Found = dict[str, Any] | None  # a model as plain bytes; None for no model


@dataclass
class Writer:
    """One command: the directory before it, and what is done to a copy of that directory."""

    name: str
    before: Path | None  # None: a new directory
    write: Callable[[Path], object]
    quick: bool = True  # whether it takes milliseconds

    def start(self, model: Path) -> None:
        """Put the directory into the state before."""
        shutil.rmtree(model, ignore_errors=True)
        if self.before is not None:
            shutil.copytree(self.before, model)


def found_in(model: Path) -> Found:
    """The model in a directory with the images that wait, bit for bit; None if there is none."""
    if not ModelStore(model).exists():
        return None
    found: dict[str, Any] = kill.content(model)
    if (model / "waiting.bin").exists():  # what was learned meanwhile does not wait any more
        found["waiting"] = Learner.load(model, device="cpu").waiting_.images
    return found | {"waiting": found.get("waiting") or {}}


def commands(place: Path, method: str = "tpl") -> dict[str, Callable[[], Writer]]:
    """The commands that a method has, by name, each still to be prepared; `place` is a folder for models."""
    base, older = place / f"base-{method}", place / f"older-{method}"
    if not base.exists():
        learned(base, method)
    if not older.exists():
        shutil.copytree(base, older)
        Learner.load(older, device="cpu").rename("three", "drei").save(older)
    sample = Learner.load(base, device="cpu").method
    wanted = {name: change for name, change in changes().items() if name != "update" or sample.can_update}
    if sample.cumulative:  # a new task replaces the others
        wanted.pop("learn")
    made: dict[str, Callable[[], Writer]] = {
        name: partial(_saved, name, change, base) for name, change in wanted.items()
    }
    made["undo"] = lambda: Writer("undo", older, lambda model: undo(model))
    made["undo --keep"] = lambda: Writer("undo --keep", older, lambda model: prune(model, 0))
    if sample.can_update and sample.encoder.pretrained:
        made["observe"] = lambda: _observed(base)
    if isinstance(sample, (TPL, ClosedFormExperts)) and method in MERGED:
        made["merge"] = lambda: _merged(base, place, method)
    if not sample.cumulative:
        made["serve-learning"] = lambda: _served(base, place, method)
    return made


def _saved(name: str, change: Callable[[Learner], object], base: Path) -> Writer:
    """A change that is made in memory and then saved."""
    learner = Learner.load(base, device="cpu")
    change(learner)
    commits, erases = ModelStore(base).header()["commits"], learner._erases

    def write(model: Path) -> None:
        learner._origin, learner._erases = (model.resolve(), commits), erases
        learner.save(model)

    return Writer(name, base, write)


def _observed(base: Path) -> Writer:
    """More images of a known class, which wait and are then learned."""
    images = kill._digits()[6]

    def write(model: Path) -> None:
        Learner.load(model, device="cpu").observe(images, ["two"] * len(images), task_images=len(images))

    return Writer("observe", base, write)


def _merged(base: Path, place: Path, method: str) -> Writer:
    """Two models in one, written into a new directory."""
    other = place / f"apart-{method}"
    if not other.exists():
        apart(other, method)
    merged = Learner.load(base, device="cpu")
    merged.merge(Learner.load(other, device="cpu"), estimate=True)

    def write(model: Path) -> None:
        merged._origin = base.resolve(), 1
        with ModelStore(model).creating():
            merged.save(model)

    return Writer("merge", None, write)


def _served(base: Path, place: Path, method: str) -> Writer:
    """What the server's worker process does with an uploaded task."""
    archive = place / "task.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        for name, pictures in zip(("four", "five"), kill._digits()[4:6], strict=True):
            for number, pixels in enumerate(pictures):
                buffer = io.BytesIO()
                Image.fromarray(pixels).save(buffer, format="PNG")
                zipped.writestr(f"{name}/{number}.png", buffer.getvalue())

    def write(model: Path) -> None:
        spec = JobSpec(str(model), str(archive), "task.zip", "more", "cpu", pixels=10**6, epochs=1)
        learn_task(spec, lambda **report: None)

    return Writer("serve-learning", base, write, quick=method in ("closed-form", "slda"))
