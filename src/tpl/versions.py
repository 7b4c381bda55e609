"""Versions of a model: what each commit changed, and the way back.

Every commit to a model directory makes a version. The newest older ones stay (`keep`, 5 by default), and share all
files that have not changed. `undo` makes an older version the newest; as this is a commit, too, it can be undone.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tpl.header import files_of, parts_of
from tpl.store import ModelStore, StoreError, kept_number

KEEP = 5  # older versions, unless a model says otherwise
LONGEST = 2000  # characters of what a version says about its change


@dataclass(frozen=True)
class Version:
    """One version of a model."""

    number: int
    committed: str  # date and time, ISO; empty if it was written before versions were kept
    change: str  # what it changed, in words
    same_as: int | None  # the version that an undo went back to
    parent: int | None  # the version that was changed into this one
    tasks: int
    classes: tuple[str, ...]
    accuracy: float | None  # of the newest task, when it was learned
    bytes: int  # of the files that no other version uses

    def to_dict(self) -> dict[str, Any]:
        """The version as JSON."""
        return asdict(self) | {"classes": list(self.classes)}


def about_version(old: dict[str, Any] | None, new: dict[str, Any], keep: int) -> dict[str, Any]:
    """What the header of a new version says about it; `old` is the header of the model before, if there was one."""
    return {
        "parent": None if old is None else kept_number(old),
        "same_as": None,
        "committed": _now(),
        "change": change_between(old, new),
        "keep": keep,
    }


def kept_by(header: dict[str, Any] | None) -> int:
    """How many older versions a model keeps."""
    return int((header or {}).get("keep", KEEP))


def history(path: Path | str) -> list[Version]:
    """All versions of a model that can be gone back to, the newest first."""
    store = ModelStore(path)
    newest = store.header()
    headers = {int(newest["commits"]): newest}
    for number in newest.get("older", {}):
        with suppress(StoreError):  # one that cannot be read cannot be gone back to
            headers[int(number)] = store.header(int(number))
    files = {n: {f"versions/{n}.json", *parts_of(h)} for n, h in headers.items()}
    uses = Counter(file for own in files.values() for file in own)
    return [
        _version(number, headers[number], sum(_size(store.path / f) for f in files[number] if uses[f] == 1))
        for number in sorted(headers, reverse=True)
    ]


def bytes_of_older(path: Path | str) -> int:
    """About how many bytes older versions will take beside the model once it is changed."""
    store = ModelStore(path)
    header = store.header()
    if not kept_by(header):
        return 0
    *_, tasks = files_of(header)  # later versions share them
    return sum(_size(store.path / file) for file in store.files() - set(tasks))


def undo(path: Path | str, to: int | None = None) -> Version:
    """Go back to the version before the present one, or to version `to`; returns the new version.

    After an undo, the version before is the one before the version that was gone back to: two of them go back two
    steps.
    """
    store = ModelStore(path)
    with store.existing():
        header = store.header()
        number = header.get("parent") if to is None else to
        if number is None:
            raise StoreError(f"{path} is at its first version: there is nothing to undo.")
        if number == header["commits"]:
            raise StoreError(f"{path} is at version {number} already.")
        wanted = store.header(number)
        keep = kept_by(header)
        about = {"committed": _now(), "change": f"back to version {number}", "keep": keep}
        about |= {"parent": wanted.get("parent"), "same_as": number}
        store.go_back(number, max(keep, 1), about)  # if none were kept, the undo could not be undone
    return history(path)[0]


def prune(path: Path | str, keep: int) -> None:
    """Delete all older versions but the newest `keep`; from now on the model keeps so many."""
    if keep < 0:
        raise StoreError(f"The number of older versions to keep cannot be negative; got {keep}.")
    ModelStore(path).prune(keep, {"keep": keep})


def change_between(old: dict[str, Any] | None, new: dict[str, Any]) -> str:
    """What changed between two headers, in words; the name of a class that was removed is not repeated."""
    before, after = ([] if header is None else header["tasks"] for header in (old, new))
    known = {_identity(task): task for task in before}
    changes, removed = [], 0
    for task in after:
        earlier = known.pop(_identity(task), None)
        if earlier is None:
            changes.append(f"learned {task.get('name') or 'a task'} ({_listed(task['classes'])})")
        elif len(earlier["classes"]) == len(task["classes"]):
            pairs = zip(earlier["classes"], task["classes"], strict=True)
            changes += [f"renamed {a} to {b}" for a, b in pairs if a != b]
            counts = zip(task["classes"], *(map(_counts, (earlier, task))), strict=True)
            more = [name for name, a, b in counts if a != b]
            changes += [f"added images of {_listed(more)}"] if more else []
        else:
            removed += len(earlier["classes"]) - len(task["classes"])
    removed += sum(len(task["classes"]) for task in known.values())
    changes += [f"removed {removed} class{'es' * (removed > 1)}"] if removed else []
    if not changes and old is not None and old.get("options") != new.get("options"):
        changes.append("changed options")
    text = "; ".join(changes) or "saved again"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _identity(task: dict[str, Any]) -> tuple[str, str]:
    return task.get("name", ""), task.get("learned", "")


def _counts(task: dict[str, Any]) -> list[tuple[int, int]]:
    """Numbers of images of every class: trained on, and held out."""
    nothing = [0] * len(task["classes"])
    return list(zip(task.get("images") or nothing, task.get("held_out") or nothing, strict=True))


def _listed(names: list[str], most: int = 5) -> str:
    return ", ".join(names) if len(names) <= most else f"{', '.join(names[:most])} and {len(names) - most} more"


def _version(number: int, header: dict[str, Any], size: int) -> Version:
    tasks = header["tasks"]
    return Version(
        number,
        header.get("committed") or "",
        header.get("change") or change_between(None, header),
        header.get("same_as"),
        header.get("parent"),
        len(tasks),
        tuple(name for task in tasks for name in task["classes"]),
        tasks[-1].get("accuracy") if tasks else None,
        size,
    )


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0  # model.json is not among the versions; a writer may be deleting old files


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
