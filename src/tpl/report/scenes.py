"""Runs sorted for a report: scenes of comparable runs, in each a group a method, whose runs differ in order and seed.

A scene is one benchmark with one encoder. A method that was run with several settings has a group for each, named by
what sets them apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tpl.bench.metrics import Matrix, accuracy_so_far
from tpl.bench.results import RunResult
from tpl.report.find import FoundRun
from tpl.report.tables import CONTINUAL, Row, joint_for, mean_rows, role, run_row

JOINT = "joint"
_DIFFERENCES = 3  # settings named to tell two groups of a method apart


@dataclass(frozen=True)
class Group:
    """Runs of one method with one setting."""

    name: str
    runs: tuple[FoundRun, ...]

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.runs[0].what["method"])

    @property
    def role(self) -> str:
        """Whether the method bounds the others or competes with them."""
        return role(self.name, self.runs[0].result)

    def mean_matrix(self, kind: str) -> Matrix | None:
        """The accuracy matrix, averaged over the runs."""
        found = [run.result.matrices[kind] for run in self.runs if kind in run.result.matrices]
        return np.mean(found, axis=0) if len(found) == len(self.runs) else None

    def curve(self) -> tuple[Matrix, Matrix | None]:
        """The accuracy on all classes so far, its mean and (of two runs or more) its deviation."""
        with np.errstate(invalid="ignore"):  # tasks without test images have no accuracy
            lines = np.array([accuracy_so_far(r.result.matrices["cil"], r.result.sizes) for r in self.runs])
        return lines.mean(axis=0), lines.std(axis=0, ddof=1) if len(lines) > 1 else None

    def confusion(self) -> Matrix | None:
        """Share of each task's test images taken for each task, the mean over the runs; None if not recorded."""
        found = []
        for run in self.runs:
            if run.result.task_confusion is None:
                return None
            counts = np.array(run.result.task_confusion, dtype=np.float64)
            with np.errstate(invalid="ignore"):
                found.append(counts / counts.sum(axis=1, keepdims=True))
        return np.asarray(np.mean(found, axis=0))

    def classes(self) -> dict[str, tuple[float, float]] | None:
        """For every class its accuracy when just learned and at the end, means over the runs; None if not recorded."""
        found: dict[str, list[tuple[float, float]]] = {}
        for run in self.runs:
            stages = run.result.class_accuracy
            if stages is None:
                return None
            at = 0
            for task, names in enumerate(run.what["classes"]):
                for name in names:
                    first, final = stages[task][at], stages[-1][at]
                    at += 1
                    if first is not None and final is not None:
                        found.setdefault(str(name), []).append((first, final))
        return {
            name: (float(np.mean([p[0] for p in v])), float(np.mean([p[1] for p in v]))) for name, v in found.items()
        }


@dataclass(frozen=True)
class Scene:
    """Runs of several methods on one benchmark with one encoder."""

    title: str
    groups: tuple[Group, ...]  # lower bounds, methods, upper bounds

    @property
    def runs(self) -> list[FoundRun]:
        """All runs, group by group."""
        return [run for group in self.groups for run in group.runs]

    @property
    def benchmark(self) -> str:
        """The benchmark's name."""
        return str(self.runs[0].what["benchmark"])

    @property
    def encoder(self) -> str:
        """The encoder's name."""
        return self.runs[0].encoder

    @cached_property
    def joint(self) -> list[RunResult]:
        """Joint runs, by which forgetting is measured."""
        return [run.result for run in self.runs if run.what["method"] == JOINT]

    @cached_property
    def rows(self) -> list[Row]:
        """A row a group: means and deviations."""
        joint = next((group.name for group in self.groups if group.method == JOINT), None)
        return mean_rows({group.name: [run.result for run in group.runs] for group in self.groups}, joint)

    def run_rows(self) -> list[Row]:
        """A row a run, with what tells it apart."""
        rows = []
        for group in self.groups:
            for run in group.runs:
                bound = None if group.method == JOINT else joint_for(run.result, self.joint)
                row = run_row(group.name, run.result, bound)
                rows.append(row | {key: run.what[key] for key in ("order", "seed")} | {"place": run.place})
        return rows

    @property
    def orders(self) -> dict[str, FoundRun]:
        """A run of each class order, by its name."""
        return {str(run.what["order"]): run for run in reversed(self.runs)}

    @property
    def contest(self) -> bool:
        """Whether several methods compete."""
        return sum(group.role == CONTINUAL for group in self.groups) > 1


