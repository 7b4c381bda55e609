"""Figures as PNG and SVG files on white: those of a report, and the detector study's."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

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
