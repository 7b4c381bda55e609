"""Finished runs found on disk, grouped into experiments whose runs can be compared.

An experiment is one benchmark with one encoder. It has a group of runs for each method, which differ in class order and
seed only; a method that was run with several settings has a group for each, named by the settings that differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from tpl.bench.bounds import bounds_of, fits, is_bound
from tpl.bench.metrics import Matrix, accuracy_so_far
from tpl.bench.paper.evidence import Run
from tpl.bench.paper.recipes import differing
from tpl.bench.results import RunResult
from tpl.errors import TplError
from tpl.report.columns import CONTINUAL, Row, mean_rows, role, run_row
from tpl.report.labels import SHOWN_OPTIONS, method_label, options_in_label, shown_option

# Required in run.json; anything else may be missing.
_REQUIRED = ("benchmark", "method", "options", "seed", "order", "classes", "test_images", "encoder", "data")


@dataclass(frozen=True)
class FoundRun(Run):
    """A finished run in a report."""

    @property
    def encoder(self) -> str:
        """The encoder's name."""
        return str(self.description["encoder"]["name"])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of classes of each task."""
        return tuple(len(names) for names in self.description["classes"])


@dataclass
class Findings:
    """The content of a report."""

    runs: list[FoundRun] = field(default_factory=list)
    unfinished: list[Path] = field(default_factory=list)  # runs without results, in a folder of runs
    studies: list[dict[str, Any]] = field(default_factory=list)  # study.json of `tpl ood-study`


def find_runs(paths: Sequence[Path]) -> Findings:
    """The given run directories, and every run in or below the other given folders. Each run is listed once."""
    found, seen = Findings(), set[Path]()
    for path in paths:
        if not path.is_dir():
            raise TplError(f"{path} holds no finished run: there is no such folder.")
        inside = [file.parent for file in sorted(path.rglob("run.json"))]
        named = (path / "run.json").exists()
        if not inside:
            raise TplError(f"{path} holds no finished run; name run directories or the --out of a suite.")
        for folder in inside:
            if folder.resolve() in seen:
                continue
            seen.add(folder.resolve())
            if (folder / "results.json").exists() or (named and folder == path):
                found.runs.append(read_run(folder))
            else:
                found.unfinished.append(folder)
        for file in sorted(path.rglob("study.json")):
            if file.resolve() not in seen:
                seen.add(file.resolve())
                found.studies.append(_study(file))
    if not found.runs:
        raise TplError(f"{paths[0]} holds no finished run, only {len(found.unfinished)} that have not ended.")
    return found


def read_run(folder: Path) -> FoundRun:
    """Read one finished run; an incomplete or inconsistent one is an error."""
    result = RunResult.read(folder)
    description = result.description
    missing = [key for key in _REQUIRED if key not in description]
    if missing or "name" not in (description["encoder"] or {}) or "cil" not in result.matrices:
        raise TplError(f"{folder} holds no finished run (run.json lacks {', '.join(missing) or 'a name or a matrix'}).")
    if not _same_tasks(result):
        raise TplError(f"{folder} holds no finished run (results.json has other tasks than run.json).")
    return FoundRun(folder, result)


def _same_tasks(result: RunResult) -> bool:
    """Whether results.json has as many tasks and classes as run.json."""
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


@dataclass(frozen=True)
class Group:
    """Runs of one method with the same settings, in several class orders and seeds."""

    name: str
    runs: tuple[FoundRun, ...]

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.runs[0].description["method"])

    @property
    def role(self) -> str:
        """Whether the method is a lower bound, an upper bound or a continual method."""
        return role(self.runs[0].result)

    def mean_matrix(self, kind: str) -> Matrix | None:
        """The accuracy matrix, averaged over the runs."""
        found = [run.result.matrices[kind] for run in self.runs if kind in run.result.matrices]
        return np.mean(found, axis=0) if len(found) == len(self.runs) else None

    def curve(self) -> tuple[Matrix, Matrix | None]:
        """Accuracy on all classes so far after each task: mean and, of two runs or more, standard deviation."""
        with np.errstate(invalid="ignore"):  # tasks without test images have no accuracy
            lines = np.array([accuracy_so_far(r.result.matrices["cil"], r.result.sizes) for r in self.runs])
        return lines.mean(axis=0), lines.std(axis=0, ddof=1) if len(lines) > 1 else None

    def confusion(self) -> Matrix | None:
        """Share of each task's test images assigned to each task, mean over the runs; None if not recorded."""
        found = []
        for run in self.runs:
            if run.result.task_confusion is None:
                return None
            counts = np.array(run.result.task_confusion, dtype=np.float64)
            with np.errstate(invalid="ignore"):
                found.append(counts / counts.sum(axis=1, keepdims=True))
        return np.asarray(np.mean(found, axis=0))

    def classes(self) -> dict[str, tuple[float, float]] | None:
        """Accuracy of each class right after learning and at the end, means over the runs; None if not recorded."""
        found: dict[str, list[tuple[float, float]]] = {}
        for run in self.runs:
            stages = run.result.class_accuracy
            if stages is None:
                return None
            at = 0
            for task, names in enumerate(run.description["classes"]):
                for name in names:
                    first, final = stages[task][at], stages[-1][at]
                    at += 1
                    if first is not None and final is not None:
                        found.setdefault(str(name), []).append((first, final))
        return {
            name: (float(np.mean([p[0] for p in v])), float(np.mean([p[1] for p in v]))) for name, v in found.items()
        }


