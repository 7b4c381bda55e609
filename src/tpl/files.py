"""Files that are replaced in one step and identified by their sha256."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path


def cache_folder() -> Path:
    """Where this package keeps what can be made again: `tpl` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpl"


def at_home(path: Path | str) -> Path:
    """The path, with the home folder in the place of a leading `~`; that of an unknown user is left as it is."""
    return Path(os.path.expanduser(path))  # Path.expanduser would raise a RuntimeError


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_bounded(path: Path, most: int) -> bytes:
    """The content of an ordinary file of at most `most` bytes; OSError for a larger one, a device or a pipe.

    A device may have no end, and a pipe may never begin.
    """
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb") as stream:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no ordinary file")
        if found.st_size > most:
            raise OSError(f"larger than {most >> 20} MiB")
        return stream.read(most)


def replace_atomically(path: Path, data: str | bytes, synced: bool = True) -> None:
    """Write a file so that, whatever happens, it holds either its old content or all of `data`; text is UTF-8.

    Not `synced`, the caller syncs the folder: until then a power cut can bring the old content back.
    """
    partial = partial_path(path)
    partial.unlink(missing_ok=True)  # a link would be written through
    write_synced(partial, data.encode() if isinstance(data, str) else data)
    partial.replace(path)
    if synced:
        sync_folder(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file, down to the disk; it must not exist."""
    with path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def make_folder(path: Path) -> None:
    """Make a folder and all those it lies in; new ones survive a power cut."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync_folder(folder.parent)


def sync_parents(path: Path) -> None:
    """Make a folder and all those it lies in on its disk survive a power cut, whoever made them."""
    disk = path.stat().st_dev
    for folder in path.resolve().parents:
        if folder.stat().st_dev != disk:
            break
        with suppress(PermissionError):  # somebody else's folder, which is older than the model
            sync_folder(folder)


def partial_path(path: Path) -> Path:
    """The name that a file or folder has while it is written; it is renamed when complete."""
    return path.with_name(f".{path.name}.partial")


def sync_folder(folder: Path) -> None:
    """Make what was created, renamed and deleted in a folder survive a power cut; OSError if the disk fails."""
    if os.name == "nt":  # a folder cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # file systems that sync no folders
            raise
    finally:
        os.close(handle)
