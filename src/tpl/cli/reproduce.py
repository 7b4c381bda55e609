"""The command that compares this program with the paper: reproduce."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from tpl.cli.app import EXPERIMENTS, app, err, out, print_json
from tpl.cli.options import (
    ADVANCED,
    DATA,
    OUTPUT,
    AsJson,
    Data,
    Device,
    Download,
    Epochs,
    Memory,
    Precision,
    Rate,
    Seed,
    Set,
    class_orders,
    overrides,
)
from tpl.errors import TplError

if TYPE_CHECKING:
    from tpl.bench.paper import Row
    from tpl.bench.paper.evidence import RunGroup
    from tpl.bench.paper.judge import Finding, Judgement, Question
    from tpl.bench.reproduce import RowSettings

COLOURS = {True: "green", False: "red", None: "yellow"}


@app.command(rich_help_panel=EXPERIMENTS)
def reproduce(
    rows: Annotated[
        list[str] | None,
        typer.Argument(metavar="ROW", help="Rows of the paper's tables: names, prefixes or globs."),
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="List the rows, and whether this program can run them.")
    ] = False,
    evidence: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Compare the finished runs in DIR; run nothing.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="How many points from the paper's number count as equal.")
    ] = 0.5,
    min_orders: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many class orders a row must have behind its numbers.")
    ] = 1,
    any_weights: Annotated[
        bool, typer.Option("--any-weights", help="Count runs with weights that are not known by their hash.")
    ] = False,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Run, or compare, one recipe of docs/reproduce.md. By default the paper's is run, where it has one; "
            "with --from, each recipe that has runs is compared.",
        ),
    ] = None,
    data: Data = None,
    download: Download = False,
    orders: Annotated[
        str | None,
        typer.Option(
            help="Class orders, separated by commas; by default natural,random:1,random:2; with --from all.",
            rich_help_panel=DATA,
        ),
    ] = None,
    epochs: Epochs = None,
    lr: Rate = None,
    memory: Memory = None,
    set_: Set = None,
    seed: Seed = 0,
    directory: Annotated[
        Path,
        typer.Option(
            "--out", help="The folder for the runs; finished runs there are not repeated.", rich_help_panel=OUTPUT
        ),
    ] = Path("runs/reproduce"),
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Encoder weights: a file, or a folder with ENCODER.safetensors or .pth.", rich_help_panel=ADVANCED
        ),
    ] = None,
    device: Device = "auto",
    precision: Precision = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare with rows of the paper's tables: run what they need, or read finished runs.

    A row is a table, a line of it and a benchmark. A quantity is equal to the paper's, above or below it; a row is
    reached if all are equal or better, by the paper's recipe or with another one, which is named. With encoder weights
    that are not known by their hash it is unverified, with fewer class orders than --min-orders there is no evidence.
    Exit code 1 unless every row is reached. With --from, options such as --epochs choose among the runs found.
    Comparing finished runs takes a second; making them takes as long as `tpl run` does, once per class order.

    Examples:

    `tpl reproduce --list encoders`

    `tpl reproduce --from results 'encoders/*tiny/c100*'`

    `tpl reproduce --from results resnet18/tpl --recipe scratch-plain`

    `tpl reproduce --from results 'encoders/vit-tiny/*' --min-orders 3`

    `tpl reproduce --from runs/mine main/tpl/c10-5t --any-weights`

    `tpl reproduce encoders/vit-tiny/c100-10t --data cifar100/`
    """
    from tpl.bench.paper import find_rows
    from tpl.bench.paper.judge import REACHED, SHOWN, Question, overall
    from tpl.bench.paper.recipes import find_recipe

    if not rows and not listing:
        raise TplError("Name a row of the paper, such as encoders/vit-tiny/c100-10t; `tpl reproduce --list` shows all.")
    found = find_rows(rows or ["*"])
    if listing:
        _print_list(found, as_json)
        return
    if recipe is not None:
        find_recipe(recipe)
    options = overrides(epochs, lr, memory, set_)
    names = None if orders is None else class_orders(orders, to_run=evidence is None)
    if evidence is not None:
        question = Question(tolerance, options, names, recipe, bool(options), min_orders, any_weights)
        judgements = _judge_folder(found, evidence, question)
    else:
        from tpl.bench.reproduce import ORDERS, RowSettings

        to_run = names or ORDERS
        if len(to_run) < min_orders:
            raise TplError(f"--min-orders {min_orders} needs as many class orders: name them with --orders.")
        settings = RowSettings(directory, data, weights, download, to_run, seed, device, precision, options, recipe)
        question = Question(tolerance, options, None, recipe, True, min_orders, any_weights)
        judgements = _judge_new_runs(found, settings, question, as_json)
    _print_verdicts(judgements, question, as_json)
    if any(overall(each).verdict not in (REACHED, SHOWN) for each in judgements):
        raise typer.Exit(1)


