"""The figures of a report as files of their own: PNG and SVG, on white."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from tpl.errors import TplError
from tpl.report.figures import Line, draw_curves, draw_matrix
from tpl.report.scatter import cloud_of_runs, cloud_of_study, draw_cloud
from tpl.report.scenes import Scene
from tpl.report.svg import PAPER


def write_figures(scenes: Sequence[Scene], studies: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Curves, accuracy matrices, task confusions and AUROC against accuracy of every scene; the files written."""
    figures = _Named()
    for scene in scenes:
        stem = _stem(scene.title)
        lines = [Line(group.name, mean, group.role, band) for group in scene.groups for mean, band in [group.curve()]]
        figures.add(f"curves-{stem}", draw_curves(lines, list(accumulate(scene.runs[0].sizes)), PAPER))
        for group in scene.groups:
            name = f"{stem}-{_stem(group.name)}"
            mean, confusion = group.mean_matrix("cil"), group.confusion()
            if mean is not None:
                figures.add(f"matrix-{name}", draw_matrix(mean, "accuracy on task", "after learning task", PAPER))
            if confusion is not None:
                figures.add(f"confusion-{name}", draw_matrix(confusion, "taken for task", "images of task", PAPER))
        cloud = cloud_of_runs(scene)
        if cloud.points:
            figures.add(f"auroc-{stem}", draw_cloud(cloud, PAPER))
    for study in studies:
        figures.add(f"study-{_stem(study['benchmark'])}", draw_cloud(cloud_of_study(study), PAPER))
    return [file for name, figure in figures.items() for file in _save(figure, folder / name)]


class _Named(dict[str, Figure]):
    """Figures by name; where two titles make the same name, the second one is numbered."""

    def add(self, name: str, figure: Figure) -> None:
        twins = sum(other == name or other.startswith(f"{name}~") for other in self)
        self[f"{name}~{twins + 1}" if twins else name] = figure


def _save(figure: Figure, stem: Path) -> list[Path]:
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    with matplotlib.rc_context({"svg.hashsalt": "tpl"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that the font lacks
        try:
            stem.parent.mkdir(parents=True, exist_ok=True)
            for file in files:
                metadata = {"Date": None} if file.suffix == ".svg" else None
                figure.savefig(file, dpi=160, facecolor="white", metadata=metadata)
        except OSError as error:
            raise TplError(f"{stem.parent} cannot be written: {error}.") from error
    return files


def _stem(text: str) -> str:
    """A title as part of a file's name."""
    return re.sub(r"[^\w.=-]+", "-", text).strip("-.") or "runs"
