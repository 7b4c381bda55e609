"""The command that makes the grid of runs behind a table: suite; its status, and its display while it runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tpl.cli.app import EXPERIMENTS, app, err, out, print_json
from tpl.cli.options import (
    ADVANCED,
    DATA,
    OUTPUT,
    AcceptContaminated,
    Address,
    AsJson,
    CompileOrNone,
    Data,
    Encoder,
    Epochs,
    HeldOut,
    Memory,
    PerTask,
    PrecisionOrNone,
    Rate,
    Set,
    Tasks,
    Track,
    Validation,
    Weights,
    class_orders,
    class_sizes,
    method_names,
    names,
    overrides,
    trackers,
)
from tpl.errors import TplError
from tpl.lines import ProgressLines, duration

if TYPE_CHECKING:
    from tpl.bench.engines import JobEvent
    from tpl.bench.results import RunResult
    from tpl.bench.suite_run import RunState
    from tpl.engine import RunLabel

STATUS = "status"
STYLES = {"finished": "green", "running": "bold", "failed": "red", "interrupted": "yellow", "waiting": "dim"}
# Shown first in a terminal with too few lines for all runs.
FIRST = ("running", "failed", "interrupted", "waiting", "finished")


@app.command(rich_help_panel=EXPERIMENTS)
def suite(
    context: typer.Context,
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE.toml|status", help="The grid as a TOML file; or the word status, then DIR."),
    ] = None,
    watched: Annotated[Path | None, typer.Argument(metavar="DIR", help="After status: a suite's directory.")] = None,
    methods: Annotated[str | None, typer.Option(help="Methods, separated by commas; see `tpl list`.")] = None,
    benchmarks: Annotated[str | None, typer.Option(help="Benchmarks, separated by commas; see `tpl list`.")] = None,
    orders: Annotated[str | None, typer.Option(help="Class orders, separated by commas: natural,random:1.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Random seeds, separated by commas: 0,1,2.")] = None,
    encoder: Encoder = None,
    data: Data = None,
    download: Annotated[
        bool | None,
        typer.Option(
            "--download/--no-download", help="Download the data sets if they are missing.", rich_help_panel=DATA
        ),
    ] = None,
    per_task: PerTask = None,
    tasks: Tasks = None,
    validation: Validation = None,
    epochs: Epochs = None,
    lr: Rate = None,
    memory: Memory = None,
    set_: Set = None,
    held_out: HeldOut = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--out", help="The folder for the runs; by default runs/ and the file's name.", rich_help_panel=OUTPUT
        ),
    ] = None,
    track: Track = None,
    engine: Annotated[
        str,
        typer.Option(
            help="Where runs are computed: local (this machine) or ray (a cluster).", rich_help_panel=ADVANCED
        ),
    ] = "local",
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Runs at the same time; by default one per GPU, or one per core up to 8.",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    address: Address = None,
    gpu_share: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="With --engine ray: the share of a GPU that a run gets; 0.5 puts two runs on each.",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    weights: Weights = None,
    accept_contaminated_encoder: AcceptContaminated = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="auto (default: all GPUs, or the CPU if there are none), cpu or cuda.", rich_help_panel=ADVANCED
        ),
    ] = None,
    precision: PrecisionOrNone = None,
    compile: CompileOrNone = None,
    as_json: AsJson = False,
) -> None:
    """Make all runs of a grid, methods x benchmarks x class orders x seeds, several at a time; print their means.

    Finished runs in the folder are reused and interrupted ones continued; a failed run is named while the others go on.
    Give the same command again to continue. Options replace those of the file. Exit code 0 if all runs finished, 1 if
    some failed, 130 after Ctrl-C. Takes as long as its runs (see `tpl run`), divided by the workers, and a few seconds.

    Examples:

    `tpl suite recipes/suite-digits.toml`

    `tpl suite --methods tpl,hat --benchmarks digits-5t --orders natural,random:1 --seeds 0,1 --out runs/table`

    `tpl suite recipes/suite-cifar100.toml --data cifar100/ --methods tpl`

    `tpl suite recipes/suite-cifar100.toml --data /data/cifar100 --engine ray --address 10.0.0.1:6379 --gpu-share 0.5`

    `tpl suite status runs/table`
    """
    if file == STATUS:
        _refuse_options(context)
        _status(watched, as_json)
        return
    if watched is not None:
        raise TplError(f"A suite is one file; got {file} and {watched}. The folder for its runs is --out.")
    grid = {
        "methods": None if methods is None else method_names(methods),
        "benchmarks": None if benchmarks is None else names(benchmarks, "Benchmarks", "digits-5t,c100-10t"),
        "orders": None if orders is None else class_orders(orders),
        "seeds": None if seeds is None else _seeds(seeds),
    }
    settings = {
        "encoder": encoder,
        "weights": weights and str(weights),
        "data": data and str(data),
        "download": download,
        "per_task": class_sizes(per_task),
        "tasks": tasks,
        "validation": validation,
        "held_out": held_out,
        "device": device,
        "precision": precision,
        "compile": compile,
        "accept_contaminated_encoder": accept_contaminated_encoder or None,
    }
    content = _merged(file, grid, settings, overrides(epochs, lr, memory, set_))
    place = directory or Path("runs") / (Path(file).stem if file else "suite")
    _run(content, place, engine, workers, {"address": address, "gpu_share": gpu_share}, trackers(track), as_json)


def _merged(
    file: str | None, grid: dict[str, Any], settings: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """The settings of the file, replaced by those of the command line."""
    from tpl.bench.suite import over, read_suite

    if file is None and grid["methods"] is None:
        raise TplError("Name a suite file, or --methods and --benchmarks; `tpl suite --help` has examples.")
    return over(read_suite(Path(file)) if file else {}, grid, settings, options)


def _run(
    content: dict[str, Any],
    place: Path,
    engine_name: str,
    workers: int | None,
    engine_options: dict[str, Any],
    track: list[str],
    as_json: bool,
) -> None:
    from tpl.bench.suite import check_suite

    checked = check_suite(content)
    from tpl.bench.engines import create_engine
    from tpl.bench.suite_run import SuiteRun
    from tpl.bench.trackers import check_trackers

    check_trackers(track)
    engine = create_engine(engine_name, checked.device, workers, **engine_options)
    run = SuiteRun(checked, place, track)
    with run.open() as states:
        slots = engine.slots(sum(not state.reused for state in states))
        with SuiteView(err, states, slots, as_json) as view:
            run.carry_out(engine, view)
    if as_json:
        print_json(run.report() | {"engine": engine_name, "workers": slots, "table": _table_rows(states)})
    else:
        _print_tables(states)
        reused = sum(state.reused for state in states)
        out.print(counts_line(states) + (f", {reused} of them reused" if reused else ""), highlight=False)
        _print_failures(states)
        out.print(f"Runs: [bold]{escape(str(place))}[/]", soft_wrap=True)
    if run.interrupted:
        err.print("Interrupted. Finished runs and tasks are stored; continue with the same command.")
        raise typer.Exit(130)
    if any(state.state != "finished" for state in states):
        raise typer.Exit(1)


def _status(place: Path | None, as_json: bool) -> None:
    """Print the state of all runs of a directory."""
    from tpl.bench.suite_run import read_states

    if place is None:
        raise TplError("Name the directory of a suite: tpl suite status DIR.")
    states, now = read_states(place), time.time()
    if as_json:
        runs = [state.to_dict() | state.progress(now) for state in states]
        print_json({"directory": str(place), "runs": runs, "table": _table_rows(states)})
        return
    out.print(state_table(states, now))
    _print_tables(states)
    out.print(counts_line(states), highlight=False)


def _refuse_options(context: typer.Context) -> None:
    """Refuse options after `status`: it runs nothing, so they would have no effect."""
    for parameter in context.command.params:
        name = parameter.name or ""
        given = str(context.get_parameter_source(name)).endswith("COMMANDLINE")
        if given and name not in ("file", "watched", "as_json"):
            raise TplError(f"tpl suite status DIR takes no {parameter.opts[0]}; it runs nothing.")


def _tables(states: Sequence[RunState]) -> dict[str, list[dict[str, Any]]]:
    """For every benchmark, one row per method: its means over class orders and seeds."""
    finished = [(state.benchmark, state.result) for state in states if state.result is not None]
    if not finished:
        return {}  # without an import, which would take time after Ctrl-C
    from tpl.bench.bounds import is_bound
    from tpl.report import mean_rows, method_label

    groups: dict[str, dict[str, list[RunResult]]] = {}
    for benchmark, result in finished:
        groups.setdefault(benchmark, {}).setdefault(method_label(result.description), []).append(result)
    bounds = [(benchmark, result) for benchmark, result in finished if is_bound(result.description)]
    return {
        benchmark: mean_rows(of, [bound for elsewhere, bound in bounds if elsewhere != benchmark])
        for benchmark, of in groups.items()
    }


def _table_rows(states: Sequence[RunState]) -> list[dict[str, Any]]:
    return [{"benchmark": benchmark} | row for benchmark, rows in _tables(states).items() for row in rows]


def _print_tables(states: Sequence[RunState]) -> None:
    """Print one table per benchmark; a method with unfinished runs is marked."""
    for benchmark, rows in _tables(states).items():
        from tpl.report import rich_table

        for row in rows:
            asked = sum(s.method == row["method"] and s.benchmark == benchmark for s in states)
            row["name"] += "" if row["runs"] == asked else f" ({row['runs']} of {asked} runs)"
        most = max(row["runs"] for row in rows)
        title = f"{benchmark}, mean ± deviation over {most} runs" if most > 1 else benchmark
        out.print(rich_table(rows, title=title, width=out.width))


def _print_failures(states: Sequence[RunState]) -> None:
    for state in states:
        if state.state == "failed":
            out.print(f"[red]failed:[/] {escape(state.label)}: {escape(state.error or '')}", soft_wrap=True)


def _seeds(text: str) -> list[int]:
    found = names(text, "Seeds", "0,1,2")
    if not all(seed.isdecimal() for seed in found):
        raise TplError(f"--seeds takes whole numbers joined by commas, such as 0,1,2; got '{text}'.")
    return [int(seed) for seed in found]


class SuiteView:
    """Shows all runs of a suite: a live table on a terminal, lines elsewhere, such as in a log."""

    def __init__(self, console: Console, states: Sequence[RunState], slots: int, as_json: bool = False) -> None:
        self.console, self.states, self.slots, self.as_json = console, states, slots, as_json
        self.live: Live | None = None
        self.lines: ProgressLines | None = None
        from tpl.console import writes_lines

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
        """Print an event where it matters; the live table follows the states by itself."""
        if self.lines is not None:
            last = {"last": state.result.summary["last"]} if state.result else {}
            self.lines.handle(event.kind, event.data | last, self.label(state))
            return
        text = ""
        if event.kind == "warning":  # on stderr: --json or not
            text = f"[yellow]warning:[/] {escape(state.label)}: {escape(event.data['text'])}"
        elif event.kind == "retried":
            text = f"[yellow]retrying:[/] {escape(state.label)}: {escape(event.data['error'])}"
        elif event.kind == "failed" and not self.as_json:
            text = f"[red]failed:[/] {escape(state.label)}: {escape(event.data['error'])}"
        if text:
            self.console.print(text, soft_wrap=True, highlight=False)

    def label(self, state: RunState) -> RunLabel:
        """The name and number of a run, for lines."""
        from tpl.engine import RunLabel  # here: it imports torch, which `tpl suite status` does not need

        number = next(number for number, other in enumerate(self.states) if other is state)
        return RunLabel(state.label, number, len(self.states))

    def draw(self) -> Group:
        """The table of the runs as they are now."""
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
    """How many runs are in each state."""
    counts = Counter(state.state for state in states)
    named = [f"{counts[name]} {name}" for name in ("finished", "running", "waiting", "interrupted", "failed")]
    return f"{len(states)} runs: " + ", ".join(text for text in named if not text.startswith("0 "))


def state_table(states: Sequence[RunState], now: float) -> Table:
    """A table with one line per run."""
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
            what = f"{state.task} of {len(state.images)} tasks are stored"
        elif state.error:
            what = state.error
        cells = (state.method, state.benchmark, state.order, str(state.seed))
        style = STYLES[state.state]
        table.add_row(*map(escape, cells), Text(state.state, style=style), Text(what, overflow="ellipsis"), left)
    return table


def seconds_left(states: Sequence[RunState], slots: int, now: float) -> float | None:
    """The time until all runs are finished, from those so far and the number that run at a time."""
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
