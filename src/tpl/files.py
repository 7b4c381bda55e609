"""Files that are replaced in one step and identified by their sha256."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path


def cache_folder() -> Path:
    """Where this package keeps what can be made again: `tpl` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpl"


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def replace_atomically(path: Path, data: str | bytes) -> None:
    """Write a file so that, whatever happens, it holds either its old content or all of `data`; text is UTF-8."""
    partial = partial_path(path)
    with partial.open("wb") as stream:
        stream.write(data.encode() if isinstance(data, str) else data)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def partial_path(path: Path) -> Path:
    """The name that a file or folder has while it is written; it is renamed when complete."""
    return path.with_name(f".{path.name}.partial")


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut, where the system can.

    Never fails: after the rename that commits a model nothing may call the commit off.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # not possible on this system
    try:
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
