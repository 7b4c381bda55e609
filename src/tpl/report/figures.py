"""The figures of a report: accuracy after each task, matrices of tasks by tasks, accuracy against AUROC.

Each figure is drawn in a palette: the page's, for an SVG that takes on its colours, or the one for files on white.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from numpy.typing import NDArray
from sklearn.isotonic import isotonic_regression

from tpl.bench.metrics import Matrix, line_through
from tpl.report.columns import CONTINUAL, LOWER, UPPER, metrics_of
from tpl.report.find import Experiment
from tpl.report.svg import PAGE, Palette, blank, to_svg

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = {LOWER: (0, (1.2, 2.2)), UPPER: (0, (5, 2.5))}
QUIET = 0.72  # opacity of axis titles

# One scale for all heatmaps, from pale (0 %) to dark (100 %), without the palest and darkest colours.
SCALE = LinearSegmentedColormap.from_list("accuracy", matplotlib.colormaps["YlGnBu"](np.linspace(0.06, 0.88, 64)))
NUMBERS_UP_TO = 10  # tasks; beyond, numbers would not fit in the cells


@dataclass(frozen=True)
class Line:
    """Accuracy (a fraction) after each task: of one run, or mean and standard deviation of several."""

    name: str
    values: Matrix
    role: str
    spread: Matrix | None = None

    @property
    def end(self) -> tuple[float, float] | None:
        """The last measured point: number of its task (from 1) and accuracy in percent."""
        measured = np.flatnonzero(~np.isnan(self.values))
        return (float(measured[-1] + 1), 100 * float(self.values[measured[-1]])) if len(measured) else None


def lines_of(experiment: Experiment) -> tuple[list[Line], list[int]]:
    """The mean accuracy of each group after each task, and the number of classes seen by then."""
    curves = [(group, *group.curve()) for group in experiment.groups]
    lines = [Line(group.name, mean, group.role, deviation) for group, mean, deviation in curves]
    return lines, list(accumulate(experiment.runs[0].sizes))


def scale_colours(steps: int = 9) -> list[str]:
    """The colours of the heatmaps' scale, from 0 to 100 percent."""
    return [to_hex(SCALE(x)) for x in np.linspace(0, 1, steps)]


def curves_svg(lines: Sequence[Line], classes: Sequence[int], ident: str, narrow: bool = False) -> str:
    """The accuracy curves as SVG for a page."""
    ends = ", ".join(f"{line.name} {line.end[1]:.1f}" for line in lines if line.end)
    label = f"Accuracy on all classes so far, in percent, after each task. At the end: {ends}."
    return to_svg(draw_curves(lines, classes, PAGE, narrow), ident, label)


def draw_curves(lines: Sequence[Line], classes: Sequence[int], palette: Palette, narrow: bool = False) -> Figure:
    """Accuracy on all classes so far after each task, with a label at each line's end.

    `classes` are the numbers of classes seen after each task. Bounds are dashed and in the text's colour; a pale band
    shows the standard deviation of several runs.
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
        _note(axes, str(classes[t - 1]), (t, low), (0, -34), "data", ink, ha="center")
    if narrow:
        _note(axes, "task", (1, 0), (12, -16), "axes fraction", ink)
        _note(axes, "classes", (1, 0), (12, -34), "axes fraction", ink)
    else:
        _note(axes, "after task", (0, 0), (-6, -16), "axes fraction", ink, ha="right")
        _note(axes, "classes", (0, 0), (-6, -34), "axes fraction", ink, ha="right")
    _note(axes, "Accuracy on all classes so far, %", (0, 1), (-24, 20), "axes fraction", ink)
    _draw_lines(axes, lines, names, (height - top - bottom) / (high - low), palette)
    return figure


def heatmap_svg(matrix: Matrix, ident: str, name: str) -> str:
    """Accuracy on each task (columns) after each task (rows), as SVG for a page."""
    final = ", ".join(f"{100 * v:.1f}" for v in (matrix[-1] if len(matrix) else ()) if not np.isnan(v))
    label = f"{name}: accuracy on each task after each task, in percent. After the final task: {final}."
    return to_svg(draw_matrix(matrix, "accuracy on task", "after learning task", PAGE), ident, label)


def confusion_svg(matrix: Matrix, ident: str, name: str) -> str:
    """Share of each task's images (rows) assigned to each task (columns), as SVG for a page."""
    right = ", ".join(f"{100 * v:.1f}" for v in np.diag(matrix) if not np.isnan(v))
    what = f"{name}: share of each task's test images assigned to each task"
    label = f"{what}. Assigned to their own task, percent: {right}."
    return to_svg(draw_matrix(matrix, "assigned to task", "images of task", PAGE), ident, label)


