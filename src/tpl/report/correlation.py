"""The picture of the detector study: accuracy against AUROC, a point a detector, and the line through them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpl.report.pictures import INK, OTHERS, OWN, QUIET, RULE, picture, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 7.2, 5.4


def draw_correlation(study: dict[str, Any], file: Path) -> None:
    """Draw a study's rows (see `tpl.bench.study`) to a PNG or SVG file."""
    rows, fit = study["rows"], study["fit"]["last"]
    with picture(file, WIDTH, HEIGHT) as figure:
        axes = figure.add_axes((0.1, 0.13, 0.86, 0.66))
        for kind, colour, label in (
            ("post-hoc", OWN, "post-hoc detectors"),
            ("trained", OTHERS, "training techniques"),
        ):
            some = [row for row in rows if row["kind"] == kind]
            if not some:
                continue
            axes.scatter(
                [r["auroc"] for r in some], [r["last"] for r in some], s=34, color=colour, label=label, zorder=3
            )
        if fit is not None:
            ends = [min(r["auroc"] for r in rows), max(r["auroc"] for r in rows)]
            axes.plot(ends, [fit["slope"] * x + fit["intercept"] for x in ends], color=INK, lw=1.2, zorder=2)
        axes.set_xlabel("AUROC of the task score, %", color=INK)
        axes.set_ylabel("Last accuracy, %", color=INK)
        axes.grid(color=RULE, lw=0.6)
        axes.margins(0.12)
        for edge in ("top", "right"):
            axes.spines[edge].set_visible(False)
        name_points(axes, [(row["auroc"], row["last"], row["detector"]) for row in rows], QUIET, RULE)
        axes.legend(loc="lower right", frameon=False, fontsize=9)
        say(figure, f"Detectors as task predictors: {study['benchmark']}", 0.3, 13, INK, "bold")
        for line, text in enumerate(_captions(study)):
            say(figure, text, 0.62 + 0.22 * line, 9, QUIET)


def name_points(axes: Axes, points: Sequence[tuple[float, float, str]], ink: str, rule: str) -> None:
    """Write every point's name beside it, where it meets the fewest other names and points."""
    axes.autoscale_view()
    dots = axes.figure.dpi / 72  # a point of type in the units of the axes' transform
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


Box = tuple[float, float, float, float]


def _overlap(box: Box, others: list[Box]) -> float:
    """The area that a box shares with others."""
    return sum(
        max(0.0, min(box[2], o[2]) - max(box[0], o[0])) * max(0.0, min(box[3], o[3]) - max(box[1], o[1]))
        for o in others
    )


def _captions(study: dict[str, Any]) -> list[str]:
    """What was run, and what the line says, beside the paper's."""
    ours, theirs = study["fit"]["last"], study["paper_fit"]
    count = len(study["orders"])
    orders = "one class order" if count == 1 else f"{count} class orders"
    fits = [
        f"{who}r = {fit['r']:.3f}, slope {fit['slope']:.2f}"
        for who, fit in (("", ours), ("paper (DeiT-S): ", theirs))
        if fit
    ]
    return [f"HAT, {study['encoder']}, {orders}, the largest raw score chooses", "; ".join(fits)]