def _judge_folder(rows: Sequence[Row], folder: Path, question: Question) -> list[list[Judgement]]:
    """The judgements of each row, one for every recipe that has runs."""
    from tpl.bench.paper.evidence import read_runs
    from tpl.bench.paper.judge import judge
    from tpl.bench.reproduce import obstacle

    runs = read_runs(folder)
    judgements = [judge(row, runs, question) for row in rows]
    for index, (first, *others) in enumerate(judgements):
        if first.reason and not first.used and (problem := obstacle(first.row)):
            reason = f"{first.reason}; this program cannot run it (it has {problem})"
            judgements[index] = [replace(first, reason=reason), *others]
    return judgements


def _judge_new_runs(
    rows: Sequence[Row], settings: RowSettings, question: Question, as_json: bool
) -> list[list[Judgement]]:
    """Make the runs that rows need and judge them."""
    from tpl.bench.paper.judge import judge
    from tpl.bench.reproduce import obstacle, run_rows
    from tpl.console import run_progress

    obstacles = {row.name: obstacle(row) for row in rows}
    try:
        with run_progress(err, as_json) as progress:
            runs = run_rows([row for row in rows if not obstacles[row.name]], settings, progress)
    except KeyboardInterrupt:
        where = escape(str(settings.out))
        err.print(f"Interrupted. Finished tasks are stored in {where}; continue with the same command.", soft_wrap=True)
        raise typer.Exit(130) from None
    judgements = [judge(row, runs, question) for row in rows]
    for index, row in enumerate(rows):
        if problem := obstacles[row.name]:
            reason = f"this program cannot run it (it has {problem})"
            judgements[index] = [replace(judgements[index][0], reason=reason)]
    return judgements


def _print_list(rows: Sequence[Row], as_json: bool) -> None:
    """Print rows, the paper's numbers, and whether this program can run them."""
    from tpl.bench.paper import QUANTITIES
    from tpl.bench.reproduce import obstacle

    problems = {row.name: obstacle(row) for row in rows}
    if as_json:
        entries = [
            {
                "row": row.name,
                "printed_as": row.label,
                "method": row.method,
                "encoder": row.encoder,
                "benchmark": row.benchmark,
                "paper": {key: value.mean for key, value in row.values.items()},
                "misprint": row.misprint,
                "runnable": problems[row.name] is None,
                "obstacle": problems[row.name],
            }
            for row in rows
        ]
        print_json({"rows": entries})
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("row", no_wrap=True)
    table.add_column("paper")
    table.add_column("runnable")
    for row in rows:
        numbers = ", ".join(f"{QUANTITIES[key].title} {value}" for key, value in row.values.items())
        problem = problems[row.name]
        table.add_row(row.name, numbers, f"[yellow]{problem}[/]" if problem else "[green]yes[/]")
    out.print(table)


