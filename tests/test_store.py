"""The model directory: a commit happens wholly or not at all, whatever goes wrong."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors import SafetensorError
from torch import Tensor

from tpl import store as store_module
from tpl.methods.base import State
from tpl.store import SCHEMA, ModelStore, StoreError, replace_text

Commit = tuple[dict[str, Any], State, dict[str, Tensor]]


def model(tasks: int, variant: float = 0.0) -> Commit:
    """A model of `tasks` tasks; `variant` tells two trainings on the same classes apart."""
    header = {"method": "tpl", "seed": 1, "tasks": [{"classes": [f"ä{t}", f"b{t}"]} for t in range(tasks)]}
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
        real, wanted = store_module.save_file, "task-" if stage == "save first" else "memory"

        def save(tensors: dict[str, Tensor], file: Path) -> None:
            if wanted in file.name:
                file.write_bytes(b"half of")
                raise error
            real(tensors, file)

        monkeypatch.setattr(store_module, "save_file", save)
    elif stage == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    elif stage == "open":
        monkeypatch.setattr(store_module, "replace_text", fail)
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


def test_nothing_after_the_replacement_calls_the_commit_off(store: ModelStore) -> None:
    store.commit(*model(1))
    real, replaced = os.fsync, []

    def fsync(handle: int) -> None:
        if json.loads(store.header_file.read_text(encoding="utf-8"))["commits"] == 2:
            replaced.append(handle)
            raise OSError(errno.EIO, "no luck")
        real(handle)

    def unlink(*_: Any, **__: Any) -> None:
        raise PermissionError("not yours")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(Path, "unlink", unlink)
        store.commit(*model(2))
    assert replaced
    check(store, model(2))


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
    replace_text(store.header_file, json.dumps(newer))
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
