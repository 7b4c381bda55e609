"""Accuracy against the AUROC of task scores: a point a run or a detector, and the line through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from tpl.bench.metrics import line_through
from tpl.report.correlation import name_points
from tpl.report.figures import MARKERS, QUIET
from tpl.report.scenes import Scene
from tpl.report.svg import PAGE, Palette, blank, to_svg
from tpl.report.tables import CONTINUAL, numbers

FEWEST = 3  # points for a line


@dataclass(frozen=True)
class Point:
    """One measurement, in percent; `series` counts the colours, `name` is written beside it where it has one."""

    auroc: float
    last: float
    series: int
    name: str = ""
    group: str = ""


@dataclass(frozen=True)
class Cloud:
    """Points and the line through them, if there is one."""

    points: tuple[Point, ...]
    fit: dict[str, float] | None

    @property
    def words(self) -> str:
        """The line in words."""
        if self.fit is None:
            return f"No line: that takes {FEWEST} points that differ."
        return f"Pearson's r = {self.fit['r']:.3f}; {self.fit['slope']:.2f} points of accuracy for a point of AUROC."


def cloud_of_runs(scene: Scene) -> Cloud:
    """A point for every run of a competing method with task scores; colours are those of the groups elsewhere."""
    points = []
    for series, group in enumerate(group for group in scene.groups if group.role == CONTINUAL):
        for run in group.runs:
            found = numbers(run.result)
            if found["auroc"] is not None and found["last"] is not None:
                points.append(Point(100 * found["auroc"], 100 * found["last"], series, group=group.name))
    return Cloud(tuple(points), _line(points))


def cloud_of_study(study: dict[str, Any]) -> Cloud:
    """A point for every detector of `tpl ood-study`."""
    points = [
        Point(row["auroc"], row["last"], int(row["kind"] != "post-hoc"), row["detector"]) for row in study["rows"]
    ]
    return Cloud(tuple(points), study["fit"]["last"])


def scatter(cloud: Cloud, ident: str, what: str) -> str:
    """The points for a page."""
    label = f"{what}: Last accuracy against AUROC of the task scores, {len(cloud.points)} points. {cloud.words}"
    return to_svg(draw_cloud(cloud, PAGE), ident, label)


def draw_cloud(cloud: Cloud, palette: Palette) -> Figure:
    """Points, line and axes."""
    figure, axes = blank(560, 400, left=52, right=16, top=12, bottom=46, ink=palette.ink)
    for series in sorted({point.series for point in cloud.points}):
        some = [point for point in cloud.points if point.series == series]
        axes.scatter(
            [p.auroc for p in some], [p.last for p in some], s=42, color=palette.series[series % len(palette.series)],
            marker=MARKERS[series % len(MARKERS)], linewidths=0, zorder=3,
        )  # fmt: skip
    if cloud.fit is not None:
        ends = [min(p.auroc for p in cloud.points), max(p.auroc for p in cloud.points)]
        heights = [cloud.fit["slope"] * x + cloud.fit["intercept"] for x in ends]
        axes.plot(ends, heights, color=palette.ink, alpha=0.6, linewidth=1.3, zorder=2)
    axes.grid(color=palette.ink, alpha=0.14, linewidth=0.8)
    axes.margins(0.12)
    axes.set_xlabel("AUROC of the task scores, %", fontsize=11, color=palette.ink, alpha=QUIET)
    axes.set_ylabel("Last accuracy, %", fontsize=11, color=palette.ink, alpha=QUIET)
    named = [(p.auroc, p.last, p.name) for p in cloud.points if p.name]
    if named:
        name_points(axes, named, palette.ink, palette.ink)
    return figure


def _line(points: Sequence[Point]) -> dict[str, float] | None:
    return line_through([{"auroc": point.auroc, "last": point.last} for point in points], "last")