def _print_verdicts(judgements: Sequence[Sequence[Judgement]], question: Question, as_json: bool) -> None:
    """Print the paper's numbers and ours, remarks on the rows, and the runs behind the numbers."""
    from tpl.bench.paper.judge import REACHED, counted_orders, overall
    from tpl.bench.paper.recipes import load_recipes, paper_orders

    counted = [overall(each) for each in judgements]
    count = Counter(_counted_as(judgement) for judgement in counted)
    orders: dict[str, list[int]] = {}  # behind the rows that are reached
    for judgement in counted:
        if judgement.verdict == REACHED:
            orders.setdefault(_counted_as(judgement), []).append(judgement.orders)
    every = [judgement for each in judgements for judgement in each]
    if as_json:
        recipes = {name: {"summary": r.summary, "by_paper": r.by_paper} for name, r in load_recipes().items()}
        by_row = {
            j.row.name: {"verdict": j.verdict, "recipe": j.recipe, "by_paper": j.by_paper, "class_orders": j.orders}
            for j in counted
        }
        content = {
            "tolerance": question.tolerance,
            "min_orders": question.min_orders,
            "any_weights": question.any_weights,
            "paper_class_orders": paper_orders(),
            "recipes": recipes,
            "verdicts": dict(count),
            "reached_class_orders": {name: {"min": min(n), "max": max(n)} for name, n in orders.items()},
            "by_row": by_row,
            "rows": [j.to_dict() for j in every],
        }
        print_json(content)
        return
    out.print(_table(every))
    for judgement in every:
        _print_remarks(judgement)
    _print_evidence(every)
    for name in dict.fromkeys(str(j.recipe) for j in every if j.recipe in load_recipes()):
        out.print(f"Recipe [bold]{name}[/]: {escape(load_recipes()[name].summary)}.", highlight=False)
    behind = {name: f" ({counted_orders(min(n), max(n))})" for name, n in orders.items()}
    verdicts = ", ".join(f"{number} {verdict}{behind.get(verdict, '')}" for verdict, number in count.items())
    meaning = (
        f"Equal: at most {question.tolerance:g} points from the paper; reached: equal or better; n: class orders (the "
        f"paper has {paper_orders()}); ±: deviation over them."
    )
    out.print(f"Rows: [bold]{verdicts}[/]. {meaning}", highlight=False)


def _counted_as(judgement: Judgement) -> str:
    """How a row is counted; rows reached by the paper's recipe and with another one are different things."""
    if judgement.verdict != "reached":
        return judgement.verdict
    return "reached by the paper's recipe" if judgement.by_paper else "reached with another recipe"


def _print_remarks(judgement: Judgement) -> None:
    from tpl.bench.paper.judge import AMBIGUOUS, NO_EVIDENCE, UNVERIFIED

    verdict = judgement.verdict if judgement.verdict in (AMBIGUOUS, UNVERIFIED) else NO_EVIDENCE
    remarks = {verdict: judgement.reason, "misprint": judgement.row.misprint}
    if not judgement.verified and verdict != UNVERIFIED:
        remarks[UNVERIFIED] = "these weights are not known by their hash; that they are the paper's rests on the name"
    if seen := [name for group in judgement.used[:1] for name in group.runs[0].result.contamination]:
        remarks["contaminated"] = f"the encoder was pre-trained on {' and '.join(seen)}, as the paper's row was"
    for mark, text in remarks.items():
        if text:
            out.print(f"[yellow]{mark}:[/] {judgement.row.name}: {escape(text)}", highlight=False)


