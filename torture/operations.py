"""File operations of this process, seen one by one: to stop, fail, log or delay any of them.

`watching(see)` calls `see(operation)` before each operation that tpl's storage does on files. Whatever `see` raises is
what the operation raises; `os._exit` in it is a kill at that moment. `done(operation)` is called after each that
succeeded.
"""

from __future__ import annotations

import io
import os
import pathlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Operation:
    """One operation: `kind` is open, read, create, write, sync, rename, delete, make or remove (a folder)."""

    kind: str
    path: str
    data: bytes = b""  # what is written
    target: str = ""  # of a rename


See = Callable[[Operation], None]

# Functions of `os` that act on names, by kind.
_NAMED = {"mkdir": "make", "rmdir": "remove", "unlink": "delete", "remove": "delete"}


@contextmanager
def watching(see: See, done: See = lambda operation: None) -> Iterator[None]:
    """Call `see` before each operation inside the block, `done` after it."""
    names: dict[int, str] = {}  # open descriptors
    real = {name: getattr(os, name) for name in (*_NAMED, "open", "close", "fsync", "rename", "replace")}

    def full(path: Any, dir_fd: int | None = None) -> str:
        given = os.fsdecode(path)
        return os.path.join(names.get(dir_fd, ""), given) if dir_fd is not None else os.path.abspath(given)

    def on_name(name: str) -> Callable[..., None]:
        def act(path: Any, *args: Any, **options: Any) -> None:
            operation = Operation(_NAMED[name], full(path, options.get("dir_fd")))
            see(operation)
            real[name](path, *args, **options)
            done(operation)

        return act

    def on_rename(name: str) -> Callable[..., None]:
        def act(source: Any, target: Any, **options: Any) -> None:
            operation = Operation("rename", full(source), target=full(target))
            see(operation)
            real[name](source, target, **options)
            done(operation)

        return act

    def on_open(path: Any, flags: int, *args: Any, **options: Any) -> int:
        where = full(path, options.get("dir_fd"))
        operation = Operation("create" if flags & os.O_CREAT else "open", where)
        see(operation)
        handle: int = real["open"](path, flags, *args, **options)
        names[handle] = where
        done(operation)
        return handle

    def on_close(handle: int) -> None:
        names.pop(handle, None)
        real["close"](handle)

    def on_sync(handle: int) -> None:
        operation = Operation("sync", os.readlink(f"/proc/self/fd/{handle}"))  # `names` may be stale
        see(operation)
        real["fsync"](handle)
        done(operation)

    def on_path_open(path: pathlib.Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if not set(mode) & set("wxa"):
            see(Operation("read", os.path.abspath(path)))
            return io.open(path, mode, *args, **options)  # noqa: UP020 (pathlib's own is replaced)
        operation = Operation("create", os.path.abspath(path))
        see(operation)
        stream = io.open(path, mode, *args, **options)  # noqa: SIM115, UP020
        done(operation)
        return _Written(stream, os.path.abspath(path), see, done)

    with ExitStack() as patches:
        patch = mock.patch.object
        for name in _NAMED:
            patches.enter_context(patch(os, name, on_name(name)))
        for name in ("rename", "replace"):
            patches.enter_context(patch(os, name, on_rename(name)))
        for name, function in (("open", on_open), ("close", on_close), ("fsync", on_sync)):
            patches.enter_context(patch(os, name, function))
        patches.enter_context(patch(pathlib.Path, "open", on_path_open))
        yield


class _Written:
    """A file that tells of what is written to it."""

    def __init__(self, stream: Any, path: str, see: See, done: See) -> None:
        self._stream, self._path, self._see, self._done = stream, path, see, done

    def write(self, data: Any) -> int:
        """Write, after telling of it."""
        operation = Operation("write", self._path, bytes(data) if isinstance(data, (bytes, bytearray)) else b"")
        try:
            self._see(operation)
        except OSError:
            self._stream.write(data[: len(data) // 2])  # a disk that fails has taken a part
            raise
        written: int = self._stream.write(data)
        self._done(operation)
        return written

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Countdown:
    """Does something at the n-th operation of this process, and counts all of them."""

    def __init__(self, number: int, act: Callable[[Operation], None]) -> None:
        self.number, self.act, self.seen = number, act, 0

    def __call__(self, operation: Operation) -> None:
        """See one operation."""
        self.seen += 1
        if self.seen == self.number:
            self.act(operation)
