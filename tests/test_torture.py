"""Short forms of the torture programme, which `make torture` runs at length; attackers are shown to find faults."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common_checks import threads
from torture import (
    faults,
    flips,
    fuzz_archives,
    fuzz_images,
    fuzz_label_studio,
    fuzz_models,
    fuzz_requests,
    fuzz_runs,
    fuzz_stores,
    interleaved,
    kills,
    power_loss,
)
from torture.__main__ import PARTS
from torture.tally import Tally
from tpl import files, store

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists() or not hasattr(os, "fork"), reason="needs Linux")

Part = Callable[[int, int, Path], Tally]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A copy of this process, made by fork, would wait for ever for torch's other threads."""
    with threads(1):
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("part", "cases"),
    [
        (power_loss.run, 250),
        (interleaved.run, 6),
        (flips.run, 120),
        (partial(faults.run, methods=("tpl",)), 30),
        (kills.run, 8),
        (partial(fuzz_models.run, methods=("tpl",)), 25),
        (fuzz_images.run, 200),
        (fuzz_archives.run, 40),
        (fuzz_stores.run_headers, 100),
        (fuzz_stores.run_tensors, 100),
        (fuzz_stores.run_waiting, 5),
        (fuzz_requests.run, 40),
        (fuzz_label_studio.run, 40),
        (fuzz_runs.run, 12),
        (fuzz_runs.run_suites, 30),
    ],
    ids=lambda value: getattr(value, "func", value).__module__.rpartition(".")[2] if callable(value) else None,
)
def test_no_promise_is_broken(part: Part, cases: int, tmp_path: Path) -> None:
    found = part(7, cases, tmp_path)
    assert found.failures == []
    assert found.cases == cases and f"seed 7, {cases} cases" in found.line()


def test_power_cuts_find_a_commit_that_syncs_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (store, files):
        monkeypatch.setattr(module, "sync_folder", lambda folder: None)
    assert power_loss.run(7, 200, tmp_path).failures


def test_flips_find_a_header_without_a_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class AnySeal(str):
        def __ne__(self, other: object) -> bool:
            return False

    monkeypatch.setattr(store, "seal_of", lambda header: AnySeal("0" * 64))
    assert flips.run(7, 120, tmp_path).failures


def test_interleavings_find_a_missing_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoLock:
        lock_counter = 1

        def __init__(self, *_: Any, **__: Any) -> None: ...
        def acquire(self, **_: Any) -> None: ...
        def release(self) -> None: ...

    monkeypatch.setattr(store, "FileLock", NoLock)
    assert interleaved.run(7, 6, tmp_path).failures


def test_faults_find_an_undo_whose_sync_fails_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.ModelStore, "_confirm", store.ModelStore._delete_unused)
    found = faults.run(7, 120, tmp_path, methods=("closed-form",), command="undo")
    assert any("failed in silence" in failure for failure in found.failures)


def test_kills_find_a_writer_that_is_not_cleared_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "METHODS", {"closed-form": ("rename",)})
    monkeypatch.setattr(store.ModelStore, "_delete_unused", lambda self: None)
    assert kills.run(7, 30, tmp_path).failures


def test_the_long_form_reaches_what_it_promises() -> None:
    killed = sum(PARTS[name].long for name in ("kills", "instants", "runs-killed"))
    fuzzed = sum(part.long for part in PARTS.values() if part.module.startswith("fuzz") or part.module == "flips")
    assert killed >= 10_000 and fuzzed >= 1_000_000 and PARTS["interleaved"].long >= 10_000


def test_every_part_is_where_the_programme_looks_for_it() -> None:
    from importlib import import_module

    for part in PARTS.values():
        assert callable(getattr(import_module(f"torture.{part.module}"), part.function))
