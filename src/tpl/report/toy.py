"""The paper's toy example: a wide Gaussian for the task, a narrow one for the other tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from tpl.report.pictures import FOOT, INK, OTHERS, OWN, QUIET, RULE, picture, title_and_legend, write_text

Points = list[dict[str, float]]

VARIANCE, OTHERS_VARIANCE = 1.0, 0.01  # of P_t and P_tc, both around 0
POINTS = (0.0, 1.0)
LINE = np.linspace(-2, 2, 401)
WIDTH, HEIGHT = 9.6, 4.6  # inches
CAPTION = (
    "The filled point is the one chosen. At 0 the density of the other tasks is ten times the task's, so 0 is theirs; "
    "at 1 it is almost zero.\nThe task's density alone still prefers 0: only the ratio of the two is right."
)


def log_normal(x: NDArray[np.float64], variance: float) -> NDArray[np.float64]:
    """Logarithm of the density of N(0, variance)."""
    logarithm: NDArray[np.float64] = -0.5 * (x**2 / variance + np.log(2 * np.pi * variance))
    return logarithm


def toy_numbers() -> dict[str, Any]:
    """Both densities and their ratio at the two points, and the point that each rule assigns to the task."""
    x = np.array(POINTS)
    own, others = log_normal(x, VARIANCE), log_normal(x, OTHERS_VARIANCE)
    points = [
        {"x": at, "p_t": float(np.exp(a)), "p_tc": float(np.exp(b)), "ratio": float(np.exp(a - b))}
        for at, a, b in zip(POINTS, own, others, strict=True)
    ]
    first, second = points
    likelihood, ratio = (first if first[rule] > second[rule] else second for rule in ("p_t", "ratio"))
    return {"points": points, "likelihood_chooses": likelihood["x"], "ratio_chooses": ratio["x"]}


def draw_toy(file: Path) -> None:
    """Draw both densities and their ratio, with the point that each rule assigns to the task."""
    with picture(file, WIDTH, HEIGHT) as figure:
        left, right = (figure.add_axes((start, 0.25, 0.41, 0.48)) for start in (0.065, 0.565))
        _likelihoods(left, **toy_numbers())
        _ratios(right, **toy_numbers())
        names = f"$P_t$ = N(0, {VARIANCE:g}), the task", f"$P_{{t^c}}$ = N(0, {OTHERS_VARIANCE:g}), the others"
        title_and_legend(figure, "Two Gaussians: is 0 or 1 the task's own?", *names)
        write_text(figure, CAPTION, HEIGHT - FOOT / 2, 9, QUIET)


def _likelihoods(axes: Axes, points: Points, likelihood_chooses: float, **_: float) -> None:
    for variance, colour in ((OTHERS_VARIANCE, OTHERS), (VARIANCE, OWN)):
        values = np.exp(log_normal(LINE, variance))
        axes.fill_between(LINE, values, color=colour, alpha=0.18, linewidth=0)
        axes.plot(LINE, values, color=colour, linewidth=2)
    for point, offset in zip(points, ((-26, 11), (0, 14)), strict=True):
        text = f"$p_t$({point['x']:g}) = {point['p_t']:.2f}"
        _mark(axes, point["x"], point["p_t"], text, offset, point["x"] == likelihood_chooses)
    text, peak = f"$p_{{t^c}}$({points[0]['x']:g}) = {points[0]['p_tc']:.2f}", (points[0]["x"], points[0]["p_tc"])
    axes.annotate(text, peak, (12, -8), textcoords="offset points", fontsize=10, color=OTHERS)
    _plain(axes, "density", f"The likelihood $p_t$ assigns x = {likelihood_chooses:g} to the task")


def _ratios(axes: Axes, points: Points, ratio_chooses: float, **_: float) -> None:
    ratio = log_normal(LINE, VARIANCE) - log_normal(LINE, OTHERS_VARIANCE)
    axes.axhline(0, color=RULE, linewidth=1)
    axes.plot(LINE, ratio / np.log(10), color=INK, linewidth=2)
    for point, offset in zip(points, ((0, 18), (-16, 12)), strict=True):
        text = f"ratio({point['x']:g}) = {_short(point['ratio'])}"
        _mark(axes, point["x"], float(np.log10(point["ratio"])), text, offset, point["x"] == ratio_chooses)
    title = f"The ratio $p_t / p_{{t^c}}$ assigns x = {ratio_chooses:g} to the task"
    _plain(axes, "ratio, as a power of ten", title)


def _plain(axes: Axes, label: str, title: str) -> None:
    axes.set_title(title, fontsize=11, color=INK, loc="left", pad=9)
    axes.set_ylabel(label, fontsize=9, color=QUIET)
    axes.set_xlabel("x", fontsize=9, color=QUIET)
    axes.set_xticks(range(-2, 3))
    axes.tick_params(colors=QUIET, labelsize=8.5, length=3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)


def _mark(axes: Axes, x: float, y: float, text: str, offset: tuple[float, float], chosen: bool) -> None:
    """A point with its value written `offset` away; filled if it is the chosen one."""
    fill, weight = (INK, "bold") if chosen else ("white", "normal")
    axes.plot([x], [y], "o", markersize=8, color=fill, markeredgecolor=INK, markeredgewidth=1.6)
    align = "right" if offset[0] < 0 else "center"
    axes.annotate(text, (x, y), offset, textcoords="offset points", ha=align, fontsize=10, color=INK, fontweight=weight)


def _short(value: float) -> str:
    """Format a number; large ones as a multiple of a power of ten."""
    if value < 1000:
        return f"{value:.1f}"
    exponent = int(np.floor(np.log10(value)))
    return f"${value / 10**exponent:.1f} \\times 10^{{{exponent}}}$"
