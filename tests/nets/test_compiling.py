"""Functions are compiled when they are first called, by a compiler that may be imported ahead."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tpl.nets import Compiled, compiling, import_compiler_ahead


def test_a_function_is_compiled_once_and_not_before_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool | None] = []

    def doubled(function: Callable[..., Any], dynamic: bool | None) -> Callable[..., Any]:
        made.append(dynamic)
        return lambda *given: 2 * function(*given)

    limits = SimpleNamespace(recompile_limit=8)
    monkeypatch.setattr(torch, "compile", doubled)
    monkeypatch.setattr(torch, "_dynamo", SimpleNamespace(config=limits), raising=False)
    monkeypatch.setattr(compiling, "MODULES", ())  # it takes seconds
    double, free = Compiled(lambda x: x), Compiled(lambda x: x, dynamic=None)
    assert not made
    assert [double(1), double(2), free(3)] == [2, 4, 6]
    assert made == [False, None]
    assert limits.recompile_limit == compiling.SHAPES


def test_the_compiler_is_imported_beside_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MODULES", ("this_is_no_module", "colorsys"))
    with pytest.raises(ModuleNotFoundError, match="this_is_no_module"):
        compiling.import_compiler()
    monkeypatch.setattr(compiling, "MODULES", ("colorsys",))
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    import_compiler_ahead()
    compiling.import_compiler()  # waits for the thread, or is first
    assert "colorsys" in sys.modules
    for thread in threading.enumerate():
        if thread.name == "compiler":
            thread.join()
