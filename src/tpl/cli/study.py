"""The command that compares OOD detectors as task predictors: ood-study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from tpl.cli.app import EXPERIMENTS, app, err, out, print_json
from tpl.cli.options import (
    OUTPUT,
    AcceptContaminated,
    AsJson,
    Benchmark,
    Data,
    Device,
    Download,
    Encoder,
    Epochs,
    Memory,
    Orders,
    Precision,
    Rate,
    Seed,
    Set,
    Tasks,
    Weights,
    class_orders,
    overrides,
    separate,
)


@app.command("ood-study", rich_help_panel=EXPERIMENTS)
def ood_study(
    benchmark: Benchmark,
    detectors: Annotated[
        str | None, typer.Option(help="Some of the twenty detectors, separated by commas; by default all.")
    ] = None,
    encoder: Encoder = None,
    data: Data = None,
    download: Download = False,
    order: Orders = "natural",
    tasks: Tasks = None,
    epochs: Epochs = None,
    lr: Rate = None,
    memory: Memory = None,
    set_: Set = None,
    seed: Seed = 0,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The folder for runs, study.json and the picture; by default runs/ood-study-BENCHMARK.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    weights: Weights = None,
    accept_contaminated_encoder: AcceptContaminated = False,
    device: Device = "auto",
    precision: Precision = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare twenty OOD detectors as task predictors, as the paper's appendix does.

    One HAT model serves the twelve post-hoc detectors; the eight training techniques train one each. Prints AUROC, Last
    and TIL next to the paper's, and draws accuracy against AUROC with a linear fit. The same command continues an
    interrupted study. digits-5t takes about twelve minutes on two cores, 1.5 without the training techniques.

    Examples:

    `tpl ood-study digits-5t`

    `tpl ood-study digits-5t --detectors msp,mls,ebo,mds,vim`

    `tpl ood-study c100-10t --encoder vit_tiny_patch16_224 --weights weights/ --data cifar100/ --epochs 8 --lr 0.005`
    """
    from tpl.bench.benchmarks import find_benchmark

    orders = class_orders(order)
    find_benchmark(benchmark)
    from tpl.bench.spec import RunSpec
    from tpl.bench.study import ALL, study
    from tpl.console import run_progress
    from tpl.report.pictures import draw_correlation

    names = separate(detectors) if detectors else list(ALL)
    place = directory or Path("runs") / f"ood-study-{benchmark}"
    spec = RunSpec(
        benchmark,
        "hat",
        encoder or "",
        weights,
        data,
        download,
        seed=seed,
        tasks=tasks,
        device=device,
        precision=precision,
        options=overrides(epochs, lr, memory, set_),
        accept_contaminated_encoder=accept_contaminated_encoder,
    )
    try:
        with run_progress(err, as_json) as progress:
            found = study(spec, orders, place, names, progress)
    except KeyboardInterrupt:
        where = escape(str(place))
        err.print(f"Interrupted. Finished tasks are stored in {where}; continue with the same command.", soft_wrap=True)
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
