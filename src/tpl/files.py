"""Files as a whole: checksums, and replacing a file in one step that outlasts a power cut."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path


def sha256(file: Path) -> str:
    """The checksum of a file, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def partial_name(target: Path) -> Path:
    """The name under which a file or folder is made, before it takes its place."""
    return target.with_name(f".{target.name}.partial")


def replace_text(file: Path, text: str) -> None:
    """Replace a text file in one step."""
    partial = partial_name(file)
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder outlast a power cut, where the system can.

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
