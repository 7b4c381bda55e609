"""What a person sees while a suite works: every run's state, task, epoch and time left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tpl.console import writes_lines
from tpl.lines import ProgressLines, duration

if TYPE_CHECKING:
    from tpl.bench.engines import JobEvent
    from tpl.bench.suite_state import RunState
    from tpl.engine import RunLabel

STYLES = {"finished": "green", "running": "bold", "failed": "red", "interrupted": "yellow", "waiting": "dim"}
# In a terminal that is too low for all, these are shown first.
FIRST = ("running", "failed", "interrupted", "waiting", "finished")


class SuiteView:
    """Draws all runs on a terminal; elsewhere, such as in a log, there are lines."""

    def __init__(self, console: Console, states: Sequence[RunState], slots: int, as_json: bool = False) -> None:
        self.console, self.states, self.slots, self.as_json = console, states, slots, as_json
        self.live: Live | None = None
        self.lines: ProgressLines | None = None
        if writes_lines(console, as_json):
            self.lines = ProgressLines(console, left=lambda: seconds_left(states, slots, time.time()))
        elif not as_json:
            self.live = Live(get_renderable=self.draw, console=console, refresh_per_second=2, transient=True)

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def __call__(self, state: RunState, event: JobEvent) -> None:
        """Say what has to be said; the picture follows the states by itself."""
        if self.lines is not None:
            last = {"last": state.result.summary["last"]} if state.result else {}
            self.lines.handle(event.kind, event.data | last, self.label(state))
            return
        text = ""
        if event.kind == "warning":  # on stderr: --json or not
            text = f"[yellow]warning:[/] {escape(state.label)}: {escape(event.data['text'])}"
        elif event.kind == "retried":
            text = f"[yellow]once more:[/] {escape(state.label)}: {escape(event.data['error'])}"
        elif event.kind == "failed" and not self.as_json:
            text = f"[red]failed:[/] {escape(state.label)}: {escape(event.data['error'])}"
        if text:
            self.console.print(text, soft_wrap=True, highlight=False)

    def label(self, state: RunState) -> RunLabel:
        """What lines call a run."""
        from tpl.engine import RunLabel  # with torch, which `tpl suite status` does without

        number = next(number for number, other in enumerate(self.states) if other is state)
        return RunLabel(state.label, number, len(self.states))

    def draw(self) -> Group:
        """The picture of this moment."""
        now = time.time()
        head = counts_line(self.states)
        left = seconds_left(self.states, self.slots, now)
        if left is not None:
            head += f"; about {duration(left)} left"
        room = max(3, self.console.height - 5)
        chosen = sorted(range(len(self.states)), key=lambda i: (FIRST.index(self.states[i].state), i))[:room]
        table = state_table([self.states[i] for i in sorted(chosen)], now)
        more = len(self.states) - len(chosen)
        return Group(Text(head), table, Text(f"... and {more} more" if more else "", style="dim"))


def counts_line(states: Sequence[RunState]) -> str:
    """How many runs are where."""
    counts = Counter(state.state for state in states)
    named = [f"{counts[name]} {name}" for name in ("finished", "running", "waiting", "interrupted", "failed")]
    return f"{len(states)} runs: " + ", ".join(text for text in named if not text.startswith("0 "))


def state_table(states: Sequence[RunState], now: float) -> Table:
    """One line a run."""
    table = Table("method", "benchmark", "order", "seed", "state", "", box=None, header_style="bold")
    table.add_column("left", justify="right")
    for state in states:
        what, left = "", ""
        if state.state == "running":
            what = state.doing() + (" (second attempt)" if state.attempt > 1 else "")
            seconds = state.seconds_left(now)
            left = "" if seconds is None else duration(seconds)
        elif state.result is not None:
            what = f"Last {100 * state.result.summary['last']:.2f} %" + (", reused" if state.reused else "")
        elif state.state == "interrupted" and state.images:
            what = f"{state.task} of {len(state.images)} tasks are safe"
        elif state.error:
            what = state.error
        cells = (state.method, state.benchmark, state.order, str(state.seed))
        style = STYLES[state.state]
        table.add_row(*map(escape, cells), Text(state.state, style=style), Text(what, overflow="ellipsis"), left)
    return table


def seconds_left(states: Sequence[RunState], slots: int, now: float) -> float | None:
    """Until all is done: as long as the runs so far have taken, divided among those that work at a time."""
    running = [state for state in states if state.state == "running"]
    rests = {id(state): state.seconds_left(now) for state in running}
    known = {key: rest for key, rest in rests.items() if rest is not None}
    whole = [now - state.since + known[id(state)] for state in running if id(state) in known]
    whole += [s.result.summary["seconds"] for s in states if s.result is not None and not s.reused]
    waiting = sum(state.state == "waiting" for state in states) + len(running) - len(known)
    if not whole or not (known or waiting):
        return None
    one = sum(whole) / len(whole)
    return max([*known.values(), (sum(known.values()) + waiting * one) / slots])
