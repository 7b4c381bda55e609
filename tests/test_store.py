"""The model directory: a commit happens wholly or not at all, whatever goes wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors import SafetensorError
from torch import Tensor

from tpl import store as store_module
from tpl.blocks import LARGE
from tpl.files import replace_atomically
from tpl.store import SCHEMA, ModelStore, State, StoreError

Commit = tuple[dict[str, Any], State, dict[str, Tensor]]


def model(tasks: int, variant: float = 0.0) -> Commit:
    """A model of `tasks` tasks; `variant` tells two trainings on the same classes apart."""
    encoder = {"name": "compact", "sha256": "0" * 64, "fingerprint": "0" * 64, "weights": None}
    header: dict[str, Any] = {"method": "tpl", "options": {"k": 5}, "seed": 1, "encoder": encoder}
    header["tasks"] = [{"classes": [f"ä{t}", f"b{t}"]} for t in range(tasks)]
    own = [{"w": torch.full((2, 3), t + variant), "n": torch.tensor([t])} for t in range(tasks)]
    shared = {"adapters": torch.arange(6.0).reshape(2, 3).T + 10 * tasks + variant}  # not contiguous
    return header, State(shared, own), {"bytes": torch.full((5,), tasks, dtype=torch.uint8)}


def check(store: ModelStore, expected: Commit) -> None:
    """That `store` reads as `expected`."""
    header, state, memory = store.read()
    want_header, want_state, want_memory = expected
    assert {k: header[k] for k in ("method", "seed")} == {k: want_header[k] for k in ("method", "seed")}
    assert [task["classes"] for task in header["tasks"]] == [task["classes"] for task in want_header["tasks"]]
    pairs = [(state.shared, want_state.shared), (memory, want_memory)]
    pairs += zip(state.tasks, want_state.tasks, strict=True)
    for found, want in pairs:
        assert found.keys() == want.keys()
        for key in want:
            assert found[key].dtype == want[key].dtype, key
            assert torch.equal(found[key], want[key]), key


def files(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file below `path`: inode, time of change, content."""
    found = sorted(f for f in path.rglob("*") if f.is_file())
    return {str(f.relative_to(path)): (f.stat().st_ino, f.stat().st_mtime_ns, f.read_bytes()) for f in found}


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "model")


def test_what_is_committed_is_read(store: ModelStore) -> None:
    assert not store.exists()
    for tasks in (1, 2, 3):
        store.commit(*model(tasks))
        check(ModelStore(str(store.path)), model(tasks))
        assert store.exists()
        assert store.header()["schema"] == SCHEMA


def test_parts_may_be_empty(store: ModelStore) -> None:
    header, _, _ = model(2)
    store.commit(header, State({}, [{}, {}]), {})
    check(store, (header, State({}, [{}, {}]), {}))


def test_a_later_commit_touches_no_earlier_tasks_file(store: ModelStore) -> None:
    store.commit(*model(1))
    store.commit(*model(2))
    before = files(store.path)
    store.commit(*model(3))
    after = files(store.path)
    own = {name for name in before if "task-" in name}
    assert own == {"tasks/000/task-0.safetensors", "tasks/001/task-1.safetensors"}
    assert all(after[name] == before[name] for name in own)


def test_shared_and_memory_of_older_commits_are_swept(store: ModelStore) -> None:
    for tasks in (1, 2, 3):
        store.commit(*model(tasks))
    assert set(files(store.path)) - {".lock"} == {
        "model.json",
        "tasks/000/task-0.safetensors",
        "tasks/001/task-1.safetensors",
        "tasks/002/memory.safetensors",
        "tasks/002/shared.safetensors",
        "tasks/002/task-2.safetensors",
    }


def test_only_json_and_safetensors_are_written(store: ModelStore) -> None:
    with store.writing():
        store.commit(*model(2))
    for name, (_, _, content) in files(store.path).items():
        assert name == ".lock" or name.endswith((".json", ".safetensors"))
        assert not content.startswith((b"\x80", b"PK"))  # how pickles and zipped pickles begin
    assert "ä0" in store.header_file.read_text(encoding="utf-8")


