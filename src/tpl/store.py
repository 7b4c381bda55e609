"""The model directory: the whole truth about a learned model, readable and never half-written.

    model.json                      schema, method, options, encoder and its hash, tasks, sha256 of every other file
    tasks/000/task-0.safetensors    what task 0 owns for good
    tasks/001/task-1.safetensors    and so on, one folder a commit
    tasks/001/shared.safetensors    what the tasks share, as of the newest commit
    tasks/001/memory.safetensors    the replay memory, as of the newest commit

A commit writes a new folder under a temporary name, renames it, and then replaces `model.json`: the
one moment at which the new model exists. Whatever happens before that, the old model stands. Files
that the new one does not need are deleted afterwards, by the next writer if this one is killed. A
task that changed (a class was removed or updated) is written anew in the newest folder. No pickle,
neither on writing nor on reading.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from tpl.errors import TplError
from tpl.files import partial_name, replace_text, sha256, sync_folder
from tpl.state import State

if TYPE_CHECKING:  # torch takes seconds to import; what a model knows stands in its header
    from torch import Tensor

SCHEMA = 2
READABLE = (1, 2)  # schema 1 knew no checksums, and no more of a task than its classes
OURS = re.compile(r"\d{3,}|\.\d{3,}\.partial")  # the folders this module makes; strangers' are left alone


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
            raise StoreError(f"{self.path} is being written by {self._holder()}; wait for it to finish.") from None
        except OSError as error:
            raise StoreError(f"{self.path} cannot be written: {_reason(error)}.") from error
        try:
            if lock.lock_counter == 1:
                self._sign()
                self._sweep()
            yield
        finally:
            if lock.lock_counter == 1:
                with suppress(OSError):
                    self.holder_file.unlink()
            lock.release()

    @contextmanager
    def existing(self) -> Iterator[None]:
        """Hold a directory for writing that must hold a model already; none is made otherwise."""
        self.header()
        with self.writing():
            yield

    @property
    def holder_file(self) -> Path:
        """Says who holds the lock."""
        return self.path / ".lock.json"

    def _sign(self) -> None:
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        content = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        with suppress(OSError):  # a courtesy to others: a full disk is found out by the commit
            self.holder_file.write_text(content, encoding="utf-8")

    def _holder(self) -> str:
        try:
            holder = json.loads(self.holder_file.read_text(encoding="utf-8"))
            return f"another process ({holder['pid']} on {holder['host']}, since {holder['since']})"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    def header(self) -> dict[str, Any]:
        """What `model.json` says."""
        if not self.exists():
            raise StoreError(f"{self.path} holds no model: there is no model.json in it.")
        try:
            header: dict[str, Any] = json.loads(self.header_file.read_text(encoding="utf-8"))
            schema = header["schema"]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{self.header_file} is damaged ({error}); restore it from a backup.") from error
        if schema not in READABLE:
            known = " and ".join(map(str, READABLE))
            raise StoreError(f"{self.path} has schema {schema}; this version reads schema {known}. Update tpl.")
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
            sums = header["files"] if header["schema"] > 1 else {}
            wanted = [f"{newest}/shared.safetensors", f"{newest}/memory.safetensors", *files]
            checksums = {file: sums[file] if header["schema"] > 1 else None for file in wanted}
        except (KeyError, TypeError) as error:
            raise StoreError(f"{self.header_file} is damaged ({error}); restore it from a backup.") from error
        shared, memory, *tasks = (self._load(file, checksums[file]) for file in wanted)
        return State(shared, tasks), memory

    def commit(self, header: dict[str, Any], state: State, memory: dict[str, Tensor]) -> None:
        """Make this model the one that is here, or leave the old one untouched.

        `header["tasks"]` lists all tasks; those that are already stored, bit for bit, are not written again.
        """
        old: dict[str, Any] = self.header() if self.exists() else {"tasks": [], "commits": 0}
        newest = f"tasks/{old['commits']:03d}"
        files = [f"{newest}/task-{i}.safetensors" for i in range(len(state.tasks))]
        gone = max(len(old["tasks"]) - len(state.tasks), 0)  # where tasks have gone, those after them moved up
        for i, own in enumerate(state.tasks):
            stored = (task["file"] for task in old["tasks"][i : i + gone + 1])
            files[i] = next((file for file in stored if self._holds(file, own, old)), files[i])
        parts = {f: own for f, own in zip(files, state.tasks, strict=True) if f.startswith(f"{newest}/")}
        parts |= {f"{newest}/shared.safetensors": state.shared, f"{newest}/memory.safetensors": memory}
        tasks = [task | {"file": file} for task, file in zip(header["tasks"], files, strict=True)]
        try:
            written = self._write_folder(newest, parts)
            sums = {file: written.get(file) or sha256(self.path / file) for file in {*files, *parts}}
            complete = {"schema": SCHEMA} | header
            complete |= {"tasks": tasks, "newest": newest, "commits": old["commits"] + 1}
            complete["files"] = dict(sorted(sums.items()))
            replace_text(self.header_file, json.dumps(complete, indent=2, ensure_ascii=False) + "\n")
        except (OSError, SafetensorError) as error:
            for leftover in (self.path / newest, partial_name(self.path / newest)):
                shutil.rmtree(leftover, ignore_errors=True)
            with suppress(OSError):
                partial_name(self.header_file).unlink(missing_ok=True)
            raise StoreError(
                f"The model in {self.path} could not be updated ({_reason(error)}); it is as it was."
            ) from error
        self._sweep()

    def _write_folder(self, folder: str, parts: dict[str, dict[str, Tensor]]) -> dict[str, str]:
        """Write files into a new folder; gives their checksums."""
        target = self.path / folder
        partial = partial_name(target)
        for stale in (partial, target):  # what an interrupted commit left behind
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir(parents=True)
        sums = {}
        for name, tensors in parts.items():
            _save(tensors, partial / Path(name).name)
            sums[name] = sha256(partial / Path(name).name)
        sync_folder(partial)
        partial.rename(target)
        sync_folder(target.parent)
        return sums

    def _load(self, name: str, checksum: str | None) -> dict[str, Tensor]:
        """The content of a file, if it is what was written."""
        from safetensors.torch import load

        file = self.path / name
        try:
            content = file.read_bytes()
            if checksum is not None and hashlib.sha256(content).hexdigest() != checksum:
                raise StoreError(
                    f"{file} is damaged (its sha256 is not the one in model.json); restore it from a backup."
                )
            # Copied into torch's own memory, which is aligned: some CPUs' matrix products round by alignment.
            return {name: tensor.clone() for name, tensor in load(content).items()}
        except FileNotFoundError:
            raise StoreError(f"{file} is missing; restore it from a backup.") from None
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{file} is damaged ({error}); restore it from a backup.") from error

    def _holds(self, name: str, tensors: dict[str, Tensor], header: dict[str, Any]) -> bool:
        """Whether a stored file has just this content."""
        import torch

        try:
            stored = self._load(name, header.get("files", {}).get(name))
        except StoreError:
            return False  # written anew, then
        if stored.keys() != tensors.keys():
            return False
        given = {k: v.detach().cpu() for k, v in tensors.items()}
        return all(stored[k].dtype == v.dtype and torch.equal(stored[k], v) for k, v in given.items())

    def _sweep(self) -> None:
        """Drop what the header does not refer to: older commits, and what a killed writer left behind."""
        if not self.exists():
            return
        try:
            header = self.header()
            needed = {task["file"] for task in header["tasks"]}
            needed |= {f"{header['newest']}/{part}.safetensors" for part in ("shared", "memory")}
            folders = [f for f in (self.path / "tasks").iterdir() if f.is_dir() and OURS.fullmatch(f.name)]
        except (StoreError, OSError, KeyError, TypeError):
            return  # nothing to go by
        with suppress(OSError):
            partial_name(self.header_file).unlink(missing_ok=True)
        for folder in folders:
            with suppress(OSError):  # the model is committed already: leftovers are no failure
                for file in folder.glob("*.safetensors"):
                    if f"tasks/{folder.name}/{file.name}" not in needed:
                        file.unlink()
                if not any(folder.iterdir()):
                    folder.rmdir()


def _reason(error: Exception) -> str:
    # safetensors wraps the system's error in one of its own, which has no number.
    full = getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error)
    return "the disk is full: free some space and do this again" if full else str(error)


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, file)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
