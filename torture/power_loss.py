"""Power cuts, simulated: what a disk may hold at any moment of a commit.

The operations of some commits are logged. A disk certainly holds what was synced: a file's bytes after a sync of the
file, a folder's entries after a sync of the folder. Of everything else it may hold any part: each later change of a
folder happened or did not, and unsynced bytes are all there, half there or not there at all. For every prefix of the
log, such disks are made and opened: each must hold the version before or the version after, and after the end of a
commit the version after.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torture.operations import Countdown, Operation, watching
from torture.small_models import bare, version_of
from torture.tally import Tally
from tpl import TplError
from tpl.store import ModelStore

SUBSETS = 64  # of the unsynced changes at one moment; all of them if there are fewer
HISTORY = 250  # operations of a few commits, about


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
    """Cut the power at every moment of several commits, until there were that many disks."""
    tally, draw = Tally("power cuts", seed), random.Random(seed)
    while tally.cases < cases:
        _one_history(tally, draw, cases, place)
    return tally


class Killed(BaseException):
    """The process ends here."""


def _one_history(tally: Tally, draw: random.Random, cases: int, place: Path) -> None:
    """Commits of changing numbers of tasks, some of them killed, in a directory that does not exist at first."""
    root, disk_at = place / "written", place / "found"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    log: list[Operation] = []
    ends: dict[int, int] = {}  # the number of operations when a commit returned, by version
    begins: dict[int, int] = {}
    sizes = [draw.randint(1, 3) for _ in range(4)]
    for version, tasks in enumerate(sizes, start=1):
        begins[version] = len(log)
        store, stop = ModelStore(root / "a" / "model"), draw.choice((0, 0, draw.randint(1, 60)))
        with suppress(Killed), watching(Countdown(stop, _kill), log.append):
            with store.writing():
                store.commit(*bare(version, tasks))
            ends[version] = len(log)
    disk = Disk(root)
    for number, operation in enumerate([*log, Operation("end", "")]):
        returned = max((version for version, end in ends.items() if end <= number), default=None)
        begun = max(version for version, begin in begins.items() if begin <= number)
        allowed = (returned, *range((returned or 0) + 1, begun + 1))
        for tree in disk.possible(draw, max(2, min(SUBSETS, cases // HISTORY))):
            _check(tally, tree, disk_at, allowed, f"operation {number} of {sizes}")
            if tally.cases >= cases:
                return
        disk.apply(operation)


def _kill(operation: Operation) -> None:
    raise Killed


def _check(
    tally: Tally, tree: list[tuple[str, bytes | None]], place: Path, allowed: tuple[int | None, ...], where: str
) -> None:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for path, content in tree:
        if content is None:
            (place / path).mkdir(parents=True, exist_ok=True)
        else:
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(content)
    try:
        found = version_of(place / "a" / "model")
        if found not in allowed:
            tally.fail(f"{where}: version {found}, not one of {allowed}")
            return
        if tally.cases % 16 == 0:  # the next writer cleans up and commits
            store = ModelStore(place / "a" / "model")
            with store.writing():
                store.commit(*bare(99, 1))
            assert version_of(store.path) == 99
    except (TplError, AssertionError, OSError) as error:
        tally.fail(f"{where}: {error}")
        return
    tally.counts["before" if found == allowed[0] else "after"] += 1
