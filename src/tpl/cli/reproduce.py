"""The command that compares this program with the paper: reproduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from tpl.cli.app import (
    AsJson,
    Data,
    Device,
    Download,
    Epochs,
    Latent,
    Memory,
    Precision,
    Rate,
    Seed,
    Set,
    app,
    class_orders,
    err,
    overrides,
)
from tpl.errors import TplError

if TYPE_CHECKING:
    from tpl.bench.paper import Row
    from tpl.bench.paper.judge import Judgement
    from tpl.bench.reproduce import Settings


@app.command()
def reproduce(
    rows: Annotated[
        list[str] | None, typer.Argument(metavar="ROW", help="Rows of the paper: names, prefixes or globs.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List rows and whether this program can run them.")] = False,
    evidence: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Judge the runs in DIR; nothing is run.")
    ] = None,
    data: Data = None,
    download: Download = False,
    weights: Annotated[
        Path | None, typer.Option(help="Encoder weights: a file, or a folder with ENCODER.safetensors.")
    ] = None,
    orders: Annotated[
        str | None,
        typer.Option(help="Class orders, joined by commas. By default natural,random:1,random:2; with --from all."),
    ] = None,
    seed: Seed = 0,
    epochs: Epochs = None,
    lr: Rate = None,
    memory: Memory = None,
    latent: Latent = None,
    set_: Set = None,
    device: Device = "auto",
    precision: Precision = "auto",
    directory: Annotated[
        Path, typer.Option("--out", help="Where the runs go; those finished there are not repeated.")
    ] = Path("runs/reproduce"),
    tolerance: Annotated[float, typer.Option(min=0, help="Points that ours may be worse than the paper's.")] = 0.5,
    as_json: AsJson = False,
) -> None:
    """Run what a row of the paper needs, or read finished runs, and compare. Exit code 1 unless every row is reached.

    A row is a table, a line and a benchmark. With --from, overrides such as --epochs choose among the runs found.
    Comparing finished runs takes a second; making them takes as long as `tpl run` does, once per class order.

    Examples:

    `tpl reproduce --list encoders`

    `tpl reproduce --from results 'encoders/*tiny/c100*'`

    `tpl reproduce encoders/vit-tiny/c100-10t --data cifar100/`
    """
    from tpl.bench.paper import find_rows

    if not rows and not listing:
        raise TplError("Name a row of the paper, such as encoders/vit-tiny/c100-10t; `tpl reproduce --list` shows all.")
    found = find_rows(rows or ["*"])
    if listing:
        from tpl.cli.verdicts import print_list

        print_list(found, as_json)
        return
    options = overrides(epochs, lr, memory, latent, set_)
    names = None if orders is None else class_orders(orders, to_run=evidence is None)
    if evidence is not None:
        judgements = _judge_folder(found, evidence, options, names, tolerance)
    else:
        from tpl.bench.reproduce import ORDERS, Settings

        settings = Settings(directory, data, weights, download, names or ORDERS, seed, device, precision, options)
        judgements = _judge_new_runs(found, settings, tolerance, as_json)
    from tpl.cli.verdicts import print_verdicts

    print_verdicts(judgements, tolerance, as_json)
    if any(judgement.verdict in ("missed", "no evidence") for judgement in judgements):
        raise typer.Exit(1)


def _judge_folder(
    rows: Sequence[Row], folder: Path, options: dict[str, Any], orders: Sequence[str] | None, tolerance: float
) -> list[Judgement]:
    from tpl.bench.paper.judge import judge, read_runs
    from tpl.bench.reproduce import obstacle

    runs = read_runs(folder)
    judgements = [judge(row, runs, tolerance, options, orders) for row in rows]
    for index, judgement in enumerate(judgements):
        if judgement.reason and not judgement.used and (problem := obstacle(judgement.row)):
            judgements[index] = replace(
                judgement, reason=f"{judgement.reason}; this program cannot run it (it has {problem})"
            )
    return judgements


def _judge_new_runs(rows: Sequence[Row], settings: Settings, tolerance: float, as_json: bool) -> list[Judgement]:
    from tpl.bench.paper.judge import judge
    from tpl.bench.reproduce import obstacle, run_rows
    from tpl.console import run_progress

    obstacles = {row.name: obstacle(row) for row in rows}
    try:
        with run_progress(err, as_json) as progress:
            runs = run_rows([row for row in rows if not obstacles[row.name]], settings, progress)
    except KeyboardInterrupt:
        where = escape(str(settings.out))
        err.print(f"Interrupted. Finished tasks are safe in {where}; the same command goes on.", soft_wrap=True)
        raise typer.Exit(130) from None
    judgements = [judge(row, runs, tolerance, settings.options) for row in rows]
    return [
        replace(j, reason=f"this program cannot run it (it has {problem})") if (problem := obstacles[j.row.name]) else j
        for j in judgements
    ]