@dataclass(frozen=True)
class Experiment:
    """Runs of several methods on one benchmark with one encoder."""

    title: str
    groups: tuple[Group, ...]  # lower bounds, methods, upper bounds
    others: tuple[RunResult, ...] = ()  # upper bounds of other experiments, over the same images in other tasks

    @property
    def runs(self) -> list[FoundRun]:
        """All runs, group by group."""
        return [run for group in self.groups for run in group.runs]

    @property
    def benchmark(self) -> str:
        """The benchmark's name."""
        return str(self.runs[0].description["benchmark"])

    @property
    def encoder(self) -> str:
        """The encoder's name."""
        return self.runs[0].encoder

    @cached_property
    def bounds(self) -> list[RunResult]:
        """The upper bounds, which forgetting is measured against: of this experiment, then of others."""
        return [*(run.result for run in self.runs if is_bound(run.description)), *self.others]

    def bounds_of(self, run: FoundRun) -> list[RunResult]:
        """The upper bounds among which a run's is chosen; none for a bound itself."""
        return [] if is_bound(run.description) else bounds_of(run.result, self.bounds)

    @cached_property
    def rows(self) -> list[Row]:
        """One row for each group, and for each part of its predictions: means and standard deviations."""
        return mean_rows({group.name: [run.result for run in group.runs] for group in self.groups}, self.others)

    def run_rows(self) -> list[Row]:
        """One row for each run, with its class order, seed and directory."""
        rows = []
        for group in self.groups:
            for run in group.runs:
                row = run_row(group.name, run.result, self.bounds)
                rows.append(row | {key: run.description[key] for key in ("order", "seed")} | {"place": run.place})
        return rows

    @property
    def orders(self) -> dict[str, FoundRun]:
        """The first run of each class order, by the order's name."""
        return {str(run.description["order"]): run for run in reversed(self.runs)}

    @property
    def has_rivals(self) -> bool:
        """Whether there are two continual methods or more."""
        return sum(group.role == CONTINUAL for group in self.groups) > 1


