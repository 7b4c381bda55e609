"""Densities of features as a picture: each task's own images and those of the other tasks, under the task's model."""

from __future__ import annotations

import tempfile
import textwrap
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from tpl.bench.densities import Density, RunDensities, TaskDensities, evenly, run_densities
from tpl.bench.outputs import read_outputs
from tpl.bench.results import RunResult
from tpl.errors import TplError
from tpl.report.pictures import FOOT, GAP, HEAD, INK, OTHERS, OWN, QUIET, RULE, picture, title_and_legend, write_text

SHARES = (0.9, 0.7, 0.5, 0.3, 0.1)  # of a density, inside the contours
DOTS = 250  # images shown for each of the two densities; more would hide the contours
PANEL, TITLE, NARROWEST = 2.3, 0.42, 6.0  # inches
LETTERS = 22  # of class names that fit above a panel


def draw_densities(found: RunDensities, file: Path) -> None:
    """Draw the densities of a trained model's features, P_t and P_tc, in one panel for each task."""
    columns = columns_for(len(found.tasks))
    rows = -(-len(found.tasks) // columns)
    side = max(PANEL, NARROWEST / columns - GAP)
    width, height = columns * (side + GAP) + GAP, HEAD + rows * (TITLE + side) + FOOT
    with picture(file, width, height) as figure:
        for number, task in enumerate(found.tasks):
            row, column = divmod(number, columns)
            left, bottom = GAP + column * (side + GAP), height - HEAD - (row + 1) * (TITLE + side)
            _panel(figure.add_axes((left / width, bottom / height, side / width, side / height)), task)
        what = found.description
        title = f"{what['benchmark']}, {what['method']}, class order {what['order']}"
        title_and_legend(figure, title, "$P_t$: the task's own images", "$P_{t^c}$: images of the other tasks")
        caption = (
            f"Features of {found.images} under each task's model, in their first two principal components. Contours "
            f"hold {', '.join(f'{100 * s:.0f}' for s in SHARES[:-1])} and {100 * SHARES[-1]:.0f} % of a density."
        )
        write_text(figure, textwrap.fill(caption, int(14.5 * (width - 2 * GAP))), height - FOOT / 2, 9, QUIET)


def density_png(run: Path) -> tuple[bytes | None, str]:
    """The densities of a run as PNG and what they show; or None and the reason why there are none.

    Only stored outputs (RUN/outputs) are used: no image is read and no network is evaluated.
    """
    try:
        if read_outputs(run, RunResult.read(run).description) is None:
            return None, f"it has no stored outputs; `tpl figure densities {run}` makes them"
        found = run_densities(run)
    except TplError as error:
        return None, str(error)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "densities.png"
        draw_densities(found, file)
        return file.read_bytes(), found.images


def columns_for(panels: int) -> int:
    """The number of columns, at most five, with the fewest empty panels; the largest of equals."""
    return panels if panels <= 5 else min((5, 4, 3), key=lambda columns: -panels % columns)


def _panel(axes: Axes, task: TaskDensities) -> None:
    for density, colour in ((task.others, OTHERS), (task.own, OWN)):
        _contours(axes, task, density, colour)
    _frame(axes, task)
    names = ", ".join(task.classes)
    names = names if len(names) <= LETTERS else f"{len(task.classes)} classes"
    axes.set_title(f"Task {task.task}: {names}", fontsize=10.5, color=INK, loc="left", pad=5, parse_math=False)
    axes.set_title(f"overlap {task.overlap:.2f}", fontsize=8.5, color=QUIET, loc="right", pad=5)


def _contours(axes: Axes, task: TaskDensities, density: Density, colour: str) -> None:
    levels = np.unique([density.level(share) for share in SHARES])
    fills = [(colour, strength) for strength in np.linspace(0.1, 0.6, len(levels))]
    axes.contourf(task.x, task.y, density.values, [*levels, 2 * density.values.max()], colors=fills)
    axes.contour(task.x, task.y, density.values, levels, colors=colour, linewidths=0.9)
    x, y = evenly(density.points, DOTS).T
    axes.scatter(x, y, s=2.5, color=colour, alpha=0.45, linewidths=0)


def _frame(axes: Axes, task: TaskDensities) -> None:
    """Set equal limits around the outermost contours; no ticks, since principal components have no units."""
    inside = np.maximum(*(density.values / density.level(SHARES[0]) for density in (task.others, task.own))) >= 1
    x, y = ((axis[hit].min(), axis[hit].max()) for axis, hit in ((task.x, inside.any(0)), (task.y, inside.any(1))))
    half = 0.56 * max(x[1] - x[0], y[1] - y[0])
    axes.set_xlim(sum(x) / 2 - half, sum(x) / 2 + half)
    axes.set_ylim(sum(y) / 2 - half, sum(y) / 2 + half)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color(RULE)
