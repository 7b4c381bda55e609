"""The figures of page and picture files: accuracy after each task, and matrices of tasks by tasks.

Each is drawn in a palette: the page's, for an SVG that takes on its colours, or one for pictures that stand alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from numpy.typing import NDArray
from sklearn.isotonic import isotonic_regression

from tpl.bench.metrics import Matrix
from tpl.report.svg import PAGE, Palette, blank, to_svg
from tpl.report.tables import LOWER, UPPER

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = {LOWER: (0, (1.2, 2.2)), UPPER: (0, (5, 2.5))}
QUIET = 0.72  # opacity of axis titles

# One scale for every heatmap: 0 is pale, 100 is dark, neither as pale nor as dark as a page can be.
SCALE = LinearSegmentedColormap.from_list("accuracy", matplotlib.colormaps["YlGnBu"](np.linspace(0.06, 0.88, 64)))
NUMBERS_UP_TO = 10  # tasks; beyond, numbers would not fit in the cells


@dataclass(frozen=True)
class Line:
    """Accuracy (a fraction) after each task: a run's, or the mean of several and its deviation."""

    name: str
    values: Matrix
    role: str
    spread: Matrix | None = None

    @property
    def end(self) -> tuple[float, float] | None:
        """The last point measured: its task, counted from 1, and percent."""
        measured = np.flatnonzero(~np.isnan(self.values))
        return (float(measured[-1] + 1), 100 * float(self.values[measured[-1]])) if len(measured) else None


def scale_colours(steps: int = 9) -> list[str]:
    """The heatmaps' colours from 0 to 100 percent."""
    return [to_hex(SCALE(x)) for x in np.linspace(0, 1, steps)]


def curves(lines: Sequence[Line], classes: Sequence[int], ident: str, narrow: bool = False) -> str:
    """Accuracy on all classes so far after each task, labelled at the lines' ends, for a page."""
    ends = ", ".join(f"{line.name} {line.end[1]:.1f}" for line in lines if line.end)
    label = f"Accuracy on all classes so far, in percent, after each task. At the end: {ends}."
    return to_svg(draw_curves(lines, classes, PAGE, narrow), ident, label)