def _table(judgements: Sequence[Judgement]) -> Table:
    from tpl.bench.paper import QUANTITIES
    from tpl.bench.paper.judge import UNVERIFIED

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("row", overflow="fold")
    table.add_column("")
    for title in ("paper", "ours", "diff.", "n"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for judgement in judgements:
        unverified = judgement.verdict == UNVERIFIED
        for index, finding in enumerate(judgement.findings):
            table.add_row(
                _name(judgement) if index == 0 else "",
                QUANTITIES[finding.quantity].title,
                _paper(finding),
                "–" if finding.ours is None else f"{finding.ours:.2f}{_spread(finding.std)}",
                "–" if finding.difference is None else f"{finding.difference:+.2f}",
                str(judgement.orders),
                f"[{COLOURS[None if unverified else finding.reached]}]{_word(finding, unverified)}[/]",
            )
    return table


def _name(judgement: Judgement) -> str:
    """The row, and below it the recipe of its evidence."""
    if judgement.recipe is None or not judgement.used:
        return judgement.row.name
    return f"{judgement.row.name}\n  [dim]{_by(judgement)}[/]"


def _by(judgement: Judgement) -> str:
    """The recipe of a judgement, in words."""
    if judgement.recipe not in (None, "undeclared"):
        return "the paper's recipe" if judgement.by_paper else f"with {judgement.recipe}"
    return "with the settings of no recipe"


def _word(finding: Finding, unverified: bool) -> str:
    """The verdict on a quantity; a miss is called one, unless the row's weights are unverified."""
    if unverified:
        return f"{finding.verdict}, unverified"
    return f"{finding.verdict}, missed" if finding.reached is False else finding.verdict


def _paper(finding: Finding) -> str:
    """The number to reach; a star marks one that corrects a misprint."""
    return str(finding.paper) if finding.target == finding.paper.mean else f"{finding.target:g}*"


def _spread(std: float | None) -> str:
    return "" if std is None else f" ± {std:.2f}"


def _print_evidence(judgements: Sequence[Judgement]) -> None:
    """Print each group of runs behind the numbers once, with the rows it is used for."""
    rows: dict[str, list[str]] = {}
    used: dict[str, RunGroup] = {}
    unused: dict[str, tuple[RunGroup, RunGroup | None]] = {}
    for judgement in judgements:
        for group in judgement.used:
            key = group.runs[0].settings()
            used[key] = group
            rows.setdefault(key, []).append(f"{judgement.row.name}, {_by(judgement)}")
        for group in judgement.unused:
            judged = next((g for g in judgement.used if _subject(g) == _subject(group)), None)
            unused[group.runs[0].settings()] = (group, judged)
    for key, group in used.items():
        out.print(f"\n[bold]{', '.join(dict.fromkeys(rows[key]))}[/]", highlight=False)
        out.print(_facts(group), highlight=False)
    others = [pair for key, pair in unused.items() if key not in used]
    if others:
        out.print("\n[bold]Not compared: runs with other settings[/]")
        for group, judged in others:
            out.print(f"  {escape(_other(group, judged))}", highlight=False)
    if used:
        out.print()


def _facts(group: RunGroup) -> Table:
    """Options, class orders, seeds, hashes, commit and device of a group of runs."""
    shared, runs = group.description, [run.description for run in group.runs]
    environments = [run.get("environment", {}) for run in runs]
    lines = {
        "runs": _numbers(group),
        "options": " ".join(f"{name}={value}" for name, value in _settings(group).items()),
        "orders": _each(f"{run['order']} (seed {run['seed']})" for run in runs),
        "encoder": f"{shared['encoder']['name']} {shared['encoder'].get('sha256')} ({group.weights})",
        "data": _each(" ".join(f"{part} {str(value)[:12]}" for part, value in run["data"].items()) for run in runs),
        "commit": _each(str(environment.get("commit")) for environment in environments),
        "device": _each(str(environment.get("device")) for environment in environments),
        "from": _each(str(run.place) for run in group.runs),
    }
    table = Table.grid(padding=(0, 2))
    for name, text in lines.items():
        table.add_row(f"  [dim]{name}[/]", escape(text))
    return table


_TELLING = ("epochs", "lr", "schedule", "augment", "others", "rotation_classes", "tta", "compose", "calibration")


def _other(group: RunGroup, judged: RunGroup | None) -> str:
    """A group's results, and how its settings differ from those of the judged group; without one, the main settings."""
    from tpl.bench.paper.recipes import differing

    mine = _settings(group)
    theirs = _settings(judged) if judged else mine
    names = differing([mine, theirs]) if judged else [name for name in _TELLING if name in mine]
    apart = " ".join(f"{name}={mine.get(name)}" + _dated(name, mine, theirs) for name in names)
    if judged and group.description["encoder"] != judged.description["encoder"]:
        apart += f" encoder sha256 {group.description['encoder'].get('sha256')}"
    places = _each(str(run.place) for run in group.runs)
    return f"{apart.strip()}: {_numbers(group)}; {_each(group.orders())}; {places}"


def _dated(name: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Which of two runs is from before an option existed, if one is."""
    if name in mine and name in theirs:
        return ""
    return " (new since the compared runs)" if name in mine else " (made before this option existed)"


def _subject(group: RunGroup) -> tuple[str, str]:
    return group.description["benchmark"], group.description["method"]


def _settings(group: RunGroup) -> dict[str, Any]:
    return {**group.description["options"], "precision": group.description.get("precision")}


def _numbers(group: RunGroup) -> str:
    measured = {title: group.measure(title.lower()) for title in ("Last", "AIA", "TIL")}
    numbers = (f"{title} {100 * value[0]:.2f}" for title, value in measured.items() if value is not None)
    return f"{' on '.join(reversed(_subject(group)))}, {', '.join(numbers)}"


def _each(texts: Iterable[str]) -> str:
    """The distinct texts, in order."""
    return ", ".join(dict.fromkeys(texts))