def scenes_of(runs: Sequence[FoundRun]) -> list[Scene]:
    """All runs, sorted."""
    scenes: dict[tuple[Any, ...], list[FoundRun]] = {}
    for run in runs:
        scenes.setdefault((run.what["benchmark"], run.encoder, run.sizes, run.what.get("validation")), []).append(run)
    made = []
    for (benchmark, encoder, sizes, validation), members in scenes.items():
        title = f"{benchmark}, {encoder}"
        alike = [key for key in scenes if key[:2] == (benchmark, encoder)]
        if len({key[2] for key in alike}) > 1:
            title += f", {len(sizes)} tasks of {_sizes(sizes)} classes"
        if len({key[3] for key in alike}) > 1:
            title += "" if validation is None else f", {100 * validation:g} % held out"
        made.append(Scene(title, tuple(_groups(members))))
    return made


def _sizes(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(set(sizes)) == 1 else "/".join(map(str, sizes))


def _groups(runs: Sequence[FoundRun]) -> list[Group]:
    by_method: dict[str, list[FoundRun]] = {}
    for run in runs:
        by_method.setdefault(str(run.what["method"]), []).append(run)
    groups: list[Group] = []
    for method, members in by_method.items():
        for group in _settings_apart(method, members):
            twins = sum(other.name.partition(" #")[0] == group.name for other in groups)
            groups.append(Group(f"{group.name} #{twins + 1}", group.runs) if twins else group)
    order = [row["name"] for row in mean_rows({group.name: [group.runs[0].result] for group in groups})]
    return sorted(groups, key=lambda group: order.index(group.name))


def _settings_apart(method: str, runs: Sequence[FoundRun]) -> Iterable[Group]:
    """The groups of one method: by settings; runs repeated with all the same are not averaged but named by folder."""
    by_settings: dict[str, list[FoundRun]] = {}
    for run in runs:
        by_settings.setdefault(json.dumps(_settings(run), sort_keys=True), []).append(run)
    known = [_settings(members[0]) for members in by_settings.values()]
    keys = sorted({key for settings in known for key in settings})
    differing = [key for key in keys if len({json.dumps(s.get(key)) for s in known}) > 1]
    some = differing[:_DIFFERENCES]
    if len({json.dumps([s.get(key) for key in some]) for s in known}) < len(known):
        some = differing  # the first few do not tell them apart
    for settings, members in zip(known, by_settings.values(), strict=True):
        named = [f"{key} {_short(settings.get(key))}" for key in some]
        name = ", ".join([method, *named, *(["…"] if len(some) < len(differing) else [])])
        if _all_different(members):
            yield Group(name, tuple(members))
            continue
        folders: dict[str, list[FoundRun]] = {}
        for run in members:
            folders.setdefault(str(run.place.parent), []).append(run)
        if not all(map(_all_different, folders.values())):
            folders = {str(run.place): [run] for run in members}
        yield from (Group(f"{name} ({folder})", tuple(inside)) for folder, inside in folders.items())


def _all_different(runs: Sequence[FoundRun]) -> bool:
    """Whether no class order comes twice with the same seed."""
    return len({(json.dumps(run.what["classes"]), run.what["seed"]) for run in runs}) == len(runs)


def _settings(run: FoundRun) -> dict[str, Any]:
    """All that may change a number except class order and seed."""
    weights = str(run.what["encoder"].get("sha256"))[:8]
    return dict(run.what["options"]) | {"precision": run.what.get("precision"), "weights": weights}


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 16 else text[:15] + "…"
