"""Commands that run benchmarks and vary a trained model: demo, run, ablate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from tpl.cli.app import EXPERIMENTS, app, err, out, print_json
from tpl.cli.options import (
    OUTPUT,
    TRAINING,
    AcceptContaminated,
    AsJson,
    Benchmark,
    Compile,
    Data,
    DataOfRun,
    Device,
    Download,
    Encoder,
    Epochs,
    FinishedRun,
    HeldOut,
    Memory,
    Orders,
    PerTask,
    Precision,
    Rate,
    Seed,
    Set,
    Tasks,
    Track,
    Validation,
    Weights,
    check_settings,
    class_orders,
    class_sizes,
    method_names,
    overrides,
    separate,
    trackers,
)
from tpl.errors import TplError

if TYPE_CHECKING:
    from tpl.bench.results import RunResult
    from tpl.bench.spec import RunSpec
    from tpl.engine import Callback, Event


@app.command(rich_help_panel=EXPERIMENTS)
def demo(
    directory: Annotated[Path, typer.Option("--out", help="The folder for the runs and the page.")] = Path("runs/demo"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted demo.")] = False,
    epochs: Epochs = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare three methods on the bundled digits. About 2.5 minutes on two cores, offline.

    Ten classes arrive in five tasks. Fine-tuning forgets, TPL does not, joint training is the upper bound.

    Example: `tpl demo --json`
    """
    from tpl.bench.demo import run_demo
    from tpl.console import run_progress
    from tpl.report import Findings, FoundRun, rich_table, summary_rows
    from tpl.report.page import write_page

    try:
        with run_progress(err, as_json) as progress:
            result = run_demo(directory, device, resume, progress, epochs)
    except KeyboardInterrupt:
        err.print("Interrupted. Finished tasks are stored; continue with: tpl demo --resume", soft_wrap=True)
        raise typer.Exit(130) from None
    page = directory / "report.html"
    write_page(Findings([FoundRun(*pair) for pair in result.placed()]), page, "TPL on the bundled digits")
    if as_json:
        print_json({"methods": result.rows(), "report": str(page)})
        return
    out.print(rich_table(summary_rows(result.runs), width=out.width))
    out.print(f"A page with accuracy matrices and curves: [bold]{escape(str(page))}[/]", soft_wrap=True)


@app.command(rich_help_panel=EXPERIMENTS)
def run(
    benchmark: Benchmark,
    method: Annotated[
        str,
        typer.Option(
            help="A method; `tpl list` shows all. Of several, joined by commas, the training they have in common is "
            "done once."
        ),
    ] = "tpl",
    encoder: Encoder = None,
    data: Data = None,
    download: Download = False,
    order: Orders = "natural",
    per_task: PerTask = None,
    tasks: Tasks = None,
    validation: Validation = None,
    epochs: Epochs = None,
    lr: Rate = None,
    memory: Memory = None,
    protect: Annotated[
        str | None,
        typer.Option(
            help="How earlier tasks are protected in shared adapters: hat or supsup.", rich_help_panel=TRAINING
        ),
    ] = None,
    set_: Set = None,
    held_out: HeldOut = None,
    seed: Seed = 0,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The run directory, or the folder for several runs; by default runs/ and a name made of the settings.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted run.", rich_help_panel=OUTPUT)
    ] = False,
    keep_model: Annotated[
        bool,
        typer.Option(
            "--model/--no-model",
            help="Store the model after every task, for --resume, ablate and predict. Without it a run begins again.",
            rich_help_panel=OUTPUT,
        ),
    ] = True,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            help="The directory of a run of joint or joint-ridge: adds the rectified forgetting rate. Repeat it for "
            "both: the better one counts.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    track: Track = None,
    weights: Weights = None,
    accept_contaminated_encoder: AcceptContaminated = False,
    device: Device = "auto",
    precision: Precision = "auto",
    compile: Compile = "auto",
    as_json: AsJson = False,
) -> None:
    """Run one method on one benchmark and print its accuracy.

    digits-5t takes about a minute on two cores, c100-10t with ViT-tiny about four minutes on one H200. Decoded images
    are kept on disk for the next run, at most 8 GB; the environment variable TPL_IMAGE_CACHE=off turns that off.

    Examples:

    `tpl run digits-5t`

    `tpl run c100-10t --encoder vit_tiny_patch16_224 --data cifar100/ --order natural,random:1,random:2`

    `tpl run digits-5t --method tpl,more,row,hat`

    `tpl run folder --data photos/ --per-task 3 --validation 0.2 --held-out 0.1`

    `tpl run c100-10t --encoder resnet18:128 --data cifar100/ --method tpl,more,row`

    `tpl run digits-5t --set compose=and --set k=10 --validation 0.2`

    `tpl run digits-5t --track tensorboard --track mlflow:mlruns`

    `torchrun --nproc-per-node 4 -m tpl run c100-10t ...` (one run on four GPUs, which share every batch)
    """
    pairs = [(name, each) for name in method_names(method) for each in class_orders(order)]
    settings: list[dict[str, Any]] = [
        {
            "benchmark": benchmark,
            "method": name,
            "encoder": encoder or "",
            "weights": weights,
            "data": data,
            "download": download,
            "order": each,
            "seed": seed,
            "per_task": class_sizes(per_task),
            "tasks": tasks,
            "validation": validation,
            "held_out": held_out or 0.0,
            "device": device,
            "precision": precision,
            "compile": compile,
            "options": overrides(epochs, lr, memory, set_, protect=protect),
            "accept_contaminated_encoder": accept_contaminated_encoder,
        }
        for name, each in pairs
    ]
    check_settings(settings)
    from tpl.bench.bounds import BOUNDS, elsewhere, is_bound, last_alone
    from tpl.bench.results import RunResult, same_tasks
    from tpl.bench.run import execute_together
    from tpl.bench.spec import RunSpec
    from tpl.console import run_progress
    from tpl.engine import joined

    specs = [RunSpec(**each) for each in settings]
    folder = directory or Path("runs")
    places = [directory] if directory and len(specs) == 1 else [folder / spec.directory_name() for spec in specs]
    bounds = {str(place): RunResult.read(place) for place in against or ()}
    for name, bound in bounds.items():
        if not is_bound(bound.description):
            what = f"a run of {bound.description['method']}"
            raise TplError(f"{name} is {what}; --against takes runs of {' or '.join(BOUNDS)}.")
    with joined(device) as processes:
        try:
            with run_progress(err, as_json) as progress:  # of several processes, only the first one gets events
                callback = progress if as_json else _with_notes(specs, progress)
                results = execute_together(specs, places, resume, callback, trackers(track), keep_model)
        except KeyboardInterrupt:
            where = escape(", ".join(map(str, places)))
            if processes.leads:
                kept = "Finished tasks are stored" if keep_model else "No model is stored, only what was measured,"
                again = "continue with the same command and --resume" if keep_model else "--resume begins again"
                err.print(f"Interrupted. {kept} in {where}; {again}.", soft_wrap=True)
            raise typer.Exit(130) from None
    if not processes.leads:
        return
    for result in results:
        for bound in bounds.values():
            result.against(bound)  # refuses one over other classes or images
    if as_json:
        found = [
            {"directory": str(place), "method": name, "order": each}
            | result.summary
            | _parts(result)
            | _forgetting(result, [*bounds.values(), *results])
            for place, (name, each), result in zip(places, pairs, results, strict=True)
        ]
        print_json(found[0] if len(found) == 1 else {"runs": found})
        return
    from tpl.report import method_label, rich_table, summary_rows

    names = [method_label(result.description) for result in results]
    if len({each for _, each in pairs}) > 1:
        names = [f"{name}, {each}" for name, (_, each) in zip(names, pairs, strict=True)]
    runs = dict(zip(names, results, strict=True))
    for where, bound in bounds.items():
        known = any(same_tasks(result.description, bound.description) for result in results)
        whose = "" if known else elsewhere(bound.description, results[0].description)
        name = method_label(bound.description) + whose
        runs[name if name not in runs else where] = bound if known else last_alone(bound)
    out.print(rich_table(summary_rows(runs), width=out.width))
    for place in places:
        out.print(f"Run directory: [bold]{escape(str(place))}[/]", soft_wrap=True)


