"""Densities of a task's own images and of the other tasks' images in the feature space of its model, in a plane.

P_t is the distribution of task t's images, P_tc that of all other tasks', both as task t's model sees them. Where they
overlap, a likelihood of P_t alone misleads, and the ratio of the two is needed (the paper's appendix on task
distributions).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tpl.bench.outputs import check_unchanged, run_outputs
from tpl.bench.results import RunResult
from tpl.errors import TplError
from tpl.learner import Learner
from tpl.methods import Method, find_method
from tpl.methods.base import task_of_class

Array = NDArray[np.float64]

CELLS = 80  # of the grid, per side
ENOUGH = 2000  # images: more do not change the look of a density in the plane
SHARPER = 0.85  # factor on Scott's bandwidth, which is made for one mode: a task has one per class
FEWEST = 5  # images that a density needs


@dataclass(frozen=True)
class Density:
    """Points in the plane and their kernel density estimate on a grid."""

    points: Array  # [n, 2]
    values: Array  # [CELLS, CELLS], rows from low to high y; they sum to 1

    def level(self, share: float) -> float:
        """The density value on the border of the smallest region that contains `share` of the mass."""
        ordered = np.sort(self.values, axis=None)[::-1]
        return float(ordered[np.searchsorted(ordered.cumsum(), share)])


@dataclass(frozen=True)
class TaskDensities:
    """P_t and P_tc of one task, in the plane of the features' two principal components."""

    task: int  # counted from 1
    classes: tuple[str, ...]
    own: Density
    others: Density
    x: Array  # the grid's columns
    y: Array  # and rows
    explained: float  # share of the features' variance that lies in the plane

    @property
    def overlap(self) -> float:
        """The overlap coefficient: the integral of min(P_t, P_tc) in the plane, 0 apart to 1 alike."""
        return float(np.minimum(self.own.values, self.others.values).sum())

    def numbers(self) -> dict[str, Any]:
        """Numbers for JSON and tables."""
        return {
            "task": self.task,
            "classes": list(self.classes),
            "own_images": len(self.own.points),
            "other_images": len(self.others.points),
            "explained_variance": self.explained,
            "overlap": self.overlap,
        }


@dataclass(frozen=True)
class RunDensities:
    """The densities of some or all tasks of a run."""

    description: dict[str, Any]  # run.json
    images: str  # which images these are
    tasks: list[TaskDensities]


def run_densities(
    run: Path,
    data: Path | None = None,
    weights: Path | None = None,
    device: str = "auto",
    task: int | None = None,
    memory: bool = False,
) -> RunDensities:
    """The densities of every task, or of one (counted from 1), after the final task.

    They are of the run's test images, as `run_outputs` keeps them, or of the images in the replay memory.
    """
    description = RunResult.read(run).description
    name, count = description["method"], len(description["classes"])
    if not find_method(name).has_task_models:
        raise TplError(f"{run} is a run of {name}, which has no model of its own for each task; use a run of tpl.")
    if count < 2:
        raise TplError(f"{run} has a single task: there are no others to compare it with.")
    if task is not None and not 1 <= task <= count:
        raise TplError(f"{run} has the tasks 1 to {count}; there is no task {task}.")

    def load() -> Method:
        return Learner.load(run / "model", weights, device).method

    if memory:
        images, (seen, tasks) = "images in the replay memory", _remembered(load(), description)
    else:
        images = "test images" if description["validation"] is None else "held-out training images"
        outputs = run_outputs(run, description, data, load)
        seen, tasks = [each.features for each in outputs.models], outputs.tasks
    wanted = range(count) if task is None else (task - 1,)
    found = [
        densities(
            np.asarray(seen[t].cpu(), dtype=np.float64),
            np.asarray(tasks.cpu()) == t,
            t + 1,
            tuple(description["classes"][t]),
        )
        for t in wanted
    ]
    return RunDensities(description, images, found)


def _remembered(method: Method, description: dict[str, Any]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The features of the stored images under each task's model, and their tasks."""
    check_unchanged(method, description["classes"])
    seen = [method.memory_features(task) for task in range(len(method.task_classes_))]
    if method.memory is None or not len(method.memory):
        raise TplError("This run kept no images in memory; leave --memory out to see its test images.")
    return [z for z in seen if z is not None], task_of_class(method.task_classes_)[method.memory.labels]


def densities(features: Array, mine: NDArray[np.bool_], task: int, classes: tuple[str, ...]) -> TaskDensities:
    """Project features `[n, d]` and estimate the density of `mine` and of the rest."""
    fewest = min(int(mine.sum()), int((~mine).sum()))
    if fewest < FEWEST:
        raise TplError(f"Task {task} or the others have {fewest} images here; a density takes {FEWEST} at least.")
    points, explained = project(features, mine)
    sides = [points[mine], points[~mine]]
    try:
        kernels = [_kernel(evenly(side, ENOUGH)) for side in sides]
    except np.linalg.LinAlgError:
        raise TplError(f"The features of task {task} are all alike in some direction: they have no density.") from None
    # Three kernel widths beyond the outermost points lie all but a thousandth of the densities.
    reach = 3 * np.max([np.sqrt(np.diag(kernel.covariance)) for kernel in kernels], axis=0)
    low, high = points.min(axis=0) - reach, points.max(axis=0) + reach
    x, y = (np.linspace(low[i], high[i], CELLS) for i in (0, 1))
    grid = np.stack([axis.ravel() for axis in np.meshgrid(x, y)])
    values = [kernel(grid).reshape(CELLS, CELLS) for kernel in kernels]
    own, others = (Density(side, v / v.sum()) for side, v in zip(sides, values, strict=True))
    return TaskDensities(task, classes, own, others, x, y, explained)


def project(features: Array, mine: NDArray[np.bool_]) -> tuple[Array, float]:
    """The first two principal components `[n, 2]` of features, and the share of the variance they explain.

    Both sides have the same weight, however many images they have: otherwise the other tasks would decide the plane.
    """
    sides = features[mine], features[~mine]
    centred = features - (sides[0].mean(axis=0) + sides[1].mean(axis=0)) / 2
    weights = np.where(mine, 0.5 / len(sides[0]), 0.5 / len(sides[1]))
    values, vectors = np.linalg.eigh((centred.T * weights) @ centred)
    plane = vectors[:, :-3:-1]
    plane = plane * np.sign(plane[np.abs(plane).argmax(axis=0), (0, 1)])  # an eigenvector has no sign of its own
    return centred @ plane, float(values[-2:].sum() / max(values.sum(), np.finfo(float).tiny))


def _kernel(points: Array) -> Any:
    from scipy.stats import gaussian_kde

    return gaussian_kde(points.T, lambda kernel: SHARPER * kernel.scotts_factor())


def evenly(points: Array, most: int) -> Array:
    """All points, or `most` of them, evenly spaced by index."""
    rows = np.linspace(0, len(points) - 1, min(most, len(points))).astype(int)
    chosen: Array = points[rows]
    return chosen
