"""The picture of the detector study: accuracy against AUROC, a point a detector, and the line through them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tpl.report.pictures import INK, OTHERS, OWN, QUIET, RULE, picture, say

WIDTH, HEIGHT = 7.2, 5.4


def draw_correlation(study: dict[str, Any], file: Path) -> None:
    """Draw a study's rows (see `tpl.bench.study`) to a PNG or SVG file."""
    rows, fit = study["rows"], study["fit"]["last"]
    with picture(file, WIDTH, HEIGHT) as figure:
        axes = figure.add_axes((0.1, 0.13, 0.86, 0.68))
        for kind, colour, label in (
            ("post-hoc", OWN, "post-hoc detectors"),
            ("trained", OTHERS, "training techniques"),
        ):
            some = [row for row in rows if row["kind"] == kind]
            axes.scatter(
                [r["auroc"] for r in some], [r["last"] for r in some], s=34, color=colour, label=label, zorder=3
            )
        for row, side in zip(rows, _sides(rows), strict=True):
            axes.annotate(
                row["detector"], (row["auroc"], row["last"]), (5 * side, 4 * side), textcoords="offset points",
                ha="left" if side > 0 else "right", va="bottom" if side > 0 else "top", fontsize=8, color=QUIET,
            )  # fmt: skip
        if fit is not None:
            ends = [min(r["auroc"] for r in rows), max(r["auroc"] for r in rows)]
            axes.plot(ends, [fit["slope"] * x + fit["intercept"] for x in ends], color=INK, lw=1.2, zorder=2)
        axes.set_xlabel("AUROC of the task score, %", color=INK)
        axes.set_ylabel("Last accuracy, %", color=INK)
        axes.grid(color=RULE, lw=0.6)
        axes.margins(0.12)
        for edge in ("top", "right"):
            axes.spines[edge].set_visible(False)
        axes.legend(loc="lower right", frameon=False, fontsize=9)
        say(figure, f"Better detectors are better task predictors: {study['benchmark']}", 0.3, 13, INK, "bold")
        say(figure, _caption(study), 0.65, 9, QUIET)


def _sides(rows: list[dict[str, Any]]) -> list[int]:
    """Labels to the upper right and the lower left in turn along the horizontal axis, so that neighbours stay apart."""
    order = sorted(range(len(rows)), key=lambda i: rows[i]["auroc"])
    sides = [0] * len(rows)
    for place, i in enumerate(order):
        sides[i] = 1 if place % 2 == 0 else -1
    return sides


def _caption(study: dict[str, Any]) -> str:
    ours, theirs = study["fit"]["last"], study["paper_fit"]
    parts = [f"HAT with {study['encoder']}, {len(study['orders'])} class order(s), hard choice of the largest score"]
    if ours:
        parts.append(f"r = {ours['r']:.3f}, slope {ours['slope']:.2f}")
    if theirs:
        parts.append(f"paper (DeiT-S): r = {theirs['r']:.3f}, slope {theirs['slope']:.2f}")
    return "; ".join(parts)