def draw_curves(lines: Sequence[Line], classes: Sequence[int], palette: Palette, narrow: bool = False) -> Figure:
    """Accuracy on all classes so far after each task, labelled at the lines' ends.

    `classes` are the numbers of classes seen after each task. Bounds are dashed and in the text's colour; a pale band
    is the deviation of several runs.
    """
    stages = len(classes)
    letters = 14 if narrow else 30
    names = [name if len(name) <= letters else name[: letters - 1] + "…" for name in (line.name for line in lines)]
    width, height = (350.0, 330.0) if narrow else (960.0, 440.0)
    height = max(height, 17.0 * len(lines) + 80)
    top, bottom = 32, 46
    right = 50 + 6.4 * max((len(name) for name in names), default=0)
    figure, axes = blank(width, height, 30 if narrow else 74, right, top, bottom, palette.ink)
    low, high = _limits(lines)
    axes.set_ylim(low, high)
    margin = 0.03 * (stages - 1) if stages > 1 else 0.5
    axes.set_xlim(1 - margin, stages + (margin if stages == 1 else 0))
    axes.grid(axis="y", color=palette.ink, alpha=0.14, linewidth=0.8, clip_on=False)
    step = -(-stages // (6 if narrow else 20))
    ticks = [t for t in range(1, stages + 1) if (stages - t) % step == 0]
    axes.set_xticks(ticks, [str(t) for t in ticks])
    ink = palette.ink
    for t in ticks:
        note(axes, str(classes[t - 1]), (t, low), (0, -34), "data", ink, ha="center")
    if narrow:
        note(axes, "task", (1, 0), (12, -16), "axes fraction", ink)
        note(axes, "classes", (1, 0), (12, -34), "axes fraction", ink)
    else:
        note(axes, "after task", (0, 0), (-6, -16), "axes fraction", ink, ha="right")
        note(axes, "classes", (0, 0), (-6, -34), "axes fraction", ink, ha="right")
    note(axes, "Accuracy on all classes so far, %", (0, 1), (-24, 20), "axes fraction", ink)
    _draw(axes, lines, names, (height - top - bottom) / (high - low), palette)
    return figure


def heatmap(matrix: Matrix, ident: str, name: str) -> str:
    """Accuracy on each task (columns) after each task (rows), on a scale from 0 to 100 percent, for a page."""
    final = ", ".join(f"{100 * v:.1f}" for v in (matrix[-1] if len(matrix) else ()) if not np.isnan(v))
    label = f"{name}: accuracy on each task after each task, in percent. After the final task: {final}."
    return to_svg(draw_matrix(matrix, "accuracy on task", "after learning task", PAGE), ident, label)


def confusion_map(matrix: Matrix, ident: str, name: str) -> str:
    """Share of each task's images (rows) taken for each task (columns), for a page."""
    right = ", ".join(f"{100 * v:.1f}" for v in np.diag(matrix) if not np.isnan(v))
    label = f"{name}: share of each task's test images taken for each task. Taken for their own task, percent: {right}."
    return to_svg(draw_matrix(matrix, "taken for task", "images of task", PAGE), ident, label)


def draw_matrix(matrix: Matrix, across: str, down: str, palette: Palette) -> Figure:
    """Fractions as squares on one scale from 0 to 100 percent; what is not a number stays empty."""
    count = len(matrix)
    figure, axes = blank(340, 330, left=42, right=4, top=4, bottom=40, ink=palette.ink)
    axes.set_xlim(0.5, count + 0.5)
    axes.set_ylim(count + 0.5, 0.5)
    side = 0.95 if count <= 2 * NUMBERS_UP_TO else 1.0
    for t, i in np.argwhere(~np.isnan(matrix)).tolist():
        value = float(matrix[t, i])
        corner, colour = (i + 1 - side / 2, t + 1 - side / 2), SCALE(value)
        if count > NUMBERS_UP_TO:
            axes.add_patch(Rectangle(corner, side, side, facecolor=colour, linewidth=0))
            continue
        axes.add_patch(
            FancyBboxPatch(corner, side, side, "round,pad=0,rounding_size=0.06", facecolor=colour, linewidth=0)
        )
        ink = "#ffffff" if _luminance(colour) < 0.3 else "#10202c"
        text = f"{100 * value:.1f}" if value < 0.9995 else "100"
        size = float(np.clip(80 / count, 10.5, 15))
        axes.text(i + 1, t + 1, text, ha="center", va="center_baseline", fontsize=size, color=ink)
    step = -(-count // 10)
    ticks = [t for t in range(1, count + 1) if (count - t) % step == 0]
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    axes.set_xlabel(across, fontsize=11, color=palette.ink, alpha=QUIET)
    axes.set_ylabel(down, fontsize=11, color=palette.ink, alpha=QUIET)
    return figure


def note(
    axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], coords: str, ink: str,
    ha: str = "left",
) -> None:  # fmt: skip
    """Quiet text, `offset` pixels away from a point."""
    axes.annotate(
        text, at, offset, coords, "offset points", ha=ha, va="center", fontsize=11, color=ink, alpha=QUIET,
        annotation_clip=False,
    )  # fmt: skip


def _draw(axes: Axes, lines: Sequence[Line], names: Sequence[str], pixels: float, palette: Palette) -> None:
    """The lines and their labels, which keep clear of each other; `pixels` are those of one percent point."""
    number = 0
    labels = []
    for line, name in zip(lines, names, strict=True):
        bound = line.role in _DASHES
        colour = palette.ink if bound else palette.series[number % len(palette.series)]
        marker = MARKERS[number % len(MARKERS)] if not bound else "o" if len(line.values) == 1 else None
        number += not bound
        stages = np.arange(1, len(line.values) + 1)
        if line.spread is not None:
            low, high = line.values - line.spread, line.values + line.spread
            axes.fill_between(stages, 100 * low, 100 * high, color=colour, alpha=0.13, linewidth=0, zorder=1)
        axes.plot(
            stages, 100 * line.values,
            color=colour, alpha=0.75 if bound else None,
            linestyle=_DASHES.get(line.role, "-"), linewidth=1.6 if bound else 2.2, solid_capstyle="round",
            marker=marker, markersize=6, markeredgewidth=0, clip_on=False, zorder=2 if bound else 3,
        )  # fmt: skip
        if line.end:
            labels.append((line.end, name, colour, "normal" if bound else "bold"))
    bottom, top = axes.get_ylim()
    places = _spread(np.array([end[1] for end, *_ in labels]), 15 / pixels, bottom, top)
    for ((x, y), name, colour, weight), place in zip(labels, places, strict=True):
        moved = (place - y) * pixels
        arrow = {"arrowstyle": "-", "color": colour, "alpha": 0.5, "shrinkA": 0, "shrinkB": 4}
        axes.annotate(
            f"{name} {y:.1f}", (x, y), (20 if abs(moved) > 4 else 10, moved), textcoords="offset points",
            va="center", fontsize=12, fontweight=weight, color=colour, parse_math=False,
            annotation_clip=False, arrowprops=arrow if abs(moved) > 4 else None,
        )  # fmt: skip


def _spread(wanted: NDArray[np.float64], gap: float, low: float, high: float) -> NDArray[np.float64]:
    """Places at least `gap` apart and as near to `wanted` as can be (least squares), in wanted's order."""
    if not len(wanted):
        return wanted
    order = np.argsort(wanted, kind="stable")
    steps = gap * np.arange(len(wanted))
    free = np.asarray(isotonic_regression(wanted[order] - steps))
    placed = np.empty_like(wanted)
    placed[order] = np.clip(free, low, max(low, high - steps[-1])) + steps
    return placed


def _limits(lines: Sequence[Line]) -> tuple[float, float]:
    """The y axis in whole tens: from 0 unless all is far above it, to 100 unless all is far below."""
    values = np.concatenate([100 * line.values for line in lines]) if lines else np.array([])
    values = values[~np.isnan(values)]
    if not len(values):
        return 0.0, 100.0
    low, high = 10 * np.floor((values.min() - 5) / 10), 10 * np.ceil((values.max() + 5) / 10)
    return (0.0 if low < 30 else float(low)), (100.0 if high > 70 else float(high))


def _luminance(colour: Sequence[float]) -> float:
    """Relative luminance, by which the number in a cell is black or white."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
