"""Commands that draw: figure densities, figure toy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from tpl.cli.app import EXPERIMENTS, app, out, print_json
from tpl.cli.options import AsJson, DataOfRun, Device, Weights
from tpl.errors import TplError

figure = typer.Typer(
    help="Draw why a likelihood ratio predicts the task: a trained model's features, or the paper's toy example.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(figure, name="figure", rich_help_panel=EXPERIMENTS)


@figure.command()
def densities(
    run_directory: Annotated[
        Path, typer.Argument(metavar="RUN", help="The directory of a finished run of tpl with at least two tasks.")
    ],
    task: Annotated[int | None, typer.Option(help="The number of one task, from 1; by default all.")] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Show the replay memory instead of the test images.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option("--out", help="The file to write, .png or .svg; by default RUN/densities.png.")
    ] = None,
    data: DataOfRun = None,
    weights: Weights = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Draw the features of a task's own images and of other tasks' images under its model, one panel per task.

    Features are projected on two principal components; contours are kernel density estimates. The test images go
    through the model once, and its outputs are kept in RUN/outputs. digits-5t takes about 14 seconds the first time,
    8 later.

    Examples:

    `tpl figure densities runs/digits-5t-tpl-compact-1a2b3c4d`

    `tpl figure densities runs/digits-5t-tpl-compact-1a2b3c4d --task 2 --memory --out task2.svg`
    """
    with _matplotlib():
        from tpl.bench.densities import run_densities
        from tpl.report.densities import draw_densities
        from tpl.report.pictures import check_format

        file = file or run_directory / "densities.png"
        check_format(file)
        found = run_densities(run_directory, data, weights, device, task, memory)
        draw_densities(found, file)
    if as_json:
        what = {key: found.description[key] for key in ("benchmark", "method", "order")}
        tasks = [each.numbers() for each in found.tasks]
        print_json({"figure": str(file)} | what | {"images": found.images, "tasks": tasks})
        return
    _written(file)


@figure.command()
def toy(
    file: Annotated[Path, typer.Option("--out", help="The file to write, .png or .svg.")] = Path("toy.png"),
    as_json: AsJson = False,
) -> None:
    """Draw the paper's example of two Gaussians: a task's likelihood alone is misleading, the ratio is not.

    The task is N(0, 1), the others are N(0, 0.01). Takes about 5 seconds; needs no data.

    Example: `tpl figure toy --out toy.svg`
    """
    with _matplotlib():
        from tpl.report.toy import draw_toy, toy_numbers

        draw_toy(file)
    if as_json:
        print_json({"figure": str(file)} | toy_numbers())
        return
    _written(file)


def _written(file: Path) -> None:
    out.print(f"The picture: [bold]{escape(str(file))}[/]", soft_wrap=True)


@contextmanager
def _matplotlib() -> Iterator[None]:
    """Say how to install matplotlib where it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise TplError("Pictures need matplotlib, which is not installed: pip install matplotlib") from error