def _parts(result: RunResult) -> dict[str, Any]:
    """The accuracies of each part of the method's predictions alone, for JSON; nothing for a single part."""
    found = {name: part.summary for name, part in result.parts().items()}
    return {"parts": found} if found else {}


def _forgetting(result: RunResult, candidates: Sequence[RunResult]) -> dict[str, Any]:
    """Rectified forgetting against the better bound among `candidates`, and its name; nothing without a bound."""
    from tpl.bench.bounds import better_bound, bound_name

    bound = better_bound(result, candidates)
    return {} if bound is None else result.against(bound) | {"bound": bound_name(bound.description, result.description)}


def _with_notes(specs: list[RunSpec], callback: Callback) -> Callback:
    """Print what the benchmark sets when the first run begins: one that cannot begin prints its error alone."""
    notes = [note for note in dict.fromkeys(spec.benchmark_note() for spec in specs) if note]

    def on_event(event: Event) -> None:
        while notes and event.kind == "run":
            err.print(notes.pop(0), markup=False, highlight=False, soft_wrap=True)
        callback(event)

    return on_event


@app.command(rich_help_panel=EXPERIMENTS)
def ablate(
    run_directory: FinishedRun,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="GROUP,...",
            help="Only these variants: compose, terms, beta, gamma, k, memory; of tpl-plus also expert, passes.",
        ),
    ] = None,
    data: DataOfRun = None,
    weights: Weights = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure a trained model with parts of TPL's score exchanged, or with less memory; nothing is trained.

    The first time, the test images go through every task's model, and the outputs are kept in RUN/outputs. From then on
    neither images nor encoder are run (but the encoder's weights are still loaded). digits-5t takes about 17 seconds
    the first time and 10 later on one core, 6 for a single group.

    To choose a value, ablate a run made with --validation, not one measured on test images.

    Examples:

    `tpl ablate runs/digits-5t-tpl-compact-1a2b3c4d`

    `tpl ablate runs/digits-5t-tpl-compact-1a2b3c4d --only k,gamma`
    """
    from tpl.bench.ablate import ablate as run_ablation
    from tpl.console import work_progress

    with work_progress(err, as_json) as progress:
        rows = run_ablation(run_directory, data, weights, device, separate(only or ""), progress)
    if as_json:
        print_json({"run": str(run_directory), "variants": rows})
        return
    table = Table("variant", box=None, header_style="bold")
    for column in ("Last", "TP", "AUROC", "passes"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = (f"{100 * row[k]:.2f}" if row[k] is not None else "-" for k in ("last", "tp", "auroc"))
        table.add_row(row["variant"], *numbers, f"{row['passes']:.2f}")
    out.print(table)