def draw_matrix(matrix: Matrix, across: str, down: str, palette: Palette) -> Figure:
    """A heatmap of fractions on a scale from 0 to 100 percent; cells without a number stay empty."""
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


def _note(
    axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], coords: str, ink: str,
    ha: str = "left",
) -> None:  # fmt: skip
    """Pale text, `offset` pixels away from a point."""
    axes.annotate(
        text, at, offset, coords, "offset points", ha=ha, va="center", fontsize=11, color=ink, alpha=QUIET,
        annotation_clip=False,
    )  # fmt: skip


def _draw_lines(axes: Axes, lines: Sequence[Line], names: Sequence[str], pixels: float, palette: Palette) -> None:
    """Draw the lines and their labels, which do not overlap; one percent point is `pixels` high."""
    number = 0
    labels = []
    for line, name in zip(lines, names, strict=True):
        bound = line.role in _DASHES
        colour = palette.ink if bound else palette.series[number % len(palette.series)]
        alone = np.count_nonzero(~np.isnan(line.values)) == 1  # a bound that was trained after the last task only
        marker = MARKERS[number % len(MARKERS)] if not bound else "o" if alone else None
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
    heights = spread_labels(np.array([end[1] for end, *_ in labels]), 15 / pixels, bottom, top)
    for ((x, y), name, colour, weight), height in zip(labels, heights, strict=True):
        shift = (height - y) * pixels
        arrow = {"arrowstyle": "-", "relpos": (0, 0.5), "color": colour, "alpha": 0.5, "shrinkA": 2, "shrinkB": 4}
        axes.annotate(
            f"{name} {y:.1f}", (x, y), (20 if abs(shift) > 4 else 10, shift), textcoords="offset points",
            va="center", fontsize=12, fontweight=weight, color=colour, parse_math=False,
            annotation_clip=False, arrowprops=arrow if abs(shift) > 4 else None,
        )  # fmt: skip


def spread_labels(wanted: NDArray[np.float64], gap: float, low: float, high: float) -> NDArray[np.float64]:
    """Positions at least `gap` apart, in the order of `wanted` and as near to it as possible (least squares)."""
    if not len(wanted):
        return wanted
    order = np.argsort(wanted, kind="stable")
    steps = gap * np.arange(len(wanted))
    free = np.asarray(isotonic_regression(wanted[order] - steps))
    placed = np.empty_like(wanted)
    placed[order] = np.clip(free, low, max(low, high - steps[-1])) + steps
    return placed


def _limits(lines: Sequence[Line]) -> tuple[float, float]:
    """Limits of the y axis in whole tens: 0 unless all values are far above it, 100 unless all are far below."""
    values = np.concatenate([100 * line.values for line in lines]) if lines else np.array([])
    values = values[~np.isnan(values)]
    if not len(values):
        return 0.0, 100.0
    low, high = 10 * np.floor((values.min() - 5) / 10), 10 * np.ceil((values.max() + 5) / 10)
    return (0.0 if low < 30 else float(low)), (100.0 if high > 70 else float(high))


