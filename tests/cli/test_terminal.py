"""What a stranger named: shown on a terminal, never obeyed by it; refused where it could not be stored."""

from __future__ import annotations

import importlib
import io
import sys

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from small_encoder import SMALL_VIT
from tpl import Learner, TplError
from tpl.cli.app import _Visible, err, out
from tpl.learner import MAX_NAME, check_stored_names

HOSTILE = "cat\x1b]0;owned\x07\x9b2J"


def test_names_cannot_command_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table("class", box=None)
    table.add_row(HOSTILE)
    for console in (out, err):
        written = io.StringIO()
        monkeypatch.setattr(console, "_file", written)
        console.print(f"[bold]{HOSTILE}[/]", table, soft_wrap=True)
        assert written.getvalue().count("cat") == 2 and "\\x1b]0;owned\\x9b2J" in written.getvalue()
        assert not {"\x1b", "\x07", "\x9b"} & set(written.getvalue())


def test_colours_and_lines_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    coloured.push_render_hook(_Visible())
    coloured.print("[red]a[/]\nb")
    assert coloured.file.getvalue() == "\x1b[31ma\x1b[0m\nb\n"  # type: ignore[attr-defined]


def test_csv_on_a_terminal_is_shown_and_in_a_file_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (True, False):
        written = io.StringIO()
        written.isatty = lambda terminal=terminal: terminal  # type: ignore[method-assign, misc]
        monkeypatch.setattr(sys, "stdout", written)
        importlib.import_module("tpl.cli.predict")._write(f"a.png,{HOSTILE}\n")
        assert (written.getvalue() == f"a.png,{HOSTILE}\n") is not terminal
        assert written.getvalue().endswith("\n")


@pytest.mark.parametrize("name", ["", " ", "x" * (MAX_NAME + 1), b"caf\xe9".decode(errors="surrogateescape")])
def test_names_that_cannot_be_stored_are_refused_before_training(name: str) -> None:
    with pytest.raises(TplError, match=r"has more than|is no text|is empty"):
        check_stored_names("class", [name])
    learner = Learner("tpl", SMALL_VIT, device="cpu", epochs=1)
    images = list(np.zeros((4, 32, 32, 3), dtype=np.uint8))
    with pytest.raises(TplError, match=r"has more than|is no text|is empty"):
        learner.learn(images, [name, "b"] * 2)
    assert learner.classes_ == []
