"""A server replaces its model whenever a task is learned: the memory of the old one goes back to the system."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tpl.serve import model as served
from tpl.serve.model import CurrentModel, ModelSource
from tpl.store import ModelStore

RELOADS = 15


def mebibytes() -> float:
    """Memory in use by this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


@pytest.mark.skipif(not sys.platform.startswith("linux") or served._trim is None, reason="needs glibc")
def test_replaced_models_leave_nothing_behind(learned: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(learned, tmp_path / "model"))
    current = CurrentModel(ModelSource(path, "cpu"))
    sizes = []
    for _ in range(RELOADS):
        text = ModelStore(path).header_file.read_bytes()
        (path / "again").write_bytes(text)
        (path / "again").replace(path / "model.json")  # as a commit does
        before = current.current
        assert current.refresh() is not before
        sizes.append(mebibytes())
    assert sizes[-1] - sizes[4] < 1.5 * (RELOADS - 5)  # without care, about three MiB a model
