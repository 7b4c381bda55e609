"""Power cuts, simulated: what a disk may hold at any moment of a commit.

The operations of some commits are logged. A disk certainly holds what was synced: a file's bytes after a sync of the
file, a folder's entries after a sync of the folder. Of everything else it may hold any part: each later change of a
folder happened or did not, and unsynced bytes are all there, half there or not there at all. For every prefix of the
log, such disks are made and opened: each must hold the version before or the version after, and after the end of a
command the version after; older versions that it lists must be whole. Commands are commits, undos, deletions of older
versions, and images that wait to be learned.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from torture.operations import Countdown, Operation, watching
from torture.small_models import bare, version_of
from torture.tally import Tally
from tpl import TplError
from tpl.store import ModelStore

SUBSETS = 64  # of the unsynced changes at one moment; all of them if there are fewer
HISTORY = 250  # operations of a few commits, about
STEPS, KEPT = 5, 2  # commands in a history, and older versions that are kept


@dataclass
class Inode:
    """A file or a folder on a disk: what is synced, and what was done since."""

    folder: bool
    synced: bytes = b""
    bytes: bytes = b""
    entries: dict[str, int] = field(default_factory=dict)
    pending: list[tuple[str, str, int]] = field(default_factory=list)  # changes of a folder: kind, name, inode


class Disk:
    """Replays a log of operations below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.inodes = [Inode(True)]
        self.now: dict[str, int] = {self.root: 0}  # paths as the running system sees them

    def apply(self, operation: Operation) -> None:
        """One operation as the running system does it."""
        kind, path = operation.kind, operation.path
        if not path.startswith(self.root) or (kind in ("create", "make") and path in self.now):
            return
        if kind in ("create", "make"):
            self.inodes.append(Inode(kind == "make"))
            self.now[path] = len(self.inodes) - 1
            self._change(path, "put", self.now[path])
        elif kind == "write":
            self.inodes[self.now[path]].bytes += operation.data
        elif kind == "sync" and path in self.now:
            inode = self.inodes[self.now[path]]
            inode.synced = inode.bytes
            self._settle(inode)
        elif kind == "rename":
            moved = {p: n for p, n in self.now.items() if p == path or p.startswith(f"{path}/")}
            for old, number in moved.items():
                del self.now[old]
                self.now[operation.target + old[len(path) :]] = number
            self._change(path, f"move {Path(operation.target).name}", moved[path])
        elif kind in ("delete", "remove") and path in self.now:
            self._change(path, "drop", self.now.pop(path))

    def _change(self, path: str, kind: str, number: int) -> None:
        parent, _, name = path.rpartition("/")
        if parent in self.now:
            self.inodes[self.now[parent]].pending.append((kind, name, number))

    @staticmethod
    def _settle(inode: Inode) -> None:
        for change in inode.pending:
            _enter(inode.entries, *change)
        inode.pending.clear()

    def possible(self, draw: random.Random, most: int) -> Iterator[list[tuple[str, bytes | None]]]:
        """What the disk may hold: paths with their bytes, None for a folder."""
        folders = [inode for inode in self.inodes if inode.pending]
        files = [inode for inode in self.inodes if not inode.folder and inode.bytes != inode.synced]
        choices = [list(itertools.product((False, True), repeat=len(inode.pending))) for inode in folders]
        lengths = [(0, 1, 2)] * len(files)  # none, half or all of what is not synced
        count = 1
        for options in (*choices, *lengths):
            count *= len(options)
        drawn: Iterator[tuple[object, ...]] = (
            itertools.product(*choices, *lengths)
            if count <= most
            else (tuple(draw.choice(options) for options in (*choices, *lengths)) for _ in range(most))
        )
        for chosen in drawn:
            entries = {id(inode): dict(inode.entries) for inode in self.inodes}
            for inode, kept in zip(folders, chosen, strict=False):
                for change, keep in zip(inode.pending, kept, strict=True):  # type: ignore[call-overload]
                    if keep:
                        _enter(entries[id(inode)], *change)
            content = {id(inode): inode.synced for inode in self.inodes}
            for inode, half in zip(files, chosen[len(folders) :], strict=True):
                rest = inode.bytes[len(inode.synced) :]
                content[id(inode)] = inode.synced + rest[: len(rest) * half // 2]  # type: ignore[operator]
            yield list(self._tree(0, "", entries, content))

    def _tree(
        self, number: int, path: str, entries: dict[int, dict[str, int]], content: dict[int, bytes]
    ) -> Iterator[tuple[str, bytes | None]]:
        inode = self.inodes[number]
        if not inode.folder:
            yield path, content[id(inode)]
            return
        if path:
            yield path, None
        for name, inner in entries[id(inode)].items():
            yield from self._tree(inner, f"{path}/{name}" if path else name, entries, content)


def _enter(entries: dict[str, int], kind: str, name: str, number: int) -> None:
    """Apply one change to a folder's entries."""
    if kind == "put":
        entries[name] = number
    else:
        entries.pop(name, None)
        if kind.startswith("move "):
            entries[kind.removeprefix("move ")] = number


def run(seed: int, cases: int, place: Path) -> Tally:
    """Cut the power at every moment of several commands, until there were that many disks."""
    tally, draw = Tally("power cuts", seed), random.Random(seed)
    while tally.cases < cases:
        _one_history(tally, draw, cases, place)
    return tally


class Killed(BaseException):
    """The process ends here."""


@dataclass
class History:
    """What some writers did, one after the other: the log, and what each of them was about to leave."""

    log: list[Operation] = field(default_factory=list)
    begun: list[tuple[int, int | None, int | None]] = field(default_factory=list)  # operation, version, waiting images
    ended: list[tuple[int, int | None, int | None]] = field(default_factory=list)

    def allowed(self, number: int) -> tuple[list[int | None], list[int | None]]:
        """The versions and the waiting images that a disk may hold before an operation, the certain ones first."""
        end = max((at for at, *_ in self.ended if at <= number), default=0)
        last = [(v, w) for at, v, w in self.ended if at <= number][-1:] or [(None, None)]
        since = [(v, w) for at, v, w in self.begun if end <= at <= number]
        versions, waiting = zip(*last, *since, strict=True)
        return list(versions), list(waiting)


def _one_history(tally: Tally, draw: random.Random, cases: int, place: Path) -> None:
    """Commits, undos and the like, some of them killed, in a directory that does not exist at first."""
    root, disk_at = place / "written", place / "found"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    history, store = History(), ModelStore(root / "a" / "model")
    for number in range(1, STEPS + 1):
        stop = draw.choice((0, 0, draw.randint(1, 60)))
        step, version, waiting = _step(draw, store, number)
        history.begun.append((len(history.log), version, waiting))
        with suppress(Killed), watching(Countdown(stop, _kill), history.log.append):
            step()
            history.ended.append((len(history.log), version, waiting))
    disk = Disk(root)
    for number, operation in enumerate([*history.log, Operation("end", "")]):
        for tree in disk.possible(draw, max(2, min(SUBSETS, cases // HISTORY))):
            _check(tally, tree, disk_at, *history.allowed(number), f"operation {number}")
            if tally.cases >= cases:
                return
        disk.apply(operation)


def _step(draw: random.Random, store: ModelStore, number: int) -> tuple[Callable[[], None], int | None, int | None]:
    """Something to do to the model, with the version and the waiting images that it leaves."""
    now = version_of(store.path)
    waiting = waiting_in(store)
    older = {version: store.header(version)["seed"] for version in map(int, store.header()["older"])} if now else {}
    kind = draw.random()
    if older and kind < 0.3:
        version = draw.choice(sorted(older))
        return lambda: store.go_back(version, KEPT, {"same_as": version}), older[version], waiting
    if older and kind < 0.4:
        return lambda: store.prune(draw.randint(0, 1), {}), now, waiting
    if now and kind < 0.55:
        return lambda: _wait(store, number), now, number
    return lambda: _commit(store, number, draw.randint(1, 3)), number, waiting


def _commit(store: ModelStore, version: int, tasks: int) -> None:
    with store.writing():
        store.commit(*bare(version, tasks), keep=KEPT)


def _wait(store: ModelStore, number: int) -> None:
    with store.existing():
        store.write_waiting({"n": torch.tensor([number])})


def waiting_in(store: ModelStore) -> int | None:
    """The number in place of waiting images."""
    return next((int(tensor) for tensor in store.read_waiting().values()), None) if store.path.exists() else None


def _kill(operation: Operation) -> None:
    raise Killed


def _check(
    tally: Tally,
    tree: list[tuple[str, bytes | None]],
    place: Path,
    versions: list[int | None],
    waiting: list[int | None],
    where: str,
) -> None:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for path, content in tree:
        if content is None:
            (place / path).mkdir(parents=True, exist_ok=True)
        else:
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(content)
    store = ModelStore(place / "a" / "model")
    try:
        found = version_of(store.path)
        if found not in versions or waiting_in(store) not in waiting:
            tally.fail(f"{where}: version {found}, not one of {versions}, or other images wait than {waiting}")
            return
        for older in store.header()["older"] if found else ():
            store.read(int(older))  # what is listed can be gone back to
        if tally.cases % 16 == 0:  # the next writer cleans up and commits
            _commit(store, 99, 1)
            assert version_of(store.path) == 99
    except (TplError, AssertionError, OSError) as error:
        tally.fail(f"{where}: {error}")
        return
    tally.counts["before" if found == versions[0] else "after"] += 1
