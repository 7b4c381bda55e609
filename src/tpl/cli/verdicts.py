"""How rows of the paper and their verdicts look: on a terminal, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from tpl.bench.paper import QUANTITIES, Row
from tpl.bench.paper.judge import Finding, Group, Judgement
from tpl.bench.reproduce import obstacle
from tpl.cli.app import out, print_json

_COLOURS = {"reached": "green", "missed": "red", "no evidence": "yellow", "shown": "default"}


def print_list(rows: Sequence[Row], as_json: bool) -> None:
    """Rows, what the paper prints, and whether this program can run them."""
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
    table.add_column("can it be run?")
    for row in rows:
        numbers = ", ".join(f"{QUANTITIES[key].title} {value}" for key, value in row.values.items())
        problem = problems[row.name]
        table.add_row(row.name, numbers, f"[yellow]{problem}[/]" if problem else "[green]yes[/]")
    out.print(table)


def print_verdicts(judgements: Sequence[Judgement], tolerance: float, as_json: bool) -> None:
    """Paper against ours, what is odd about the rows, and the runs behind the numbers."""
    count = Counter(judgement.verdict for judgement in judgements)
    if as_json:
        rows = [judgement.to_dict() for judgement in judgements]
        print_json({"tolerance": tolerance, "verdicts": dict(count), "rows": rows})
        return
    out.print(_table(judgements))
    for judgement in judgements:
        for mark, text in (("no evidence", judgement.reason), ("misprint", judgement.row.misprint)):
            if text:
                out.print(f"[yellow]{mark}:[/] {judgement.row.name}: {escape(text)}", highlight=False)
    _print_evidence(judgements)
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in count.items())
    meaning = f"Reached: at most {tolerance:g} points worse than the paper; n: class orders; ±: deviation over them."
    out.print(f"Rows: [bold]{verdicts}[/]. {meaning}", highlight=False)


def _table(judgements: Sequence[Judgement]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("row", overflow="fold")
    table.add_column("")
    for title in ("paper", "ours", "diff.", "n"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for judgement in judgements:
        for index, finding in enumerate(judgement.findings):
            table.add_row(
                judgement.row.name if index == 0 else "",
                QUANTITIES[finding.quantity].title,
                _paper(finding),
                "–" if finding.ours is None else f"{finding.ours:.2f}{_spread(finding.std)}",
                "–" if finding.difference is None else f"{finding.difference:+.2f}",
                str(judgement.orders),
                f"[{_COLOURS[finding.verdict]}]{finding.verdict}[/]",
            )
    return table


def _paper(finding: Finding) -> str:
    """The number to reach; one that replaces a misprint carries a star."""
    return str(finding.paper) if finding.target == finding.paper.mean else f"{finding.target:g}*"


def _spread(std: float | None) -> str:
    return "" if std is None else f" ± {std:.2f}"


def _print_evidence(judgements: Sequence[Judgement]) -> None:
    """The runs behind the numbers, each group once, with the rows that rest on it."""
    rows: dict[str, list[str]] = {}
    used: dict[str, Group] = {}
    unused: dict[str, tuple[Group, Group]] = {}
    for judgement in judgements:
        for group in judgement.used:
            key = group.runs[0].settings()
            used[key] = group
            rows.setdefault(key, []).append(judgement.row.name)
        for group in judgement.unused:
            judged = next(g for g in judgement.used if _subject(g) == _subject(group))
            unused[group.runs[0].settings()] = (group, judged)
    for key, group in used.items():
        out.print(f"\n[bold]{', '.join(dict.fromkeys(rows[key]))}[/]", highlight=False)
        out.print(_facts(group), highlight=False)
    others = [pair for key, pair in unused.items() if key not in used]
    if others:
        out.print("\n[bold]Not judged: runs with other settings[/]")
        for group, judged in others:
            out.print(f"  {escape(_other(group, judged))}", highlight=False)
    if used:
        out.print()


def _facts(group: Group) -> Table:
    """Settings, class orders, seeds, hashes, commit and device of a group of runs."""
    shared, runs = group.description, [run.description for run in group.runs]
    environments = [run.get("environment", {}) for run in runs]
    lines = {
        "runs": _numbers(group),
        "options": " ".join(f"{name}={value}" for name, value in _settings(group).items()),
        "orders": _each(f"{run['order']} (seed {run['seed']})" for run in runs),
        "encoder": f"{shared['encoder']['name']} {shared['encoder'].get('sha256')}",
        "data": _each(" ".join(f"{part} {str(value)[:12]}" for part, value in run["data"].items()) for run in runs),
        "commit": _each(str(environment.get("commit")) for environment in environments),
        "device": _each(str(environment.get("device")) for environment in environments),
        "from": _each(str(run.place) for run in group.runs),
    }
    table = Table.grid(padding=(0, 2))
    for name, text in lines.items():
        table.add_row(f"  [dim]{name}[/]", escape(text))
    return table


def _other(group: Group, judged: Group) -> str:
    """What sets a group apart from the judged one, and what it reached."""
    mine, theirs = _settings(group), _settings(judged)
    names = [*mine, *(name for name in theirs if name not in mine)]
    apart = " ".join(f"{name}={mine.get(name)}" for name in names if mine.get(name) != theirs.get(name))
    if group.description["encoder"] != judged.description["encoder"]:
        apart += f" encoder sha256 {group.description['encoder'].get('sha256')}"
    places = _each(str(run.place) for run in group.runs)
    return f"{apart.strip()}: {_numbers(group)}; {_each(group.orders())}; {places}"


def _subject(group: Group) -> tuple[str, str]:
    return group.description["benchmark"], group.description["method"]


def _settings(group: Group) -> dict[str, Any]:
    return {**group.description["options"], "precision": group.description.get("precision")}


def _numbers(group: Group) -> str:
    measured = {title: group.measure(title.lower()) for title in ("Last", "AIA", "TIL")}
    numbers = (f"{title} {100 * value[0]:.2f}" for title, value in measured.items() if value is not None)
    return f"{' on '.join(reversed(_subject(group)))}, {', '.join(numbers)}"


def _each(texts: Iterable[str]) -> str:
    """The different texts, in order."""
    return ", ".join(dict.fromkeys(texts))
