"""The model directory: the whole truth about a learned model, readable and never half-written.

    model.json                      schema, method, options, encoder and its hash, classes, tasks
    tasks/000/task-0.safetensors    what task 0 owns for good
    tasks/001/task-1.safetensors    and so on, one folder a commit
    tasks/001/shared.safetensors    what the tasks share, as of the newest commit
    tasks/001/memory.safetensors    the replay memory, as of the newest commit

A commit writes a new folder under a temporary name, renames it, and then replaces `model.json`: the
one moment at which the new task exists. Whatever happens before that, the old model stands. No
pickle, neither on writing nor on reading.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tpl.errors import TplError
from tpl.state import State

SCHEMA = 1


class StoreError(TplError):
    """A model directory cannot be read or written."""


class ModelStore:
    """One model directory."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @property
    def header_file(self) -> Path:
        """The file whose replacement commits a task."""
        return self.path / "model.json"

    def exists(self) -> bool:
        """Whether a committed model is here."""
        return self.header_file.is_file()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the directory for writing; a second writer is refused, not mixed in."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self.path} cannot be made a model directory: {error}.") from error
        # One lock object a directory and process: who holds the directory may commit to it meanwhile.
        lock = FileLock(self.path.resolve() / ".lock", is_singleton=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise StoreError(f"{self.path} is being written by another process; wait for it to finish.") from None
        try:
            yield
        finally:
            lock.release()

    def header(self) -> dict[str, Any]:
        """What `model.json` says."""
        if not self.exists():
            raise StoreError(f"{self.path} holds no model: there is no model.json in it.")
        try:
            header: dict[str, Any] = json.loads(self.header_file.read_text(encoding="utf-8"))
            schema = header["schema"]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{self.header_file} is damaged ({error}); restore it from a backup.") from error
        if schema != SCHEMA:
            raise StoreError(f"{self.path} has schema {schema}; this version reads schema {SCHEMA}. Update tpl.")
        return header

    def read(self) -> tuple[dict[str, Any], State, dict[str, Tensor]]:
        """Header, state and memory of the committed model."""
        header = self.header()
        try:
            return header, *self._read_parts(header)
        except StoreError:
            if self.header() == header:
                raise
        return self.read()  # a writer committed meanwhile and swept what the old header names

    def _read_parts(self, header: dict[str, Any]) -> tuple[State, dict[str, Tensor]]:
        try:
            newest, files = header["newest"], [task["file"] for task in header["tasks"]]
        except (KeyError, TypeError) as error:
            raise StoreError(f"{self.header_file} is damaged ({error}); restore it from a backup.") from error
        state = State(self._load(f"{newest}/shared.safetensors"), [self._load(file) for file in files])
        return state, self._load(f"{newest}/memory.safetensors")

    def commit(self, header: dict[str, Any], state: State, memory: dict[str, Tensor]) -> None:
        """Make this model the one that is here, or leave the old one untouched.

        `header["tasks"]` lists all tasks; those that are already stored, bit for bit, are not written again.
        """
        old: dict[str, Any] = self.header() if self.exists() else {"tasks": [], "commits": 0}
        newest = f"tasks/{old['commits']:03d}"
        files = [f"{newest}/task-{i}.safetensors" for i in range(len(state.tasks))]
        for i, (before, own) in enumerate(zip(old["tasks"], state.tasks, strict=False)):
            if self._holds(before["file"], own):
                files[i] = before["file"]
        parts = {f: own for f, own in zip(files, state.tasks, strict=True) if f.startswith(newest)}
        parts |= {f"{newest}/shared.safetensors": state.shared, f"{newest}/memory.safetensors": memory}
        tasks = [task | {"file": file} for task, file in zip(header["tasks"], files, strict=True)]
        complete = {"schema": SCHEMA} | header
        complete |= {"tasks": tasks, "newest": newest, "commits": old["commits"] + 1}
        try:
            self._write_folder(newest, parts)
            replace_text(self.header_file, json.dumps(complete, indent=2, ensure_ascii=False) + "\n")
        except (OSError, SafetensorError) as error:
            for leftover in (self.path / newest, _partial(self.path / newest)):
                shutil.rmtree(leftover, ignore_errors=True)
            _partial(self.header_file).unlink(missing_ok=True)
            # safetensors wraps the system's error in one of its own, which has no number.
            full = getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error)
            why = "the disk is full" if full else str(error)
            raise StoreError(f"The model in {self.path} could not be updated ({why}); it is as it was.") from error
        self._sweep(newest, set(files))

    def _write_folder(self, folder: str, parts: dict[str, dict[str, Tensor]]) -> None:
        target = self.path / folder
        partial = _partial(target)
        for stale in (partial, target):  # what an interrupted commit left behind
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, tensors in parts.items():
            _save(tensors, partial / Path(name).name)
        _sync_folder(partial)
        partial.rename(target)
        _sync_folder(target.parent)

    def _load(self, name: str) -> dict[str, Tensor]:
        file = self.path / name
        try:
            return load_file(file)
        except FileNotFoundError:
            raise StoreError(f"{file} is missing; restore it from a backup.") from None
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{file} is damaged ({error}); restore it from a backup.") from error

    def _holds(self, name: str, tensors: dict[str, Tensor]) -> bool:
        """Whether a stored file has just this content."""
        try:
            stored = self._load(name)
        except StoreError:
            return False  # written anew, then
        if stored.keys() != tensors.keys():
            return False
        given = {k: v.detach().cpu() for k, v in tensors.items()}
        return all(stored[k].dtype == v.dtype and torch.equal(stored[k], v) for k, v in given.items())

    def _sweep(self, newest: str, needed: set[str]) -> None:
        """Drop what the header does not refer to any more."""
        for folder in (self.path / "tasks").iterdir():
            if f"tasks/{folder.name}" == newest or not folder.is_dir():
                continue
            with suppress(OSError):  # the model is committed already: leftovers are no failure
                for file in folder.iterdir():
                    if f"tasks/{folder.name}/{file.name}" not in needed:
                        file.unlink()
                if not any(folder.iterdir()):
                    folder.rmdir()


def _partial(target: Path) -> Path:
    """The name under which a file or folder is made, before it takes its place."""
    return target.with_name(f".{target.name}.partial")


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, file)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def replace_text(file: Path, text: str) -> None:
    """Replace a text file in one step."""
    partial = _partial(file)
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)
    _sync_folder(file.parent)


def _sync_folder(folder: Path) -> None:
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
