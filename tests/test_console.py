"""What a run says of itself while it goes on."""

from __future__ import annotations

import io
import os
import pty
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tpl.console import RunProgress, WorkProgress, run_progress, shares_stdout, work_progress
from tpl.engine import Event, RunLabel
from tpl.lines import ProgressLines


def test_the_bar_tells_the_accuracy_of_the_table() -> None:
    """Over all images so far, not over tasks: those may have unequally many."""
    shown = io.StringIO()
    progress = RunProgress(Console(file=shown, width=120, force_terminal=True))
    with progress:
        progress(Event("run", {"method": "tpl", "images": [30, 10], "learned": 1}))
        progress(Event("stage", {"stage": 1, "cil": [0.9, 0.1], "so_far": {"last": 0.7}}))
    assert "70.0 % right after task 2 of 2" in shown.getvalue()


def test_a_bar_follows_one_of_the_runs_side_by_side() -> None:
    shown = io.StringIO()
    first, second, later = (RunLabel(name, number, 3) for number, name in enumerate(("one", "two", "three")))
    with RunProgress(Console(file=shown, width=120, force_terminal=True)) as progress:
        for run in (first, second):
            progress(Event("run", {"method": run.name, "images": [10], "learned": 0}, run))
        for run, last in ((first, 0.1), (second, 0.2)):
            progress(Event("stage", {"stage": 0, "so_far": {"last": last}}, run))
        progress(Event("warning", {"text": "no room"}, second))
        assert len(progress.progress.tasks) == 1
        progress(Event("run", {"method": "three", "images": [10], "learned": 0}, later))
        assert [bar.description for bar in progress.progress.tasks] == ["one", "three"]
    assert "10.0 % right" in shown.getvalue() and "20.0 % right" not in shown.getvalue()
    assert "no room" in shown.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_there_are_bars_on_a_terminal_and_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Console(file=Terminal())
    assert isinstance(run_progress(terminal), RunProgress) and isinstance(work_progress(terminal), WorkProgress)
    log = Console(file=io.StringIO())
    assert isinstance(run_progress(log, as_json=True), ProgressLines)
    assert isinstance(work_progress(log, as_json=True), ProgressLines)
    assert isinstance(work_progress(log, quiet=True), WorkProgress)  # which draws nothing there
    assert isinstance(run_progress(Console(file=io.StringIO(), force_terminal=True)), ProgressLines)  # as FORCE_COLOR
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(run_progress(terminal), ProgressLines)


def test_no_line_is_written_into_a_file_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "both").open("w") as out, open(os.dup(out.fileno()), "w") as same:
        monkeypatch.setattr(sys, "stdout", out)
        assert shares_stdout(Console(file=same))
        assert isinstance(run_progress(Console(file=same), as_json=True), RunProgress)
        assert isinstance(work_progress(Console(file=same), as_json=True), WorkProgress)
        assert isinstance(run_progress(Console(file=same)), ProgressLines)
        with (tmp_path / "log").open("w") as log:
            assert not shares_stdout(Console(file=log))
            assert isinstance(run_progress(Console(file=log), as_json=True), ProgressLines)


def test_a_terminal_for_answers_and_progress_is_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    try:
        with open(slave, "w") as terminal:
            monkeypatch.setattr(sys, "stdout", terminal)
            assert shares_stdout(Console(file=terminal))
            assert not shares_stdout(Console(file=io.StringIO()))
    finally:
        os.close(master)