def _luminance(colour: Sequence[float]) -> float:
    """Relative luminance of a colour; dark cells get white numbers."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


MIN_POINTS = 3  # for a regression line


@dataclass(frozen=True)
class Point:
    """One measurement, in percent; `series` is the number of its colour, `name` its label if it has one."""

    auroc: float
    last: float
    series: int
    name: str = ""
    group: str = ""


@dataclass(frozen=True)
class Scatter:
    """Points and the regression line through them, if there is one."""

    points: tuple[Point, ...]
    fit: dict[str, float] | None

    @property
    def sentence(self) -> str:
        """The regression line as a sentence."""
        if self.fit is None:
            return f"No regression line: it needs {MIN_POINTS} different points."
        return f"Pearson's r = {self.fit['r']:.3f}; {self.fit['slope']:.2f} points of accuracy per point of AUROC."


def scatter_of_runs(experiment: Experiment) -> Scatter:
    """A point for every run of a continual method with task scores, in the colour of its group."""
    points = []
    for series, group in enumerate(group for group in experiment.groups if group.role == CONTINUAL):
        for run in group.runs:
            found = metrics_of(run.result)
            if found["auroc"] is not None and found["last"] is not None:
                points.append(Point(100 * found["auroc"], 100 * found["last"], series, group=group.name))
    fit = line_through([{"auroc": point.auroc, "last": point.last} for point in points], "last")
    return Scatter(tuple(points), fit)


def scatter_of_study(study: dict[str, Any]) -> Scatter:
    """A point for every detector of `tpl ood-study`."""
    points = [
        Point(row["auroc"], row["last"], int(row["kind"] != "post-hoc"), row["detector"]) for row in study["rows"]
    ]
    return Scatter(tuple(points), study["fit"]["last"])


def scatter_svg(scatter: Scatter, ident: str, what: str) -> str:
    """The scatter plot as SVG for a page."""
    label = f"{what}: Last accuracy against AUROC of the task scores, {len(scatter.points)} points. {scatter.sentence}"
    return to_svg(draw_scatter(scatter, PAGE), ident, label)


def draw_scatter(scatter: Scatter, palette: Palette) -> Figure:
    """Last accuracy against AUROC, with the regression line."""
    figure, axes = blank(560, 400, left=52, right=16, top=12, bottom=46, ink=palette.ink)
    for series in sorted({point.series for point in scatter.points}):
        some = [point for point in scatter.points if point.series == series]
        axes.scatter(
            [p.auroc for p in some], [p.last for p in some], s=42, color=palette.series[series % len(palette.series)],
            marker=MARKERS[series % len(MARKERS)], linewidths=0, zorder=3,
        )  # fmt: skip
    if scatter.fit is not None:
        ends = [min(p.auroc for p in scatter.points), max(p.auroc for p in scatter.points)]
        heights = [scatter.fit["slope"] * x + scatter.fit["intercept"] for x in ends]
        axes.plot(ends, heights, color=palette.ink, alpha=0.6, linewidth=1.3, zorder=2)
    axes.grid(color=palette.ink, alpha=0.14, linewidth=0.8)
    axes.margins(0.12)
    axes.set_xlabel("AUROC of the task scores, %", fontsize=11, color=palette.ink, alpha=QUIET)
    axes.set_ylabel("Last accuracy, %", fontsize=11, color=palette.ink, alpha=QUIET)
    named = [(p.auroc, p.last, p.name) for p in scatter.points if p.name]
    if named:
        name_points(axes, named, palette.ink, palette.ink)
    return figure


def name_points(axes: Axes, points: Sequence[tuple[float, float, str]], ink: str, rule: str) -> None:
    """Write every point's name beside it, where it overlaps the fewest other names and points."""
    axes.autoscale_view()
    dots = axes.figure.dpi / 72  # typographic points to the units of the axes' transform
    places = [axes.transData.transform((x, y)) / dots for x, y, _ in points]
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in places]
    for point, (x, y) in sorted(zip(points, places, strict=True), key=lambda pair: -pair[1][1]):
        name = point[2]
        wide, high = 4.8 * len(name), 9.0
        boxes = [
            (x + dx - (wide if dx < 0 else 0 if dx > 0 else wide / 2), y + dy - high / 2)
            for reach in (1, 2, 3)
            for dx, dy in ((6, 0), (6, 8 * reach), (6, -8 * reach), (0, 10 * reach), (0, -10 * reach), (-6, 0),
                           (-6, 8 * reach), (-6, -8 * reach))
        ]  # fmt: skip
        left, bottom = min(boxes, key=lambda at: _overlap((*at, at[0] + wide, at[1] + high), taken))
        taken.append((left, bottom, left + wide, bottom + high))
        axes.annotate(
            name, point[:2], (left - x, bottom - y), textcoords="offset points", fontsize=8, color=ink,
            parse_math=False, arrowprops={"arrowstyle": "-", "color": rule, "lw": 0.8, "shrinkA": 0, "shrinkB": 3},
        )  # fmt: skip


def _overlap(box: Sequence[float], others: Sequence[Sequence[float]]) -> float:
    """The area that a box (left, bottom, right, top) shares with others."""
    return sum(
        max(0.0, min(box[2], o[2]) - max(box[0], o[0])) * max(0.0, min(box[3], o[3]) - max(box[1], o[1]))
        for o in others
    )
