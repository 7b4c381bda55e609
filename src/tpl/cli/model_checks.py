"""What `tpl learn` is asked for, checked before anything is read or imported: mistakes are told at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tpl.cli.model_plan import PLUS, Budget, method_for
from tpl.cli.model_words import listed
from tpl.errors import TplError

if TYPE_CHECKING:
    from tpl.store import ModelStore
    from tpl.stream import Labelled


@dataclass(frozen=True)
class Wish:
    """What the command line asks for; None where it leaves the choice."""

    method: str | None
    encoder: str | None
    weights: Path | None
    memory: Budget | None
    memory_kind: str | None
    passes: str | None
    epochs: int | None
    seed: int | None
    name: str | None
    device: str
    held_out: float
    update: bool
    strict: bool


def refuse_other_folder(store: ModelStore) -> None:
    """A folder that holds other things is no place for a model; most likely the arguments were swapped."""
    if store.exists() or not store.path.exists():
        return
    if not store.path.is_dir():
        raise TplError(f"{store.path} is a file; MODEL is a directory to make: tpl learn MODEL FOLDER.")
    if any(not entry.name.startswith(".") and not _left_by_a_writer(entry) for entry in store.path.iterdir()):
        raise TplError(
            f"{store.path} holds no model, but other files: name a new directory (the order is tpl learn MODEL FOLDER)."
        )


def _left_by_a_writer(entry: Path) -> bool:
    """Whether this is what a program that was killed in its first commit leaves: tasks/ with files of ours alone."""
    if entry.name != "tasks" or not entry.is_dir():
        return False
    return all(file.suffix == ".safetensors" for file in entry.rglob("*") if not file.is_dir())


def known_classes(store: ModelStore, wish: Wish) -> list[str]:
    """The classes the model has, once it is clear that the options suit it."""
    if not store.exists():
        if wish.update:
            raise TplError(f"{store.path} holds no model yet; --update adds images to one. Learn without it first.")
        _check_passes(wish, wish.method or method_for(wish.encoder or ""))
        return []
    header = store.header()
    fixed = {
        "--method": (wish.method, header["method"]),
        "--encoder": (wish.encoder, header["encoder"]["name"]),
        "--seed": (wish.seed, header["seed"]),
        "--memory-kind": (wish.memory_kind, header["options"].get("memory_kind", "images")),
        "--memory": (wish.memory.images if wish.memory else None, header["options"].get("memory")),
    }
    for option, (asked, has) in fixed.items():
        if asked is not None and asked != has:
            raise TplError(f"{store.path} was made with {option} {has}, which cannot change; leave it out.")
    if wish.memory is not None and wish.memory.bytes is not None:
        raise TplError(f"{store.path} keeps {fixed['--memory'][1]} images, which cannot change; leave --memory out.")
    _check_passes(wish, header["method"])
    return [name for task in header["tasks"] for name in task["classes"]]


def _check_passes(wish: Wish, method: str) -> None:
    if wish.passes is not None and method != PLUS:
        raise TplError(f"--passes is an option of {PLUS}, and this is a model of {method}, which asks every task.")


def check_classes(given: Labelled, known: list[str], update: bool, model: Path) -> None:
    """New classes are for learning, known ones for an update."""
    old = [name for name in given.class_names if name in known]
    new = [name for name in given.class_names if name not in known]
    if update and new:
        how = f"; to add images of the others only, pass --classes {','.join(old)}" if old else ""
        raise TplError(f"{model} does not know {listed(new)} yet: learn new classes without --update{how}.")
    if old and not update:
        how = f" To learn the new ones only, pass --classes {','.join(new)}." if new else ""
        raise TplError(f"{model} knows {listed(old)} already. To add more images of known classes, pass --update.{how}")
