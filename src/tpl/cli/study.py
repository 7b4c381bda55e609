"""The command that compares OOD detectors as task predictors: ood-study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from tpl.cli.app import (
    AsJson,
    Compile,
    Data,
    Device,
    Download,
    EncoderName,
    Epochs,
    Latent,
    Memory,
    Precision,
    Rate,
    Seed,
    Set,
    Weights,
    app,
    class_orders,
    err,
    out,
    overrides,
    print_json,
    separate,
)


@app.command("ood-study")
def ood_study(
    benchmark: Annotated[str, typer.Argument(help="One of `tpl list`.")],
    encoder: EncoderName = "compact",
    weights: Weights = None,
    data: Data = None,
    download: Download = False,
    order: Annotated[str, typer.Option(help="Class orders, joined by commas; they train side by side.")] = "natural",
    detectors: Annotated[str | None, typer.Option(help="Some of the twenty, joined by commas; by default all.")] = None,
    seed: Seed = 0,
    tasks: Annotated[int | None, typer.Option(help="Stop after this many tasks.")] = None,
    epochs: Epochs = None,
    lr: Rate = None,
    memory: Memory = None,
    latent: Latent = None,
    set_: Set = None,
    device: Device = "auto",
    precision: Precision = "auto",
    compile: Compile = "auto",
    directory: Annotated[
        Path | None, typer.Option("--out", help="Where runs, study.json and the picture go; runs/ood-study-BENCHMARK.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare twenty OOD detectors as task predictors, as the paper's appendix does.

    One HAT model serves the twelve post-hoc detectors; the eight training techniques train one each. Prints AUROC, Last
    and TIL beside the paper's, fits accuracy against AUROC and draws it. What is finished stays: the same command goes
    on where it stopped. digits-5t takes about twelve minutes on two cores, 1.5 without the training techniques.

    Examples:

    `tpl ood-study digits-5t`

    `tpl ood-study digits-5t --detectors msp,mls,ebo,mds,vim`

    `tpl ood-study c100-10t --encoder vit_tiny_patch16_224 --weights weights/ --data cifar100/ --epochs 8 --lr 0.005`
    """
    from tpl.bench.benchmarks import find_benchmark

    orders = class_orders(order)
    find_benchmark(benchmark)
    from tpl.bench.run import RunSpec
    from tpl.bench.study import ALL, study
    from tpl.console import run_progress
    from tpl.report.pictures import draw_correlation

    names = separate(detectors) if detectors else list(ALL)
    place = directory or Path("runs") / f"ood-study-{benchmark}"
    spec = RunSpec(
        benchmark,
        "hat",
        encoder,
        weights,
        data,
        download,
        seed=seed,
        tasks=tasks,
        device=device,
        precision=precision,
        compile=compile,
        options=overrides(epochs, lr, memory, latent, set_),
    )
    try:
        with run_progress(err, as_json) as progress:
            found = study(spec, orders, place, names, progress)
    except KeyboardInterrupt:
        where = escape(str(place))
        err.print(f"Interrupted. What is finished is safe in {where}; go on with the same command.", soft_wrap=True)
        raise typer.Exit(130) from None
    picture = place / "correlation.png"
    draw_correlation(found, picture)
    if as_json:
        print_json(found | {"directory": str(place), "picture": str(picture)})
        return
    out.print(_table(found))
    for name, fit in (("ours", found["fit"]["last"]), ("paper", found["paper_fit"])):
        if fit:
            out.print(f"Last against AUROC, {name}: r = {fit['r']:.3f}, slope {fit['slope']:.2f}")
    out.print(f"Study: [bold]{escape(str(place / 'study.json'))}[/], picture: {escape(str(picture))}", soft_wrap=True)


def _table(found: dict[str, Any]) -> Table:
    table = Table("detector", box=None, header_style="bold")
    for column in ("AUROC", "paper", "Last", "paper", "calibrated", "TIL", "paper"):
        table.add_column(column, justify="right")
    for row in found["rows"]:
        printed = row["paper"] or {}
        ours = {key: f"{row[key]:.1f}" for key in ("auroc", "last", "last_calibrated", "til")}
        theirs = {key: f"{printed[key]:.1f}" if key in printed else "-" for key in ("auroc", "last", "til")}
        table.add_row(
            row["detector"], ours["auroc"], theirs["auroc"], ours["last"], theirs["last"], ours["last_calibrated"],
            ours["til"], theirs["til"],
        )  # fmt: skip
    return table
