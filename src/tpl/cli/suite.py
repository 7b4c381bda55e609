"""The command that makes the grid of runs behind a table: suite, and its status."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from tpl.cli.app import (
    Address,
    AsJson,
    Data,
    Epochs,
    HeldOut,
    Latent,
    Memory,
    PerTask,
    Rate,
    Set,
    Tasks,
    Track,
    Validation,
    Weights,
    app,
    class_orders,
    class_sizes,
    err,
    method_names,
    names,
    out,
    overrides,
    print_json,
    trackers,
)
from tpl.errors import TplError

if TYPE_CHECKING:
    from tpl.bench.suite_run import RunState

STATUS = "status"


@app.command()
def suite(
    context: typer.Context,
    file: Annotated[
        str | None, typer.Argument(metavar="FILE.toml|status", help="The grid as a file; or the word status, then DIR.")
    ] = None,
    watched: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="After status: the directory of a suite.")
    ] = None,
    methods: Annotated[str | None, typer.Option(help="Methods, joined by commas; see `tpl list`.")] = None,
    benchmarks: Annotated[str | None, typer.Option(help="Benchmarks, joined by commas; see `tpl list`.")] = None,
    orders: Annotated[str | None, typer.Option(help="Class orders, joined by commas: natural,random:1.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, joined by commas: 0,1,2.")] = None,
    encoder: Annotated[
        str | None, typer.Option(help="compact (the default), any ViT/DeiT of timm, or resnet18: from scratch.")
    ] = None,
    weights: Weights = None,
    data: Data = None,
    download: Annotated[
        bool | None, typer.Option("--download/--no-download", help="Download the data sets if they are not there.")
    ] = None,
    per_task: PerTask = None,
    tasks: Tasks = None,
    validation: Validation = None,
    held_out: HeldOut = None,
    epochs: Epochs = None,
    lr: Rate = None,
    memory: Memory = None,
    latent: Latent = None,
    set_: Set = None,
    device: Annotated[
        str | None, typer.Option(help="auto (the default: all GPUs, or else the CPU), cpu or cuda.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32 or bf16 (the trunk only).")] = None,
    compile: Annotated[str | None, typer.Option(help="auto, on or off: compile the network on a GPU.")] = None,
    directory: Annotated[
        Path | None, typer.Option("--out", help="Where the runs go; by default runs/ and the file's name.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="What carries the runs out: local, processes on this machine; ray, a cluster.")
    ] = "local",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; by default one a GPU, or one a core up to 8.")
    ] = None,
    address: Address = None,
    gpu_share: Annotated[
        float | None, typer.Option(metavar="SHARE", help="With ray: a run's part of a GPU; 0.5 puts two on each.")
    ] = None,
    track: Track = None,
    as_json: AsJson = False,
) -> None:
    """Make every run of a grid, methods x benchmarks x class orders x seeds, several at a time; print their means.

    What DIR holds already is reused, what was interrupted goes on, and what fails is named while the rest goes on: give
    the same command again. Options stand over those of the file. Exit code 0 if all finished, 1 if some failed, 130
    after Ctrl-C. Takes as long as its runs (see `tpl run`), divided by the workers, and a few seconds.

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
        raise TplError(f"A suite is one file; got {file} and {watched}. Where its runs go is --out.")
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
    }
    content = _merged(file, grid, settings, overrides(epochs, lr, memory, latent, set_))
    place = directory or Path("runs") / (Path(file).stem if file else "suite")
    _run(content, place, engine, workers, {"address": address, "gpu_share": gpu_share}, trackers(track), as_json)


def _merged(
    file: str | None, grid: dict[str, Any], settings: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """What the file says, with what the command line says put over it."""
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
    from tpl.cli.suite_view import SuiteView, counts_line

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
        err.print("Interrupted. Finished runs and tasks are safe; go on with the same command.")
        raise typer.Exit(130)
    if any(state.state != "finished" for state in states):
        raise typer.Exit(1)


def _status(place: Path | None, as_json: bool) -> None:
    """Print where the runs of a directory stand."""
    from tpl.bench.suite_run import read_states
    from tpl.cli.suite_view import counts_line, state_table

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
    """`status` only looks: an option that changes runs would do nothing."""
    for parameter in context.command.params:
        name = parameter.name or ""
        given = str(context.get_parameter_source(name)).endswith("COMMANDLINE")
        if given and name not in ("file", "watched", "as_json"):
            raise TplError(f"tpl suite status DIR takes no {parameter.opts[0]}; it only looks.")


def _groups(states: Sequence[RunState]) -> dict[str, dict[str, list[Any]]]:
    """Finished runs by benchmark and method."""
    found: dict[str, dict[str, list[Any]]] = {}
    for state in states:
        if state.result is not None:
            found.setdefault(state.benchmark, {}).setdefault(state.method, []).append(state.result)
    return found


def _tables(states: Sequence[RunState]) -> dict[str, list[dict[str, Any]]]:
    """For every benchmark the means over class orders and seeds, a row a method."""
    groups = _groups(states)
    if not groups:
        return {}  # nothing to wait for: after Ctrl-C, not even for an import
    from tpl.report import mean_rows

    return {benchmark: mean_rows(of, "joint" if "joint" in of else None) for benchmark, of in groups.items()}


def _table_rows(states: Sequence[RunState]) -> list[dict[str, Any]]:
    return [{"benchmark": benchmark} | row for benchmark, rows in _tables(states).items() for row in rows]


def _print_tables(states: Sequence[RunState]) -> None:
    """One table a benchmark; a method of which not all runs are finished says so."""
    for benchmark, rows in _tables(states).items():
        from tpl.report import rich_table

        for row in rows:
            asked = sum(s.method == row["name"] and s.benchmark == benchmark for s in states)
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
