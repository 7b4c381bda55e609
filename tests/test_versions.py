"""Versions of a model: every commit can be gone back to until it is pruned, and nothing is stored twice."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from test_store import STAGES, Commit, Crash, check, files, model, sabotage
from tpl.blocks import LARGE, LENGTH, from_blocks, in_blocks
from tpl.store import ModelStore, State, StoreError
from tpl.versions import about_version, change_between, history, prune, undo


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "model")


def commit(store: ModelStore, content: Commit, keep: int = 5) -> None:
    """Commit as a learner does."""
    header, state, memory = content
    old = store.header() if store.exists() else None
    store.commit(header | about_version(old, header, keep), state, memory, keep=keep)


def read(store: ModelStore, version: int, expected: Commit) -> None:
    """That a version of `store` reads as `expected`."""

    class Then(ModelStore):
        def read(self, version: int | None = version) -> Any:
            return super().read(version)

    check(Then(store.path), expected)


@pytest.fixture
def three(store: ModelStore) -> ModelStore:
    """Three versions, of one, two and three tasks."""
    for tasks in (1, 2, 3):
        commit(store, model(tasks))
    return store


def test_every_version_reads_as_it_was_committed(three: ModelStore) -> None:
    for version in (1, 2, 3):
        read(three, version, model(version))
    assert [(v.number, v.tasks, v.parent) for v in history(three.path)] == [(3, 3, 2), (2, 2, 1), (1, 1, None)]
    with pytest.raises(StoreError, match=r"no version 7: the present one is 3, and kept are 1, 2"):
        three.read(7)


def test_tasks_are_stored_once_for_all_versions(three: ModelStore) -> None:
    own = [name for name in files(three.path) if "task-" in name]
    assert own == [f"tasks/00{t}/task-{t}.safetensors" for t in range(3)]
    assert three.files() | {"model.json"} == set(files(three.path)) - {".lock"}


def test_undo_goes_back_step_by_step_and_can_be_undone(three: ModelStore) -> None:
    before = files(three.path)
    assert (undo(three.path).number, undo(three.path).same_as) == (4, 1)
    check(three, model(1))
    after = files(three.path)
    assert all(after[name] == before[name] for name in before if name.endswith(".safetensors"))
    with pytest.raises(StoreError, match="first version"):
        undo(three.path)
    assert [v.number for v in history(three.path)] == [5, 3, 2, 1]  # the fourth was the second
    assert undo(three.path, to=3).change == "back to version 3"
    check(three, model(3))
    with pytest.raises(StoreError, match="at version 6 already"):
        undo(three.path, to=6)
    undo(three.path)  # the version before the third
    check(three, model(2))


def test_what_is_learned_after_an_undo_is_a_version_of_its_own(three: ModelStore) -> None:
    undo(three.path)
    commit(three, model(3, variant=0.5))
    check(three, model(3, variant=0.5))
    read(three, 3, model(3))
    undo(three.path)
    check(three, model(2))


def test_only_so_many_are_kept(store: ModelStore) -> None:
    for tasks in (1, 2, 3, 4):
        commit(store, model(tasks), keep=2)
    assert [v.number for v in history(store.path)] == [4, 3, 2]
    assert "tasks/000/shared.safetensors" not in files(store.path)
    assert "tasks/000/task-0.safetensors" in files(store.path)  # a task of all versions
    with pytest.raises(StoreError, match="no version 1"):
        undo(store.path, to=1)


def test_pruning_frees_what_no_other_version_uses(three: ModelStore) -> None:
    def size() -> int:
        return sum(len(content) for name, (_, _, content) in files(three.path).items() if name != "model.json")

    before, freed = size(), sum(version.bytes for version in history(three.path)[1:])
    prune(three.path, 0)
    assert before - size() == freed > 0
    assert set(files(three.path)) - {".lock"} == {"model.json", *three.header()["files"]}
    assert not (three.path / "versions").exists()
    check(three, model(3))
    commit(three, model(1), keep=three.header()["keep"])
    assert [v.number for v in history(three.path)] == [4]
    with pytest.raises(StoreError, match="no version 3"):
        undo(three.path)
    with pytest.raises(StoreError, match="negative"):
        prune(three.path, -1)


def test_a_directory_without_versions_gets_them(store: ModelStore) -> None:
    store.commit(*model(1))
    early = {k: v for k, v in store.header().items() if k not in ("older", "parts")} | {"schema": 2}
    store.header_file.write_text(json.dumps(early))
    commit(store, model(2))
    read(store, 1, model(1))
    undo(store.path)
    check(store, model(1))
    commit(store, model(2))
    check(store, model(2))


@pytest.mark.parametrize("stage", STAGES)
def test_a_crash_leaves_the_model_and_its_versions(three: ModelStore, stage: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        sabotage(patch, stage, Crash())
        with pytest.raises(Crash):
            commit(three, model(4))
    check(three, model(3))
    for version in (1, 2):
        read(three, version, model(version))
    with three.writing():  # the next writer sweeps
        pass
    assert three.files() | {"model.json", ".lock"} == set(files(three.path))
    commit(three, model(4))
    read(three, 3, model(3))


@pytest.mark.parametrize("stage", ["fsync", "open", "replace"])
def test_a_crash_during_an_undo_leaves_the_old_model(three: ModelStore, stage: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        sabotage(patch, stage, Crash())
        with pytest.raises(Crash):
            undo(three.path)
    check(three, model(3))
    undo(three.path)
    check(three, model(2))


@pytest.mark.parametrize("change", [lambda path: undo(path), lambda path: prune(path, 0)], ids=["undo", "prune"])
def test_a_change_that_the_disk_does_not_confirm_is_told(three: ModelStore, change: Callable[[Path], object]) -> None:
    before, real = three.header_file.read_bytes(), os.fsync
    needed = three.files()

    def fsync(handle: int) -> None:
        if three.header_file.read_bytes() != before:
            raise OSError(errno.EIO, "no luck")
        real(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(StoreError, match="the disk does not confirm it"):
            change(three.path)
    assert all((three.path / name).exists() for name in needed)  # a power cut may bring the old header back


def test_a_full_disk_leaves_no_trace(three: ModelStore) -> None:
    with three.writing():  # makes the lock
        pass
    before = files(three.path)
    with pytest.MonkeyPatch.context() as patch:
        sabotage(patch, "fsync", OSError(28, os.strerror(28)))
        for act in (lambda: commit(three, model(4)), lambda: undo(three.path), lambda: prune(three.path, 0)):
            with pytest.raises(StoreError, match=r"disk is full.*as it was"):
                act()
    with three.writing():
        pass
    assert {name: content for name, (*_, content) in files(three.path).items()} == {
        name: content for name, (*_, content) in before.items()
    }


def test_a_version_that_cannot_be_read_is_dropped_by_the_next_commit(three: ModelStore) -> None:
    (three.path / "versions" / "1.json").write_text("{}")
    with pytest.raises(StoreError, match=r"1\.json is damaged"):
        undo(three.path, to=1)
    assert [v.number for v in history(three.path)] == [3, 2]
    commit(three, model(4))
    assert [v.number for v in history(three.path)] == [4, 3, 2]
    assert three.files() | {"model.json"} == set(files(three.path)) - {".lock"}


def test_versions_may_not_be_a_link(three: ModelStore, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (three.path / "versions").rename(victim)
    (three.path / "versions").symlink_to(victim)
    with pytest.raises(StoreError, match="link"):
        undo(three.path)
    assert sorted(f.name for f in victim.iterdir()) == ["1.json", "2.json"]


# Large tensors


def large(extra: int, seed: int = 0) -> Commit:
    """A model with a large tensor that never changes, one that does, and a memory that grows at its end."""
    header, state, _ = model(1)
    numbers = torch.Generator().manual_seed(seed)
    fixed = torch.arange(LARGE, dtype=torch.float32).reshape(4, -1)
    images = torch.arange(2 * LENGTH + extra, dtype=torch.int64).to(torch.uint8)
    shared = {"fixed": fixed, "gram": torch.rand(LARGE, generator=numbers), **state.shared}
    return header, State(shared, state.tasks), {"bytes": images, "counts": torch.tensor([extra])}


def test_large_tensors_that_stay_are_stored_once(store: ModelStore) -> None:
    commit(store, large(100))
    first = sum(len(content) for _, _, content in files(store.path).values())
    commit(store, large(200, seed=1))
    second = sum(len(content) for _, _, content in files(store.path).values())
    read(store, 1, large(100))
    read(store, 2, large(200, seed=1))
    assert second - first < 4 * LARGE + LARGE / 10  # the tensor that changed, and not the 3 MiB that did not
    assert first > 3 * LENGTH + 4 * LARGE
    prune(store.path, 0)
    check(store, large(200, seed=1))
    assert sum(len(content) for _, _, content in files(store.path).values()) < first + 1000


def test_a_damaged_file_is_not_shared(store: ModelStore) -> None:
    commit(store, large(100))
    damaged = [file for file in store.header()["parts"]["memory"] if file.endswith("memory-1.safetensors")]
    (store.path / damaged[0]).write_bytes(b"half of")
    commit(store, large(100))
    check(store, large(100))


def test_blocks_give_back_what_was_put_in() -> None:
    tensors = {
        "a": torch.rand(3, 2), "b": torch.rand(LARGE // 4), "c": torch.zeros(3 * LENGTH + 5, dtype=torch.uint8),
        "d": torch.zeros(2, LENGTH, dtype=torch.uint8), "e@f": torch.zeros(0),
    }  # fmt: skip
    blocks = in_blocks(tensors)
    assert [len(block) for block in blocks] == [2, 1, 1, 1, 1, 1, 1]
    again = from_blocks(reversed(blocks))
    assert again.keys() == tensors.keys() and all(torch.equal(again[k], tensors[k]) for k in tensors)


# Words


def header(*tasks: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"tasks": list(tasks), **more}


def task(name: str, *classes: str, images: int = 5) -> dict[str, Any]:
    return {"name": name, "learned": name, "classes": list(classes), "images": [images] * len(classes)}


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (header(task("pets", "cat", "dog"), task("birds", "hen")), "learned birds (hen)"),
        (header(task("pets", "cat", "hound")), "renamed dog to hound"),
        (header(task("pets", "cat")), "removed 1 class"),
        (header(), "removed 2 classes"),
        (header(task("pets", "cat", "dog", images=7)), "added images of cat, dog"),
        (header(task("pets", "cat", "dog"), options={"passes": "auto"}), "changed options"),
        (header(task("pets", "cat", "dog")), "saved again"),
    ],
)
def test_changes_in_words(new: dict[str, Any], words: str) -> None:
    assert change_between(header(task("pets", "cat", "dog")), new) == words