def group_runs(runs: Sequence[FoundRun]) -> list[Experiment]:
    """Sort runs into experiments."""
    experiments: dict[tuple[Any, ...], list[FoundRun]] = {}
    for run in runs:
        experiments.setdefault(
            (run.description["benchmark"], run.encoder, run.sizes, run.description.get("validation")), []
        ).append(run)
    bounds = [run for run in runs if is_bound(run.description)]
    made = []
    for (benchmark, encoder, sizes, validation), members in experiments.items():
        title = f"{benchmark}, {encoder}"
        alike = [key for key in experiments if key[:2] == (benchmark, encoder)]
        if len({key[2] for key in alike}) > 1:
            title += f", {len(sizes)} tasks of {_sizes(sizes)} classes"
        if len({key[3] for key in alike}) > 1:
            title += "" if validation is None else f", {100 * validation:g} % held out"
        foreign = [bound.result for bound in bounds if not any(bound is member for member in members)]
        others = tuple(bound for bound in foreign if any(fits(member.result, bound) for member in members))
        made.append(Experiment(title, tuple(_groups(members)), others))
    return made


def _sizes(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(set(sizes)) == 1 else "/".join(map(str, sizes))


def _groups(runs: Sequence[FoundRun]) -> list[Group]:
    by_method: dict[str, list[FoundRun]] = {}
    for run in runs:
        by_method.setdefault(str(run.description["method"]), []).append(run)
    groups: list[Group] = []
    for members in by_method.values():
        for group in _by_settings(members):
            twins = sum(other.name.partition(" #")[0] == group.name for other in groups)
            groups.append(Group(f"{group.name} #{twins + 1}", group.runs) if twins else group)
    order = [row["name"] for row in mean_rows({group.name: [group.runs[0].result] for group in groups})]
    return sorted(groups, key=lambda group: order.index(group.name))


def _by_settings(runs: Sequence[FoundRun]) -> Iterable[Group]:
    """One method's runs grouped by settings; repeated runs are not averaged but listed by directory."""
    by_settings: dict[str, list[FoundRun]] = {}
    for run in runs:
        by_settings.setdefault(json.dumps(_settings(run), sort_keys=True), []).append(run)
    for name, members in zip(_names([each[0] for each in by_settings.values()]), by_settings.values(), strict=True):
        if _all_different(members):
            yield Group(name, tuple(members))
            continue
        folders: dict[str, list[FoundRun]] = {}
        for run in members:
            folders.setdefault(str(run.place.parent), []).append(run)
        if not all(map(_all_different, folders.values())):
            folders = {str(run.place): [run] for run in members}
        yield from (Group(f"{name} ({folder})", tuple(inside)) for folder, inside in folders.items())


def _names(runs: Sequence[FoundRun]) -> list[str]:
    """Names for runs of one method with different settings: its labels, and what they leave open."""
    known, labels = [_settings(run) for run in runs], [method_label(run.description) for run in runs]
    apart = sorted(differing(known))
    unsaid = []  # for each run the settings to name: what its label's other runs have otherwise comes first
    for run, label in zip(runs, labels, strict=True):
        within = sorted(differing([s for s, other in zip(known, labels, strict=True) if other == label]))
        said = options_in_label(run.description)
        unsaid.append(within + [key for key in apart if key not in said and key not in within])
    for most in (SHOWN_OPTIONS, None):  # the first few may not be enough to distinguish the runs
        names = []
        for label, keys, settings in zip(labels, unsaid, known, strict=True):
            named = [f"{key} {shown_option(settings.get(key))}" for key in keys[:most]]
            names.append(", ".join([label, *named, *(["…"] if keys[:most] != keys else [])]))
        if len(set(names)) == len(names):
            break
    return names


def _all_different(runs: Sequence[FoundRun]) -> bool:
    """Whether no two runs have the same class order and seed."""
    return len({(json.dumps(run.description["classes"]), run.description["seed"]) for run in runs}) == len(runs)


def _settings(run: FoundRun) -> dict[str, Any]:
    """Everything that may change a result except class order and seed."""
    weights = str(run.description["encoder"].get("sha256"))[:8]
    return dict(run.description["options"]) | {"precision": run.description.get("precision"), "weights": weights}
