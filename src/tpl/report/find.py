"""Finished runs on disk: those named, and those in the folders named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from tpl.bench.results import RunResult
from tpl.errors import TplError

# What a report cannot do without; anything else of run.json may be missing.
_NEEDED = ("benchmark", "method", "options", "seed", "order", "classes", "test_images", "encoder", "data")


@dataclass(frozen=True)
class FoundRun:
    """A finished run and where it lies."""

    place: Path
    result: RunResult

    @property
    def what(self) -> dict[str, Any]:
        """run.json."""
        return self.result.description

    @property
    def encoder(self) -> str:
        """The encoder's name."""
        return str(self.what["encoder"]["name"])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Classes a task."""
        return tuple(len(names) for names in self.what["classes"])


@dataclass
class Findings:
    """All that a report is made from."""

    runs: list[FoundRun] = field(default_factory=list)
    unfinished: list[Path] = field(default_factory=list)  # runs without results, in a folder of runs
    studies: list[dict[str, Any]] = field(default_factory=list)  # study.json of `tpl ood-study`


def find_runs(paths: Sequence[Path]) -> Findings:
    """The runs named, and every run in or below a folder named, such as a suite's. Each counts once."""
    found, seen = Findings(), set[Path]()
    for path in paths:
        if not path.is_dir():
            raise TplError(f"{path} holds no finished run: there is no such folder.")
        inside = [file.parent for file in sorted(path.rglob("run.json"))]
        named = (path / "run.json").exists()
        if not inside:
            raise TplError(f"{path} holds no finished run; name run directories or the --out of a suite.")
        for place in inside:
            if place.resolve() in seen:
                continue
            seen.add(place.resolve())
            if (place / "results.json").exists() or (named and place == path):
                found.runs.append(read_run(place))
            else:
                found.unfinished.append(place)
        for file in sorted(path.rglob("study.json")):
            if file.resolve() not in seen:
                seen.add(file.resolve())
                found.studies.append(_study(file))
    if not found.runs:
        raise TplError(f"{paths[0]} holds no finished run, only {len(found.unfinished)} that have not ended.")
    return found


def read_run(place: Path) -> FoundRun:
    """One finished run; what is not one is refused with a word on why."""
    result = RunResult.read(place)
    what = result.description
    missing = [key for key in _NEEDED if key not in what]
    if missing or "name" not in what["encoder"] or "cil" not in result.matrices:
        raise TplError(f"{place} holds no finished run (run.json lacks {', '.join(missing) or 'a name or a matrix'}).")
    if not _same_tasks(result):
        raise TplError(f"{place} holds no finished run (results.json tells of other tasks than run.json).")
    return FoundRun(place, result)


def _same_tasks(result: RunResult) -> bool:
    """Whether all that a run measured is about the tasks it describes."""
    sizes = [len(names) for names in result.description["classes"]]
    tasks, confusion, classes = len(sizes), result.task_confusion, result.class_accuracy
    return (
        len(result.description["test_images"]) == tasks
        and all(len(matrix) == tasks for matrix in result.matrices.values())
        and (confusion is None or [len(row) for row in confusion] == [tasks] * tasks)
        and (classes is None or [len(row) for row in classes] == list(accumulate(sizes)))
    )


def _study(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        for row in content["rows"]:
            _ = float(row["auroc"]), float(row["last"]), row["detector"], row["kind"]
        _ = content["benchmark"], content["encoder"], content["orders"], content["fit"]["last"], content["paper_fit"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TplError(f"{file} is not what `tpl ood-study` writes ({error}); move it away.") from error
    result: dict[str, Any] = content
    return result
