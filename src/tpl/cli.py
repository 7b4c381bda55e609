"""The `tpl` command: parses, calls one function below, prints."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpl._version import __version__
from tpl.errors import TplError

# torch, timm and matplotlib take seconds to import. Each command loads what it needs, so that `tpl --help` and
# every mistake in an argument answer at once.

app = typer.Typer(
    name="tpl",
    help="Image classifiers that keep learning: new classes arrive task by task, nothing is forgotten.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console()
err = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...; auto takes the first GPU if there is one.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
Weights = Annotated[Path | None, typer.Option(help="Encoder weights: a .safetensors file or a torch state dict.")]


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        out.print(__version__, highlight=False)
        raise typer.Exit


@app.command()
def demo(
    directory: Annotated[Path, typer.Option("--out", help="Where the runs and the page go.")] = Path("runs/demo"),
    resume: Annotated[bool, typer.Option(help="Continue an interrupted demo; finished runs are kept.")] = False,
    device: Device = "auto",
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Teach the bundled digits to three learners, side by side. About 2 minutes on two cores, offline.

    Ten classes arrive in five tasks. Fine-tuning forgets, TPL does not, joint training is the upper bound.

    Example: `tpl demo --json`
    """
    from tpl.bench.demo import run_demo
    from tpl.console import RunProgress
    from tpl.report import rich_table, summary_rows, write_page

    try:
        with RunProgress(err, quiet=as_json) as progress:
            result = run_demo(directory, device, seed, resume, progress)
    except KeyboardInterrupt:
        err.print("Interrupted. Finished tasks are safe; go on with: tpl demo --resume")
        raise typer.Exit(130) from None
    page = directory / "report.html"
    write_page(result.runs, page, "TPL on the bundled digits", joint="joint")
    if as_json:
        _print_json({"methods": result.rows(), "report": str(page)})
        return
    out.print(rich_table(summary_rows(result.runs, "joint"), width=out.width))
    out.print(f"The page with accuracy matrices and curves: [bold]{escape(str(page))}[/]", soft_wrap=True)


