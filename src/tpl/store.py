"""The model directory: all that a learned model is, readable and never half-written.

    model.json                      schema, method, options, encoder and its hash, tasks, sha256 of every other file and
                                    of itself (`header.py`)
    tasks/000/task-0.safetensors    what task 0 owns for good
    tasks/001/task-1.safetensors    and so on, one folder a commit
    tasks/001/shared.safetensors    what the tasks share, as of this commit; large tensors have files of their own,
    tasks/001/shared-1.safetensors  so that versions share those that have not changed
    tasks/001/memory.safetensors    the replay memory, as of this commit
    versions/1.json                 model.json of an older version that is kept
    waiting.bin                     images that wait to be learned (`Learner.observe`), if there are any

A commit writes a new folder under a temporary name, renames it, and then replaces `model.json`: this is the moment at
which the new model exists. If anything fails before, the old model stays as it was. Files that neither the new one nor
an older version that is kept needs are deleted afterwards, by the next writer if this one is killed. What changed since
the last commit (a task of which a class was removed or updated, a large tensor) is written again in the newest folder.
No pickle, neither on writing nor on reading.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from tpl.blocks import from_blocks, in_blocks
from tpl.errors import TplError
from tpl.files import make_folder, partial_path, replace_atomically, sha256_of, sync_folder, sync_parents, write_synced
from tpl.header import MEMORY, SEAL, SHARED, check_header, files_of, parts_of, seal_of

if TYPE_CHECKING:  # torch takes seconds to import, and reading the header needs none of it
    from torch import Tensor

    Tensors = dict[str, Tensor]

WAITING = "waiting.bin"  # images that wait to be learned: a sha256 of 32 bytes, then a safetensors file
SCHEMA = 3
READABLE = (1, 2, 3)  # schema 2 had no versions; schema 1 no checksums either, and of a task only its classes
COMMIT_FOLDER = re.compile(r"\d{3,}|\.\d{3,}\.partial")  # folders of other names are left alone
VERSION = re.compile(r"\d+\.json|\.\d+\.json\.partial")
LARGE_PARTS = f"{SHARED}-", f"{MEMORY}-"  # how files of one large tensor begin
LARGEST_HEADER = 16 << 20  # bytes: a hundred thousand classes take a few megabytes
SPARSE = 100  # a file this many times larger than its room on disk is no file of a model
WRITERS = 4  # files written at a time

_DIRECTORY, _NO_LINK, _NO_WAIT = (getattr(os, name, 0) for name in ("O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK"))
_DESCRIPTORS = os.open in os.supports_dir_fd and os.listdir in os.supports_fd  # not on Windows: names are checked there


class StoreError(TplError):
    """A model directory cannot be read or written."""


@dataclass
class State:
    """What a method has learned, as tensors: those that the tasks share, and those that each task owns for good."""

    shared: Tensors = field(default_factory=dict)
    tasks: list[Tensors] = field(default_factory=list)


def under_prefix(prefix: str, tensors: Tensors) -> Tensors:
    """Entries whose key starts with `prefix`, with the prefix removed."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


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
        """Lock the directory for writing; a second writer gets an error."""
        try:
            make_folder(self.path)
        except OSError as error:
            raise StoreError(f"{self.path} cannot be made a model directory: {error}.") from error
        # One lock object per directory and process, so that the holder of the lock can commit.
        self._refuse_links(".lock", ".lock.json", "tasks", "model.json")
        lock = FileLock(self.path.resolve() / ".lock", is_singleton=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise StoreError(f"{self.path} is being written by {self._holder()}; wait for it to finish.") from None
        except OSError as error:
            raise StoreError(f"{self.path} cannot be written: {_reason(error)}.") from error
        try:
            if lock.lock_counter == 1:
                self._write_holder()
                self._delete_unused()
            yield
        finally:
            if lock.lock_counter == 1:
                with suppress(OSError):
                    self.holder_file.unlink()
            lock.release()

    @contextmanager
    def existing(self) -> Iterator[None]:
        """Lock a directory that must hold a model already; none is made otherwise."""
        self.header()
        with self.writing():
            yield

    @contextmanager
    def creating(self) -> Iterator[None]:
        """Hold the directory for writing; if it is new and no model is committed to it, remove it at the end."""
        new = not self.path.exists()
        try:
            with self.writing():
                yield
        finally:
            if new and not self.exists():
                for leftover in (self.path / ".lock", self.holder_file):
                    with suppress(OSError):
                        leftover.unlink()
                with suppress(OSError):
                    self.path.rmdir()

    @property
    def holder_file(self) -> Path:
        """The file that names the process which holds the lock."""
        return self.path / ".lock.json"

    def _write_holder(self) -> None:
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        content = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        with suppress(OSError):  # only informs other processes: a full disk is reported by the commit
            self.holder_file.unlink(missing_ok=True)
            with open(os.open(self.holder_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w") as stream:
                stream.write(content)

    def _holder(self) -> str:
        try:
            holder = json.loads(self.holder_file.read_text(encoding="utf-8"))
            return f"another process ({holder['pid']} on {holder['host']}, since {holder['since']})"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    def header(self, version: int | None = None) -> dict[str, Any]:
        """The content of `model.json`, of today or of an older version that is kept; checked against its seal."""
        if not self.exists():
            raise StoreError(f"{self.path} holds no model: there is no model.json in it.")
        header = self._header("model.json", None)
        if version is None or version == header.get("commits"):
            return header
        older = _older(header)
        if version not in older:
            raise StoreError(f"{self.path} has no version {version}: {_in_words(header)}.")
        return self._header(f"versions/{version}.json", older[version])

    def _header(self, name: str, checksum: str | None) -> dict[str, Any]:
        try:
            content = self._content(name, LARGEST_HEADER)
            if checksum is not None and hashlib.sha256(content).hexdigest() != checksum:
                raise ValueError("its sha256 is not the one in model.json")
            header: dict[str, Any] = json.loads(content, parse_constant=_refused)
            schema = header["schema"]
            if type(schema) is int and schema not in READABLE:
                known = ", ".join(map(str, READABLE))
                raise StoreError(f"{self.path} has schema {schema}; this version reads schema {known}. Update tpl.")
            seal = header.pop(SEAL, None)  # earlier versions wrote none
            check_header(header)
            if seal is not None and seal != seal_of(header):
                raise ValueError("its content is not what was written: the seal differs")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"{self.path / name} is damaged ({error}); restore it from a backup.") from error
        return header

    def read(self, version: int | None = None) -> tuple[dict[str, Any], State, Tensors]:
        """Header, state and memory of the committed model, or of an older version that is kept."""
        header = self.header(version)
        try:
            return header, *self._read_parts(header)
        except StoreError:
            if self.header(version) == header:
                raise
        return self.read(version)  # a writer committed meanwhile and removed files of the old header

    def _read_parts(self, header: dict[str, Any]) -> tuple[State, Tensors]:
        sums = header.get("files") or {}  # schema 1 has none
        shared, memory, tasks = ([self._load(file, sums.get(file)) for file in part] for part in files_of(header))
        return State(from_blocks(shared), tasks), from_blocks(memory)

    def commit(self, header: dict[str, Any], state: State, memory: Tensors, keep: int = 0) -> None:
        """Replace the stored model by this one, or leave the old one untouched.

        `header["tasks"]` lists all tasks; those that are already stored, bit for bit, are not written again. The
        newest `keep` of the older versions stay readable.
        """
        old: dict[str, Any] = self.header() if self.exists() else {"tasks": [], "commits": 0}
        newest = f"tasks/{old['commits']:03d}"
        files = [f"{newest}/task-{i}.safetensors" for i in range(len(state.tasks))]
        gone = max(len(old["tasks"]) - len(state.tasks), 0)  # where tasks were removed, later ones moved up
        for i, own in enumerate(state.tasks):
            stored = (task["file"] for task in old["tasks"][i : i + gone + 1] if task["file"] not in files[:i])
            files[i] = next((file for file in stored if self._holds(file, own, old)), files[i])
        parts = {f: own for f, own in zip(files, state.tasks, strict=True) if f.startswith(f"{newest}/")}
        names = {}
        for part, tensors in ((SHARED, state.shared), (MEMORY, memory)):
            blocks = {f"{newest}/{part}{f'-{i}' * bool(i)}.safetensors": b for i, b in enumerate(in_blocks(tensors))}
            names[part], parts = list(blocks), parts | blocks
        tasks = [task | {"file": file} for task, file in zip(header["tasks"], files, strict=True)]
        known = self._checksums(old)
        try:
            written = self._write_folder(newest, parts, known)
            if not old["commits"]:
                sync_parents(self.path)  # a writer that was killed may have made them
            places = {part: [written[name][0] for name in own] for part, own in names.items()}
            complete = header | {"tasks": tasks, "parts": places, "newest": newest}
            checked = (old.get("files") or {}) | dict(written.values())
            wanted = {*files, *itertools.chain.from_iterable(places.values())}
            sums = {file: checked.get(file) or sha256_of(self.path / file) for file in wanted}
            self._replace_header(complete | {"files": dict(sorted(sums.items()))}, old, keep)
        except (OSError, SafetensorError, ValueError, StoreError) as error:
            for leftover in (self.path / newest, partial_path(self.path / newest)):
                shutil.rmtree(leftover, ignore_errors=True)
            with suppress(OSError):
                partial_path(self.header_file).unlink(missing_ok=True)
            self._delete_unused()
            raise StoreError(
                f"The model in {self.path} could not be updated ({_reason(error)}); it is as it was."
            ) from error
        self._confirm()

    def _confirm(self) -> None:
        """Make a new header survive a power cut, then delete what only the old one needed."""
        try:
            sync_folder(self.path)
        except OSError as error:  # the old model's files stay, in case that a power cut brings its header back
            raise StoreError(
                f"The new model in {self.path} is written, but the disk does not confirm it ({error}): a power cut "
                "could bring the old model back. Check the disk."
            ) from error
        self._delete_unused()

    def go_back(self, version: int, keep: int, more: dict[str, Any]) -> None:
        """Make an older version the newest one; the present model becomes an older version. `more` is for the header.

        No tensor is written or deleted, so this can be taken back in the same way.
        """
        with self.existing():
            old, wanted = self.header(), self.header(version)
            try:
                self._replace_header(wanted | more, old, keep)
            except (OSError, ValueError) as error:
                raise StoreError(f"{self.path} could not be changed ({_reason(error)}); it is as it was.") from error
            self._confirm()

    def prune(self, keep: int, more: dict[str, Any]) -> None:
        """Delete all older versions but the newest `keep`. `more` is for the header."""
        with self.existing():
            header = self.header()
            complete = header | {"older": _newest(self._kept(header), keep)} | more
            try:
                replace_atomically(self.header_file, _sealed(complete), synced=False)
            except (OSError, ValueError) as error:
                raise StoreError(f"{self.path} could not be changed ({_reason(error)}); it is as it was.") from error
            self._confirm()

    def _replace_header(self, header: dict[str, Any], old: dict[str, Any], keep: int) -> None:
        """Commit: write the old header as that of an older version, if it is kept, and replace `model.json`."""
        older = self._kept(old)
        if keep and old["commits"] and kept_number(old) == old["commits"]:
            content = self._content("model.json")
            self._refuse_links("versions")
            make_folder(self.path / "versions")
            replace_atomically(self.path / f"versions/{old['commits']}.json", content)
            older[old["commits"]] = hashlib.sha256(content).hexdigest()
        complete = {"schema": SCHEMA} | header | {"commits": old["commits"] + 1, "older": _newest(older, keep)}
        sync_folder(self.path)  # folders in it may have been made by a writer that was killed
        replace_atomically(self.header_file, _sealed(complete), synced=False)

    def _kept(self, header: dict[str, Any]) -> dict[int, str]:
        """The older versions that a header lists and that can be read: nobody can go back to the others."""
        kept = {}
        for version, checksum in _older(header).items():
            with suppress(StoreError):
                self._header(f"versions/{version}.json", checksum)
                kept[version] = checksum
        return kept

    def _checksums(self, header: dict[str, Any]) -> dict[str, list[str]]:
        """The files of the present model and of its older versions, by their sha256."""
        found: dict[str, list[str]] = {}
        if not header.get("files"):
            return found
        for each in (header, *(self.header(version) for version in self._kept(header))):
            for file, checksum in (each.get("files") or {}).items():
                found.setdefault(checksum, []).append(file)
        return found

    def _stored(self, checksum: str, known: dict[str, list[str]]) -> str | None:
        """The file, of those `known` by their checksums, that has this one."""
        for file in known.get(checksum, ()):
            with suppress(OSError):
                if sha256_of(self.path / file) == checksum:  # a damaged one is written again
                    return file
        return None

    def _write_folder(
        self, folder: str, parts: dict[str, Tensors], known: dict[str, list[str]]
    ) -> dict[str, tuple[str, str]]:
        """Write files into a new folder; returns, for each, the file that holds its content, and the checksum.

        That is another file for a large tensor which one of those `known` holds already.
        """
        from safetensors.torch import save

        target = self.path / folder
        partial = partial_path(target)
        for stale in (partial, target):  # what an interrupted commit left behind
            shutil.rmtree(stale, ignore_errors=True)
        self._refuse_links("tasks")
        make_folder(target.parent)
        partial.mkdir()

        def write(name: str) -> tuple[str, str]:
            content, file = save(_checked(_on_cpu(parts[name]))), Path(name).name
            checksum = hashlib.sha256(content).hexdigest()
            stored = self._stored(checksum, known) if file.startswith(LARGE_PARTS) else None
            if stored is None:
                write_synced(partial / file, content)
            return stored or name, checksum

        with ThreadPoolExecutor(WRITERS) as pool:  # one hashes while another waits for the disk
            written = dict(zip(parts, pool.map(write, parts), strict=True))
        sync_folder(partial)
        partial.rename(target)
        sync_folder(target.parent)
        return written

    def _refuse_links(self, *names: str) -> None:
        """A model directory holds its own files: a link in it could lead a writer anywhere."""
        for name in names:
            if (self.path / name).is_symlink():
                raise StoreError(
                    f"{self.path / name} is a link; a model directory may hold none. Copy what it links to."
                )

    @contextmanager
    def _folder(self, *names: str) -> Iterator[int]:
        """A descriptor of the directory or of a folder in it, reached through no link inside the directory."""
        handle = os.open(self.path, os.O_RDONLY | _DIRECTORY)
        try:
            for name in names:
                outer, handle = handle, os.open(name, os.O_RDONLY | _DIRECTORY | _NO_LINK, dir_fd=handle)
                os.close(outer)
            yield handle
        finally:
            os.close(handle)

    def _content(self, name: str, most: int | None = None) -> bytes:
        """The bytes of one of the directory's own files. Links, devices and pipes inside the directory are refused."""
        *folders, file = name.split("/")
        if not _DESCRIPTORS:
            self._refuse_links(*itertools.accumulate(folders, "{}/{}".format), name)
            return (self.path / name).read_bytes()
        try:
            with self._folder(*folders) as folder:
                opened = os.open(file, os.O_RDONLY | _NO_LINK | _NO_WAIT, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise StoreError(f"{self.path / name} is or passes a link; a model directory may hold none.") from error
            raise
        with open(opened, "rb") as stream:
            found = os.fstat(stream.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise StoreError(f"{self.path / name} is no ordinary file: this is no model directory of tpl.")
            sparse = found.st_size > SPARSE * (getattr(found, "st_blocks", found.st_size) * 512 + 4096)
            if sparse or (most is not None and found.st_size > most):
                raise StoreError(f"{self.path / name} is damaged ({found.st_size} bytes); restore it from a backup.")
            return stream.read()

    def _load(self, name: str, checksum: str | None) -> Tensors:
        """The tensors of a file, checked against its checksum."""
        from safetensors.torch import load

        file = self.path / name
        try:
            content = self._content(name)
            if int.from_bytes(content[:8], "little") > LARGEST_HEADER:  # where safetensors lists its tensors
                raise StoreError(f"{file} is damaged (its list of tensors is too long); restore it from a backup.")
            if checksum is not None and hashlib.sha256(content).hexdigest() != checksum:
                raise StoreError(
                    f"{file} is damaged (its sha256 is not the one in model.json); restore it from a backup."
                )
            # Copied into torch's own memory, which is aligned: some CPUs' matrix products round by alignment.
            return _checked({name: tensor.clone() for name, tensor in load(content).items()})
        except FileNotFoundError:
            raise StoreError(f"{file} is missing; restore it from a backup.") from None
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise StoreError(f"{file} is damaged ({error}); restore it from a backup.") from error

    def _holds(self, name: str, tensors: Tensors, header: dict[str, Any]) -> bool:
        """Whether a stored file has exactly this content."""
        import torch

        try:
            stored = self._load(name, header.get("files", {}).get(name))
        except StoreError:
            return False  # it is written again
        if stored.keys() != tensors.keys():
            return False
        given = {k: v.detach().cpu() for k, v in tensors.items()}
        return all(stored[k].dtype == v.dtype and torch.equal(stored[k], v) for k, v in given.items())

    def write_waiting(self, tensors: Tensors) -> None:
        """Replace the images that wait to be learned, in one atomic step; none: remove them."""
        from safetensors.torch import save

        self._refuse_links(WAITING)
        try:
            if tensors:
                content = save(_checked(_on_cpu(tensors)))
                replace_atomically(self.path / WAITING, hashlib.sha256(content).digest() + content)
            else:
                (self.path / WAITING).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{self.path / WAITING} cannot be written ({_reason(error)}).") from error

    def read_waiting(self) -> Tensors:
        """The images that wait to be learned, checked against their checksum; {} for none."""
        from safetensors.torch import load

        try:
            content = self._content(WAITING)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StoreError(f"{self.path / WAITING} cannot be read ({_reason(error)}).") from error
        try:
            if hashlib.sha256(content[32:]).digest() != content[:32]:
                raise ValueError("its sha256 is not the one at its beginning")
            return _checked({name: tensor.clone() for name, tensor in load(content[32:]).items()})
        except (SafetensorError, ValueError, KeyError) as error:
            raise StoreError(
                f"{self.path / WAITING} is damaged ({error}). Delete it to go on without the images that wait."
            ) from error

    def files(self) -> set[str]:
        """The files of the model and of all older versions that are kept, other than `model.json`."""
        header = self.header()
        files = set(parts_of(header))
        for number, checksum in _older(header).items():
            name = f"versions/{number}.json"
            files |= {name, *parts_of(self._header(name, checksum))}
        return files

    def _delete_unused(self) -> None:
        """Delete what neither the model nor a kept version needs: older commits, and what a killed writer left."""
        if not self.exists():
            return
        try:
            needed = self.files()
            self._refuse_links("tasks", "versions")
            inside = (self.path / "tasks").iterdir()
            folders = [f for f in inside if f.is_dir() and not f.is_symlink() and COMMIT_FOLDER.fullmatch(f.name)]
            sync_folder(self.path)  # a header that is not on disk yet must not outlive the files of the one before
        except (StoreError, OSError):
            return  # without readable headers nothing is known to be superfluous
        for leftover in (self.header_file, self.path / WAITING):
            with suppress(OSError):
                partial_path(leftover).unlink(missing_ok=True)
        with suppress(OSError):
            versions = self.path / "versions"
            for file in versions.iterdir() if versions.is_dir() else ():
                if VERSION.fullmatch(file.name) and f"versions/{file.name}" not in needed:
                    file.unlink()
            if versions.is_dir() and not any(versions.iterdir()):
                versions.rmdir()
        for folder in folders:
            with suppress(OSError):  # the model is committed already: leftovers are no failure
                self._delete_from(folder, needed)

    def _delete_from(self, folder: Path, needed: Collection[str]) -> None:
        """Delete the files of a folder in `tasks` that are not needed, and the folder if it is empty."""
        if not _DESCRIPTORS:
            for file in folder.glob("*.safetensors"):
                if f"tasks/{folder.name}/{file.name}" not in needed:
                    file.unlink()
        else:
            with self._folder("tasks", folder.name) as handle:
                for name in os.listdir(handle):
                    if name.endswith(".safetensors") and f"tasks/{folder.name}/{name}" not in needed:
                        os.unlink(name, dir_fd=handle)
        if not any(folder.iterdir()):
            folder.rmdir()


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _reason(error: Exception) -> str:
    # safetensors wraps the system's error in one of its own, which has no number.
    full = getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error)
    return "the disk is full: free some space and do this again" if full else str(error)


def kept_number(header: dict[str, Any]) -> int:
    """The number under which a model stays readable once it is changed.

    A model that an undo went back to has one already, if it is still kept.
    """
    same = header.get("same_as")
    return int(same) if same in _older(header) else int(header["commits"])


def _older(header: dict[str, Any]) -> dict[int, str]:
    """The older versions that are kept: their numbers, ascending, with the sha256 of their headers."""
    try:
        return {int(number): str(checksum) for number, checksum in sorted(header.get("older", {}).items(), key=_number)}
    except (AttributeError, TypeError, ValueError) as error:
        raise StoreError(f"model.json is damaged ({error}); restore it from a backup.") from error


def _number(entry: tuple[str, str]) -> int:
    return int(entry[0])


def _newest(older: dict[int, str], keep: int) -> dict[str, str]:
    """The newest `keep` of some older versions, for the header."""
    return {str(number): older[number] for number in (sorted(older)[-keep:] if keep else ())}


def _in_words(header: dict[str, Any]) -> str:
    older = [str(number) for number in _older(header)]
    present = f"the present one is {header['commits']}"
    return f"{present}, and kept are {', '.join(older)}" if older else f"{present}, and no older one is kept"


def _sealed(header: dict[str, Any]) -> str:
    """A header as text, with its seal; ValueError if it does not fit the schema."""
    check_header(header)
    return json.dumps(header | {SEAL: seal_of(header)}, indent=2, ensure_ascii=False) + "\n"


def _on_cpu(tensors: Tensors) -> Tensors:
    return {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}


def _checked(tensors: Tensors) -> Tensors:
    """Tensors of the kinds that a model has, every number finite; ValueError with the name of the first other one."""
    import torch

    whole = (torch.uint8, torch.int32, torch.int64, torch.bool)
    for name, tensor in tensors.items():
        if tensor.dtype not in (*whole, torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f"'{name}' has the type {tensor.dtype}")
        # A sum is finite only if all its numbers are, and several times faster to compute; but it may overflow.
        if tensor.dtype not in whole and not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
            raise ValueError(f"'{name}' has numbers that are not finite")
    return tensors