def test_another_training_on_the_same_classes_replaces_every_task(store: ModelStore) -> None:
    store.commit(*model(3))
    store.commit(*model(3, variant=0.5))
    check(store, model(3, variant=0.5))


def test_a_model_with_fewer_tasks_replaces_one_with_more(store: ModelStore) -> None:
    store.commit(*model(3))
    store.commit(*model(1, variant=0.5))
    check(store, model(1, variant=0.5))
    assert len(files(store.path)) == 4


def test_saving_the_same_model_again_is_harmless(store: ModelStore) -> None:
    store.commit(*model(2))
    store.commit(*model(2))
    check(store, model(2))
    store.commit(*model(3))
    check(store, model(3))


class Crash(BaseException):
    """The process ends here: no handler may rely on running."""


STAGES = ["save first", "save last", "fsync", "rename", "open", "replace"]


def sabotage(monkeypatch: pytest.MonkeyPatch, stage: str, error: BaseException) -> None:
    """Make the next commit fail at `stage`."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    if stage.startswith("save"):
        real, wanted = store_module.write_synced, "task-" if stage == "save first" else "memory"

        def save(file: Path, data: bytes) -> None:
            if wanted in file.name:
                file.write_bytes(b"half of")
                raise error
            real(file, data)

        monkeypatch.setattr(store_module, "write_synced", save)
    elif stage == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    elif stage == "open":
        monkeypatch.setattr(store_module, "replace_atomically", fail)
    else:
        monkeypatch.setattr(Path, stage, fail)


@pytest.mark.parametrize("stage", STAGES)
def test_a_crash_before_the_header_is_replaced_leaves_the_old_model(store: ModelStore, stage: str) -> None:
    store.commit(*model(1))
    store.commit(*model(2))
    before = files(store.path)
    with pytest.MonkeyPatch.context() as patch:
        sabotage(patch, stage, Crash())
        with pytest.raises(Crash):
            store.commit(*model(3))
    check(store, model(2))
    after = files(store.path)
    assert all(after[name] == before[name] for name in before)
    # Whatever the crash left behind, the next commit neither stumbles over it nor keeps it.
    store.commit(*model(3))
    check(store, model(3))
    assert len(files(store.path)) == 6
    assert not [name for name in files(store.path) if "partial" in name]


@pytest.mark.parametrize("stage", STAGES)
def test_a_crash_in_the_first_commit_leaves_no_model(store: ModelStore, stage: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        sabotage(patch, stage, Crash())
        with pytest.raises(Crash):
            store.commit(*model(1))
    assert not store.exists()
    store.commit(*model(1))
    check(store, model(1))


@pytest.mark.parametrize("stage", STAGES)
def test_a_full_disk_is_explained_and_leaves_no_trace(store: ModelStore, stage: str) -> None:
    store.commit(*model(2))
    before = files(store.path)
    text = os.strerror(errno.ENOSPC)
    # safetensors reports the system's errors as its own kind.
    wrapped = SafetensorError(f"Error while serializing: I/O error: {text} (os error {errno.ENOSPC})")
    with pytest.MonkeyPatch.context() as patch:
        sabotage(patch, stage, wrapped if stage.startswith("save") else OSError(errno.ENOSPC, text))
        with pytest.raises(StoreError, match=r"disk is full.*as it was"):
            store.commit(*model(3))
    assert files(store.path) == before
    check(store, model(2))


def test_a_write_that_the_system_cuts_short(store: ModelStore) -> None:
    resource = pytest.importorskip("resource")
    header, state, memory = model(2)
    store.commit(*model(1))
    before = files(store.path)
    state.shared["big"] = torch.zeros(1_000_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(StoreError, match="as it was"):
            store.commit(header, state, memory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(store.path) == before


def test_leftovers_that_cannot_be_deleted_do_not_call_a_commit_off(store: ModelStore) -> None:
    store.commit(*model(1))
    real = os.unlink

    def unlink(name: Any, *, dir_fd: int | None = None) -> None:
        if str(name).endswith(".safetensors"):
            raise PermissionError("not yours")
        real(name, dir_fd=dir_fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        store.commit(*model(2))
    check(store, model(2))


def test_a_new_header_that_the_disk_does_not_confirm_is_told_and_the_old_files_stay(store: ModelStore) -> None:
    store.commit(*model(1))
    old, real = files(store.path), os.fsync

    def fsync(handle: int) -> None:
        if json.loads(store.header_file.read_text(encoding="utf-8"))["commits"] == 2:
            raise OSError(errno.EIO, "no luck")
        real(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(StoreError, match="the disk does not confirm it"):
            store.commit(*model(2))
    check(store, model(2))
    for name, (_, _, content) in old.items():  # a power cut may bring the old header back: it must find its files
        if name == "model.json":
            store.header_file.write_bytes(content)
        assert (store.path / name).read_bytes() == content
    check(store, model(1))


@pytest.mark.parametrize("made", [False, True], ids=["new", "made by a writer that was killed"])
def test_a_new_directory_and_its_parents_are_synced(made: bool, tmp_path: Path) -> None:
    synced, real = [], os.fsync
    if made:
        (tmp_path / "a" / "b" / "model").mkdir(parents=True)

    def fsync(handle: int) -> None:
        synced.append(os.fstat(handle).st_ino)
        real(handle)

    deep = ModelStore(tmp_path / "a" / "b" / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with deep.writing():
            deep.commit(*model(1))
    assert {folder.stat().st_ino for folder in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")} <= set(synced)


def test_all_files_are_as_readable_as_the_user_wants_new_files_to_be(store: ModelStore) -> None:
    before = os.umask(0o027)
    try:
        with store.writing():
            store.commit(*model(1))
    finally:
        os.umask(before)
    written = [file for file in store.path.rglob("*") if file.is_file() and file.name != ".lock"]
    assert len(written) == 4 and {file.stat().st_mode & 0o777 for file in written} == {0o640}


def test_strangers_in_the_directory_do_not_disturb(store: ModelStore) -> None:
    store.commit(*model(1))
    (store.path / "tasks" / "notes.txt").write_text("mine")
    partial = store.path / "tasks" / ".007.partial"
    partial.mkdir()
    (partial / "shared.safetensors").write_bytes(b"half of")
    store.commit(*model(2))
    check(store, model(2))
    assert not partial.exists()
    assert (store.path / "tasks" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", '{"schema": 1}', '{"schema": 1, "newest": "x"}'])
def test_a_damaged_header_is_explained(store: ModelStore, content: str) -> None:
    store.commit(*model(1))
    store.header_file.write_text(content)
    with pytest.raises(StoreError, match=r"model\.json is damaged.*backup"):
        store.read()


def test_a_header_that_is_no_text_is_explained(store: ModelStore) -> None:
    store.commit(*model(1))
    store.header_file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StoreError, match="damaged"):
        store.read()


@pytest.mark.parametrize("name", ["task-0", "shared", "memory"])
def test_damaged_and_missing_tensors_are_explained(store: ModelStore, name: str) -> None:
    store.commit(*model(1))
    file = store.path / "tasks" / "000" / f"{name}.safetensors"
    whole = file.read_bytes()
    for size in (0, 4, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(StoreError, match=rf"{name}\.safetensors is damaged.*backup"):
            store.read()
    file.unlink()
    with pytest.raises(StoreError, match=rf"{name}\.safetensors is missing.*backup"):
        store.read()


def test_a_damaged_task_is_mended_by_the_next_commit(store: ModelStore) -> None:
    store.commit(*model(1))
    (store.path / "tasks" / "000" / "task-0.safetensors").write_bytes(b"half of")
    store.commit(*model(2))
    check(store, model(2))


def test_a_newer_schema_is_refused_and_not_overwritten(store: ModelStore) -> None:
    store.commit(*model(1))
    newer = json.loads(store.header_file.read_text(encoding="utf-8")) | {"schema": SCHEMA + 1}
    replace_atomically(store.header_file, json.dumps(newer))
    for act in (store.read, lambda: store.commit(*model(2))):
        with pytest.raises(StoreError, match=rf"schema {SCHEMA + 1}.*Update"):
            act()
    assert json.loads(store.header_file.read_text(encoding="utf-8")) == newer


def test_no_model_is_explained(store: ModelStore) -> None:
    with pytest.raises(StoreError, match=r"holds no model.*model\.json"):
        store.read()


def test_a_place_that_cannot_be_a_directory_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StoreError, match="file cannot be made a model directory"),
        ModelStore(tmp_path / "file").writing(),
    ):
        pass


def test_a_new_directory_without_a_model_is_removed(store: ModelStore) -> None:
    with pytest.raises(KeyboardInterrupt), store.creating():
        raise KeyboardInterrupt
    assert not store.path.exists()
    with store.creating():
        store.commit(*model(1))
    with pytest.raises(KeyboardInterrupt), store.creating():  # not new: it stays
        raise KeyboardInterrupt
    check(store, model(1))


def test_a_second_lock_is_refused(store: ModelStore) -> None:
    store.path.mkdir()
    refused = pytest.raises(StoreError, match=r"another process.*wait")
    with FileLock(store.path / ".lock"), refused, store.writing():
        pytest.fail("two writers")
    with store.writing():
        store.commit(*model(1))
    check(store, model(1))


def test_a_second_process_is_refused_until_the_first_is_done(store: ModelStore) -> None:
    store.path.mkdir()
    hold = (
        "import sys; from filelock import FileLock\n"
        "with FileLock(sys.argv[1]): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(store.path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "held"
        with pytest.raises(StoreError, match="another process"), store.writing():
            pytest.fail("two writers")
        holder.communicate("")
    with store.writing():
        pass


def test_who_holds_the_directory_may_commit_to_it(store: ModelStore) -> None:
    with store.writing():
        with ModelStore(str(store.path)).writing():
            store.commit(*model(1))
        # Leaving the inner one does not let others in.
        with pytest.raises(Exception, match="lock"):
            FileLock(store.path / ".lock").acquire(timeout=0)
    with FileLock(store.path / ".lock").acquire(timeout=0):
        check(store, model(1))


def test_the_lock_is_given_back_after_an_error(store: ModelStore) -> None:
    with pytest.raises(ZeroDivisionError), store.writing():
        raise ZeroDivisionError
    with FileLock(store.path / ".lock").acquire(timeout=0):
        pass


def test_reading_needs_no_lock(store: ModelStore) -> None:
    store.commit(*model(1))
    with FileLock(store.path / ".lock"):
        check(store, model(1))


# Checksums


def test_every_file_is_listed_with_its_checksum(store: ModelStore) -> None:
    for tasks in (1, 2, 3):
        store.commit(*model(tasks))
    stored = {k: hashlib.sha256(v[2]).hexdigest() for k, v in files(store.path).items() if k.endswith(".safetensors")}
    assert len(stored) == 5
    assert store.header()["files"] == stored


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_all_numbers_must_be_finite_but_not_their_sum(store: ModelStore, dtype: torch.dtype) -> None:
    header, state, memory = model(1)
    largest = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    store.commit(header, State(state.shared | {"largest": largest}, state.tasks), memory)
    assert torch.equal(store.read()[1].shared["largest"], largest)
    for value in (float("nan"), float("inf"), -float("inf")):
        damaged = State(state.shared | {"odd": torch.tensor([1.0, value, -value], dtype=dtype)}, state.tasks)
        with pytest.raises(StoreError, match="'odd' has numbers that are not finite"):
            store.commit(header, damaged, memory)


def test_a_large_tensor_that_has_not_changed_is_not_written_again(store: ModelStore) -> None:
    names = []
    for tasks in (1, 2, 3):
        header, state, memory = model(tasks)
        large = {"constant": torch.arange(LARGE, dtype=torch.float32), "other": torch.full((LARGE,), float(tasks))}
        store.commit(header, State(state.shared | large, state.tasks), memory)
        check(store, (header, State(state.shared | large, state.tasks), memory))
        names.append(store.header()["parts"]["shared"])
    folders = [[name.split("/")[1] for name in parts] for parts in names]
    assert folders == [["000", "000", "000"], ["001", "000", "001"], ["002", "000", "002"]]
    damaged = store.path / names[0][1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    store.commit(header, State(state.shared | large, state.tasks), memory)
    assert store.header()["parts"]["shared"][1] == "tasks/003/shared-1.safetensors"
    check(store, (header, State(state.shared | large, state.tasks), memory))


@pytest.mark.parametrize("name", ["task-0", "shared", "memory"])
def test_a_single_changed_bit_is_noticed_and_the_file_named(store: ModelStore, name: str) -> None:
    store.commit(*model(1))
    file = store.path / "tasks" / "000" / f"{name}.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # well-formed, but another number
    file.write_bytes(content)
    with pytest.raises(StoreError, match=rf"{name}\.safetensors is damaged \(its sha256.*backup"):
        store.read()


def test_a_header_that_lists_no_checksum_is_damaged(store: ModelStore) -> None:
    store.commit(*model(1))
    header = store.header()
    del header["files"]["tasks/000/shared.safetensors"]
    replace_atomically(store.header_file, json.dumps(header))
    with pytest.raises(StoreError, match=r"model\.json is damaged"):
        store.read()


def test_a_directory_of_schema_1_is_read_and_brought_up_to_date(store: ModelStore) -> None:
    store.commit(*model(2))
    early = {k: v for k, v in store.header().items() if k != "files"} | {"schema": 1}
    replace_atomically(store.header_file, json.dumps(early))
    check(store, model(2))
    store.commit(*model(3))
    check(store, model(3))
    assert store.header()["schema"] == SCHEMA
    assert len(store.header()["files"]) == 5


# Commits that change old tasks


def changed(tasks: int, task: int) -> Commit:
    """`model`, with one task updated."""
    header, state, memory = model(tasks)
    state.tasks[task] = {"w": torch.full((2, 3), 99.0), "n": torch.tensor([99])}
    return header, state, memory


def without(tasks: int, task: int) -> Commit:
    """`model`, with one task gone."""
    header, state, memory = model(tasks)
    del header["tasks"][task], state.tasks[task]
    return header, state, memory


def test_a_changed_task_is_written_anew_and_the_old_file_goes(store: ModelStore) -> None:
    for tasks in (1, 2, 3):
        store.commit(*model(tasks))
    before = files(store.path)
    store.commit(*changed(3, 1))
    check(store, changed(3, 1))
    after = files(store.path)
    assert {name for name in after if "task-" in name} == {
        "tasks/000/task-0.safetensors",
        "tasks/002/task-2.safetensors",
        "tasks/003/task-1.safetensors",
    }
    kept = ("tasks/000/task-0.safetensors", "tasks/002/task-2.safetensors")
    assert all(after[name] == before[name] for name in kept)
    old = before["tasks/001/task-1.safetensors"][2]
    assert not any(old in content for _, _, content in after.values())


def test_where_a_task_has_gone_the_others_files_stay(store: ModelStore) -> None:
    for tasks in (1, 2, 3, 4):
        store.commit(*model(tasks))
    before = files(store.path)
    store.commit(*without(4, 1))
    check(store, without(4, 1))
    after = files(store.path)
    own = {f"tasks/00{i}/task-{i}.safetensors" for i in (0, 2, 3)}
    assert {name for name in after if "task-" in name} == own
    assert all(after[name] == before[name] for name in own)
    store.commit(*model(4))  # numbers of the new commit never meet those of an old one
    check(store, model(4))


@pytest.mark.parametrize("change", [changed, without])
@pytest.mark.parametrize("stage", STAGES)
def test_a_crash_while_old_tasks_change_leaves_them(store: ModelStore, stage: str, change: Any) -> None:
    for tasks in (1, 2, 3):
        store.commit(*model(tasks))
    if stage == "save first" and change is without:
        pytest.skip("no task is written")
    before = files(store.path)
    with pytest.MonkeyPatch.context() as patch:
        sabotage(patch, stage, Crash())
        with pytest.raises(Crash):
            store.commit(*change(3, 1))
    check(store, model(3))
    assert all(files(store.path)[name] == before[name] for name in before)
    store.commit(*change(3, 1))
    check(store, change(3, 1))


# Writers, killed and alive


def test_what_a_killed_writer_left_is_swept_when_the_next_one_comes(store: ModelStore) -> None:
    store.commit(*model(1))
    wanted = set(files(store.path)) | {".lock"}
    complete = store.path / "tasks" / "001"  # renamed, but the header was not replaced any more
    half = store.path / "tasks" / ".001.partial"
    for folder in (complete, half):
        folder.mkdir()
        (folder / "shared.safetensors").write_bytes(b"left")
    (store.path / ".model.json.partial").write_text("{")
    with store.writing():
        pass
    assert set(files(store.path)) == wanted
    assert not complete.exists() and not half.exists()
    check(store, model(1))


def test_strangers_files_are_never_swept(store: ModelStore) -> None:
    mine = [store.path / "tasks" / "monday" / "x.safetensors", store.path / "tasks" / "007" / "notes.txt"]
    for file in mine:
        file.parent.mkdir(parents=True)
        file.write_text("mine")
    for tasks in (1, 2):
        with store.writing():
            store.commit(*model(tasks))
    assert [file.read_text() for file in mine] == ["mine", "mine"]


def test_the_second_writer_is_told_who_holds_the_directory(store: ModelStore) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with store.writing():
            held.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert held.wait(60)
        told = rf"another process \({os.getpid()} on {re.escape(socket.gethostname())}, since 20\d\d-.*wait"
        with pytest.raises(StoreError, match=told), store.writing():
            pytest.fail("two writers")
    finally:
        done.set()
        holder.join()
    assert not store.holder_file.exists()
    with store.writing():
        assert json.loads(store.holder_file.read_text())["pid"] == os.getpid()
        with store.writing():
            pass
        assert store.holder_file.exists()  # leaving the inner one does not sign off


def test_a_holder_that_cannot_be_read_is_another_process(store: ModelStore) -> None:
    store.path.mkdir()
    for content in ("", "[]", '{"pid": 1}'):
        store.holder_file.write_text(content)
        refused = pytest.raises(StoreError, match="by another process; wait")
        with FileLock(store.path / ".lock"), refused, store.writing():
            pytest.fail("two writers")


def test_a_disk_without_room_for_the_lock_is_explained(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FileLock, "acquire", full)
    with pytest.raises(StoreError, match="disk is full"), store.writing():
        pytest.fail("no lock")


def test_only_what_exists_is_opened_for_a_change(store: ModelStore) -> None:
    with pytest.raises(StoreError, match="holds no model"), store.existing():
        pytest.fail("nothing to change")
    assert not store.path.exists()
    store.commit(*model(1))
    with store.existing():
        store.commit(*model(2))
    check(store, model(2))


def test_waiting_images_of_a_killed_writer_are_swept(store: ModelStore) -> None:
    store.commit(*model(1))
    store.write_waiting({"n": torch.ones(1)})
    half = store.path / ".waiting.bin.partial"
    half.write_bytes(b"half")
    with store.writing():
        assert not half.exists()
    assert store.read_waiting()["n"] == 1


def test_waiting_images_are_no_link(store: ModelStore, tmp_path: Path) -> None:
    store.commit(*model(1))
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (store.path / "waiting.bin").symlink_to(precious)
    for use in (store.read_waiting, lambda: store.write_waiting({"n": torch.ones(1)}), lambda: store.write_waiting({})):
        with pytest.raises(StoreError, match="link"):
            use()
    assert precious.read_bytes() == b"precious"


@pytest.mark.parametrize(
    "content", [b"", b"x" * 31, b"x" * 32, bytes(32) + b"x" * 100, b"\xff" * 200], ids=lambda content: str(len(content))
)
def test_damaged_waiting_images_are_explained(store: ModelStore, content: bytes) -> None:
    store.commit(*model(1))
    (store.path / "waiting.bin").write_bytes(content)
    with pytest.raises(StoreError, match="Delete it to go on"):
        store.read_waiting()
    (store.path / "waiting.bin").write_bytes(hashlib.sha256(content).digest() + content)  # with the right checksum
    with pytest.raises(StoreError, match="Delete it to go on"):
        store.read_waiting()