@app.command()
def run(
    benchmark: Annotated[str, typer.Argument(help="One of `tpl list`.")],
    method: Annotated[str, typer.Option(help="One of `tpl list`.")] = "tpl",
    encoder: Annotated[str, typer.Option(help="compact (ships with the package) or any ViT/DeiT of timm.")] = "compact",
    weights: Weights = None,
    data: Annotated[Path | None, typer.Option(help="Where the images are: folder, zips, or torchvision root.")] = None,
    download: Annotated[bool, typer.Option(help="Download the data set if it is not there.")] = False,
    order: Annotated[str, typer.Option(help="natural, random:SEED, or FILE.json:ID.")] = "natural",
    seed: Seed = 0,
    per_task: Annotated[str | None, typer.Option(help="Classes a task, e.g. 5, or 10,2,3 for unequal ones.")] = None,
    tasks: Annotated[int | None, typer.Option(help="Stop after this many tasks.")] = None,
    validation: Annotated[
        float | None, typer.Option(help="Measure on this share of the training images instead of the test images.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Override the benchmark's epochs.")] = None,
    lr: Annotated[float | None, typer.Option(help="Override the benchmark's learning rate.")] = None,
    memory: Annotated[int | None, typer.Option(help="Override the benchmark's replay memory, in images.")] = None,
    latent: Annotated[int | None, typer.Option(help="Override the adapters' hidden size.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any option of `tpl describe METHOD`.")
    ] = None,
    device: Device = "auto",
    precision: Annotated[str, typer.Option(help="auto, fp32 or bf16 (the trunk only).")] = "auto",
    directory: Annotated[
        Path | None, typer.Option("--out", help="The run directory; by default under runs/, named after the settings.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on where an interrupted run stopped.")] = False,
    against: Annotated[Path | None, typer.Option(help="A joint run: adds the rectified forgetting rate.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run one method on one benchmark and print its accuracy. digits-5t takes about a minute on two cores.

    Examples:

    `tpl run digits-5t`

    `tpl run c100-10t --encoder vit_tiny_patch16_224 --data cifar100/ --order random:1`

    `tpl run folder --data photos/ --per-task 3 --validation 0.2`

    `tpl run digits-5t --set compose=and --set k=10 --validation 0.2`
    """
    from tpl.bench.results import RunResult
    from tpl.bench.run import RunSpec, execute
    from tpl.console import RunProgress
    from tpl.report import rich_table, summary_rows

    common = {"epochs": epochs, "lr": lr, "memory": memory, "latent": latent}
    options = {k: v for k, v in common.items() if v is not None} | _assignments(set_ or [])
    spec = RunSpec(
        benchmark,
        method,
        encoder,
        weights,
        data,
        download,
        order,
        seed,
        per_task=_sizes(per_task),
        tasks=tasks,
        validation=validation,
        device=device,
        precision=precision,
        options=options,
    )
    place = directory or Path("runs") / spec.directory_name()
    joint = RunResult.read(against) if against else None
    try:
        with RunProgress(err, quiet=as_json) as progress:
            result = execute(spec, place, resume, progress)
    except KeyboardInterrupt:
        where = escape(str(place))
        err.print(f"Interrupted. Finished tasks are safe in {where}; go on with the same command and --resume.")
        raise typer.Exit(130) from None
    forgetting = result.against(joint) if joint else {}
    if as_json:
        _print_json({"directory": str(place)} | result.summary | forgetting)
        return
    runs = {method: result} | ({"joint": joint} if joint else {})
    out.print(rich_table(summary_rows(runs, "joint" if joint else None), width=out.width))
    out.print(f"Run directory: [bold]{escape(str(place))}[/]", soft_wrap=True)


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """Show all methods, benchmarks, encoders and scores.

    Example: `tpl list --json`
    """
    from tpl.bench.benchmarks import BENCHMARKS
    from tpl.methods import load_methods
    from tpl.nets import ENCODERS
    from tpl.scores import SCORES

    sections = {
        "methods": {name: m.summary for name, m in load_methods().items()},
        "benchmarks": {name: b.summary for name, b in BENCHMARKS.items()},
        "encoders": ENCODERS,
        "scores": {name: s.summary for name, s in SCORES.items()},
    }
    if as_json:
        _print_json({k: [{"name": n, "summary": s} for n, s in v.items()] for k, v in sections.items()})
        return
    for title, entries in sections.items():
        table = Table(title=title.capitalize(), title_justify="left", title_style="bold", show_header=False, box=None)
        for name, summary in entries.items():
            table.add_row(name, summary)
        out.print(table, "")


@app.command()
def describe(method: Annotated[str, typer.Argument(help="One of `tpl list`.")], as_json: AsJson = False) -> None:
    """Explain a method: its idea, its paper, and every option with its default.

    Example: `tpl describe tpl`
    """
    from tpl.methods import find_method

    found = find_method(method)
    fields = [
        {
            "name": f.name,
            "default": f.default,
            "choices": list(f.metadata["choices"]),
            "help": f.metadata["help"],
        }
        for f in dataclasses.fields(found.config_class)
    ]
    if as_json:
        about = {"name": found.name, "summary": found.summary, "paper": found.paper}
        _print_json(about | {"options": fields})
        return
    out.print(f"[bold]{found.name}[/]: {found.summary}")
    if found.paper:
        out.print(found.paper, style="italic")
    doc = sys.modules[found.__module__].__doc__ or ""
    out.print("\n" + doc.strip() + "\n", highlight=False)
    table = Table("option", "default", "values", "what it does", box=None, header_style="bold")
    for field in fields:
        table.add_row(field["name"], str(field["default"]), ", ".join(field["choices"]), field["help"])
    out.print(table)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Finished run directories.")],
    file: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="The page's heading.")] = "Class-incremental learning",
    as_json: AsJson = False,
) -> None:
    """Put finished runs on one self-contained HTML page, and print their table. Takes a few seconds.

    Example: `tpl report runs/digits-5t-*`
    """
    from tpl.bench.results import RunResult
    from tpl.report import rich_table, summary_rows, write_page

    found: dict[str, RunResult] = {}
    for path in runs:
        result = RunResult.read(path)
        name = result.description["method"]
        found[name if name not in found else f"{name} ({path.name})"] = result
    joint = "joint" if "joint" in found else None
    write_page(found, file, title, joint=joint)
    if as_json:
        _print_json({"runs": summary_rows(found, joint), "report": str(file)})
        return
    out.print(rich_table(summary_rows(found, joint), width=out.width))
    out.print(f"The page: [bold]{escape(str(file))}[/]", soft_wrap=True)


@app.command()
def ablate(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run of the method tpl.")],
    data: Annotated[Path | None, typer.Option(help="Where the images are, as in the run.")] = None,
    weights: Weights = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Exchange the parts of TPL's score on a trained model; nothing is trained anew.

    Needs the benchmark's images once, to see them through every task. A few seconds for digits-5t. To choose
    a value, ablate a run made with --validation: choosing on test images is not honest.

    Example: `tpl ablate runs/digits-5t-tpl-compact-1a2b3c4d`
    """
    from tpl.bench.ablate import ablate as run_ablation

    rows = run_ablation(run_directory, data, weights, device)
    if as_json:
        _print_json({"run": str(run_directory), "variants": rows})
        return
    table = Table("variant", box=None, header_style="bold")
    for column in ("Last", "TP", "AUROC"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = (f"{100 * row[k]:.2f}" if row[k] is not None else "-" for k in ("last", "tp", "auroc"))
        table.add_row(row["variant"], *numbers)
    out.print(table)


def _sizes(text: str | None) -> int | tuple[int, ...] | None:
    """`5` or `10,2,3` as numbers of classes."""
    if text is None:
        return None
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise TplError(f"--per-task takes a number or numbers joined by commas; got '{text}'.") from None
    return sizes if len(sizes) > 1 else sizes[0]


def _assignments(texts: list[str]) -> dict[str, str]:
    """`name=value` texts as a mapping."""
    pairs = [text.partition("=") for text in texts]
    for name, equals, _ in pairs:
        if not equals:
            raise TplError(f"--set takes NAME=VALUE; got '{name}'.")
    return {name.strip().replace("-", "_"): value.strip() for name, _, value in pairs}


def _print_json(content: Any) -> None:
    sys.stdout.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    """Run the command line: errors a person can mend become one line and exit code 2."""
    try:
        app()
    except TplError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("Interrupted.")
        sys.exit(130)
