"""What a run says of itself while it goes on."""

from __future__ import annotations

import io

from rich.console import Console

from tpl.console import RunProgress
from tpl.engine import Event


def test_the_bar_tells_the_accuracy_of_the_table() -> None:
    """Over all images so far, not over tasks: those may have unequally many."""
    shown = io.StringIO()
    progress = RunProgress(Console(file=shown, width=120, force_terminal=True))
    with progress:
        progress(Event("run", {"method": "tpl", "images": [30, 10], "learned": 1}))
        progress(Event("stage", {"stage": 1, "cil": [0.9, 0.1], "so_far": {"last": 0.7}}))
    assert "70.0 % right after task 2 of 2" in shown.getvalue()
