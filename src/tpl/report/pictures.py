"""Figures as PNG and SVG files on white: those of a report, the detector study's, and densities of features."""

from __future__ import annotations

import re
import tempfile
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tpl.bench.densities import Density, RunDensities, TaskDensities, evenly, run_densities
from tpl.bench.outputs import read_outputs
from tpl.bench.results import RunResult
from tpl.errors import TplError
from tpl.report.figures import (
    draw_curves,
    draw_matrix,
    draw_scatter,
    lines_of,
    name_points,
    scatter_of_runs,
    scatter_of_study,
)
from tpl.report.find import Experiment
from tpl.report.svg import PAPER

FORMATS = (".png", ".svg")
OWN, OTHERS = "#0067a5", "#d9660f"  # the task's images and those of other tasks
INK, QUIET, RULE = "#1c2730", "#5d6a74", "#d5dbe0"
GAP, HEAD, FOOT = 0.2, 0.8, 0.6  # inches: around everything, for title and legend, for the caption


def check_format(file: Path) -> None:
    """Raise an error for a file that is neither PNG nor SVG, before anything is computed."""
    if file.suffix.lower() not in FORMATS:
        raise TplError(f"A picture is written as {' or '.join(FORMATS)}; got '{file.name}'.")


@contextmanager
def picture(file: Path, width: float, height: float) -> Iterator[Figure]:
    """An empty figure of this size in inches, written to `file` at the end of the block."""
    check_format(file)
    figure = Figure(figsize=(width, height))
    with matplotlib.rc_context({"axes.linewidth": 0.8}):
        yield figure
        _save(figure, file)


def _save(figure: Figure, file: Path) -> None:
    kind = file.suffix.lower()[1:]
    metadata = {"Date": None} if kind == "svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "tpl"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that the font lacks
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(file, format=kind, dpi=160, facecolor="white", metadata=metadata)
        except OSError as error:
            raise TplError(f"{file} cannot be written: {error}.") from error


def write_text(figure: Figure, text: str, down: float, size: float, colour: str, weight: str = "normal") -> None:
    """Write text at the left edge, `down` inches from the top."""
    width, height = figure.get_size_inches()
    figure.text(
        GAP / width, 1 - down / height, text, fontsize=size, color=colour, fontweight=weight, va="center",
        parse_math=False, linespacing=1.5,
    )  # fmt: skip


def title_and_legend(figure: Figure, title: str, own: str, others: str) -> None:
    """Write the title, and a legend of the two colours."""
    write_text(figure, title, 0.3, 13, INK, "bold")
    pairs = (OWN, own), (OTHERS, others)
    keys = [Patch(facecolor=(colour, 0.35), edgecolor=colour, label=label) for colour, label in pairs]
    width, height = figure.get_size_inches()
    figure.legend(
        handles=keys, loc="center left", bbox_to_anchor=(GAP / width, 1 - 0.62 / height), ncols=2, frameon=False,
        borderpad=0, borderaxespad=0, handlelength=1.4, fontsize=10, labelcolor=INK, columnspacing=1.6,
    )  # fmt: skip


def write_figures(experiments: Sequence[Experiment], studies: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write curves, accuracy matrices, task confusions and AUROC against accuracy; returns the files."""
    figures = _Named()
    for experiment in experiments:
        stem = _stem(experiment.title)
        figures.add(f"curves-{stem}", draw_curves(*lines_of(experiment), PAPER))
        for group in experiment.groups:
            name = f"{stem}-{_stem(group.name)}"
            mean, confusion = group.mean_matrix("cil"), group.confusion()
            if mean is not None:
                figures.add(f"matrix-{name}", draw_matrix(mean, "accuracy on task", "after learning task", PAPER))
            if confusion is not None:
                figures.add(f"confusion-{name}", draw_matrix(confusion, "assigned to task", "images of task", PAPER))
        scatter = scatter_of_runs(experiment)
        if scatter.points:
            figures.add(f"auroc-{stem}", draw_scatter(scatter, PAPER))
    for study in studies:
        figures.add(f"study-{_stem(study['benchmark'])}", draw_scatter(scatter_of_study(study), PAPER))
    files = {folder / f"{name}{kind}": figure for name, figure in figures.items() for kind in FORMATS}
    for file, figure in files.items():
        _save(figure, file)
    return list(files)


class _Named(dict[str, Figure]):
    """Figures by file name; a name that is already taken gets a number."""

    def add(self, name: str, figure: Figure) -> None:
        twins = sum(other == name or other.startswith(f"{name}~") for other in self)
        self[f"{name}~{twins + 1}" if twins else name] = figure


def _stem(text: str) -> str:
    """A title as part of a file's name."""
    return re.sub(r"[^\w.=-]+", "-", text).strip("-.") or "runs"


def draw_correlation(study: dict[str, Any], file: Path) -> None:
    """Draw a detector study (see `tpl.bench.study`): accuracy against AUROC, and the regression line."""
    rows, fit = study["rows"], study["fit"]["last"]
    with picture(file, 7.2, 5.4) as figure:
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
        write_text(figure, f"Detectors as task predictors: {study['benchmark']}", 0.3, 13, INK, "bold")
        for line, text in enumerate(_captions(study)):
            write_text(figure, text, 0.62 + 0.22 * line, 9, QUIET)


def _captions(study: dict[str, Any]) -> list[str]:
    """The study's settings; the regression line and the paper's."""
    ours, theirs = study["fit"]["last"], study["paper_fit"]
    count = len(study["orders"])
    orders = "one class order" if count == 1 else f"{count} class orders"
    fits = [
        f"{who}r = {fit['r']:.3f}, slope {fit['slope']:.2f}"
        for who, fit in (("", ours), ("paper (DeiT-S): ", theirs))
        if fit
    ]
    return [f"HAT, {study['encoder']}, {orders}, the largest raw score is chosen", "; ".join(fits)]


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
