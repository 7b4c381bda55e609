"""Short forms of the torture programme, which `make torture` runs at length; attackers are shown to find faults."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from torture import (
    faults,
    flips,
    fuzz_archives,
    fuzz_images,
    fuzz_models,
    fuzz_requests,
    fuzz_runs,
    interleaved,
    kills,
    power_loss,
)
from torture.__main__ import PARTS
from torture.tally import Tally
from tpl import files, store

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists() or not hasattr(os, "fork"), reason="needs Linux")

Part = Callable[[int, int, Path], Tally]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("part", "cases"),
    [
        (power_loss.run, 250),
        (interleaved.run, 6),
        (flips.run, 120),
        (partial(faults.run, methods=("tpl",)), 40),
        (kills.run, 8),
        (partial(fuzz_models.run, methods=("tpl",)), 25),
        (fuzz_images.run, 200),
        (fuzz_archives.run, 40),
        (fuzz_requests.run, 25),
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


def test_every_part_is_where_the_programme_looks_for_it() -> None:
    from importlib import import_module

    for part in PARTS.values():
        assert callable(getattr(import_module(f"torture.{part.module}"), part.function))
