"""Directories that travel between machines which share no file system: files as bytes, and only those that changed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

# Who holds a directory is a matter of its machine; what is half-written is nobody's.
_STAY = (".lock", ".lock.json")
_PARTIAL = ".partial"


@dataclass(frozen=True)
class Parcel:
    """Files by their path below a directory, and those that are there no more."""

    files: dict[str, bytes] = field(default_factory=dict)
    gone: tuple[str, ...] = ()


class Baggage:
    """A directory whose changes are sent, time after time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._sent = self._look()  # what lies here now has come from where changes are sent

    def changes(self, only: Sequence[str] | None = None) -> Parcel:
        """What changed since the last call, in all files or `only` some. To be called while nobody writes."""
        now = self._look()
        if only is not None:
            now = self._sent | {name: now[name] for name in only if name in now}
        new = [name for name in now if now[name] != self._sent.get(name)]
        gone = tuple(name for name in self._sent if name not in now)
        self._sent = now
        return Parcel({name: (self.root / name).read_bytes() for name in new}, gone)

    def _look(self) -> dict[str, tuple[int, int]]:
        status = {name: (self.root / name).stat() for name in _names(self.root)}
        return {name: (found.st_size, found.st_mtime_ns) for name, found in status.items()}


def pack(root: Path) -> Parcel:
    """All of a directory, which may not be there."""
    return Parcel({name: (root / name).read_bytes() for name in _names(root)})


def unpack(parcel: Parcel, root: Path, last: Sequence[str] = ()) -> None:
    """Put files into a directory, each in one step. Those in `last`, which tell of the others, come after them.

    Wherever this is cut short, what the files in `last` tell of is there.
    """
    root.mkdir(parents=True, exist_ok=True)
    for name in sorted(parcel.files, key=lambda name: last.index(name) if name in last else -1):
        _replace(root / name, parcel.files[name])
    for name in parcel.gone:
        (root / name).unlink(missing_ok=True)
        with suppress(OSError):  # other files are in there
            (root / name).parent.rmdir()


def _names(root: Path) -> list[str]:
    return sorted(
        (Path(folder) / name).relative_to(root).as_posix()
        for folder, _, names in os.walk(root)
        if not folder.endswith(_PARTIAL)
        for name in names
        if name not in _STAY and not name.endswith(_PARTIAL)
    )


def _replace(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}{_PARTIAL}")
    with partial.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)
