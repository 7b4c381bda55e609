"""The page of `tpl evaluate --report`: one model on labelled images, with the pictures that it got wrong."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL import Image

from tpl._version import __version__
from tpl.answers import Measured
from tpl.errors import TplError
from tpl.files import replace_atomically
from tpl.report.figures import scale_colours
from tpl.report.page import environment
from tpl.report.svg import PAGE, blank, to_svg

SIDE = 160  # pixels of a picture
IN_BIN, BINS = 10, 10  # images in a point of the calibration curve at least, and points at most
FEWEST = 2 * IN_BIN  # images that a curve needs


@dataclass(frozen=True)
class Wrong:
    """An image with the wrong name: its file, both classes, the probability of the wrong one, and a small picture."""

    file: str
    true: str
    predicted: str
    probability: float
    picture: str


@dataclass(frozen=True)
class Point:
    """Images of about the same probability: its mean, and how many of them are right."""

    probability: float
    measured: Measured


def small_picture(image: Image.Image) -> str:
    """An image as a data: URL of a small JPEG."""
    shown = image.convert("RGB")
    shown.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    shown.save(buffer, format="JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def calibration(probabilities: Sequence[float], right: Sequence[bool]) -> list[Point]:
    """The calibration curve: images in order of their probability, as many in every point; none for few images."""
    rows = sorted(zip(probabilities, right, strict=True), key=lambda row: row[0])
    if len(rows) < FEWEST:
        return []
    bins = min(BINS, len(rows) // IN_BIN)
    edges = [round(i * len(rows) / bins) for i in range(bins + 1)]
    parts = [rows[low:high] for low, high in pairwise(edges)]
    return [Point(sum(p for p, _ in part) / len(part), Measured(sum(r for _, r in part), len(part))) for part in parts]


def calibration_error(points: Sequence[Point]) -> float:
    """The mean distance between probability and accuracy, weighted by images."""
    images = sum(point.measured.images for point in points)
    return sum(abs(p.probability * p.measured.images - p.measured.right) for p in points) / images


def write_evaluation(
    report: dict[str, Any], probabilities: Sequence[float], right: Sequence[bool], wrong: Sequence[Wrong], file: Path
) -> None:
    """Write the page; `report` is what `tpl evaluate --json` prints, `wrong` are pictures to show."""
    points = calibration(probabilities, right)
    page = environment().get_template("evaluation.html.j2").render(
        report=report,
        interval=_between(report["interval"]) if report["interval"] else "",
        classes=[
            {"name": name, **row, "interval": _between(Measured(row["right"], row["images"]).interval)}
            | {"others": [(p, n) for p, n in report["confusion"][name].items() if p != name]}
            for name, row in report["classes"].items()
        ],
        wrong=wrong,
        all_wrong=report["images"] - report["right"],
        curve=Markup(_curve(points)) if points else None,
        error=calibration_error(points) if points else None,
        percent=_percent,
        scale=", ".join(scale_colours()),
        version=__version__,
    )  # fmt: skip
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(file, page)
    except OSError as error:
        raise TplError(f"The report {file} cannot be written: {error}.") from error


def _curve(points: Sequence[Point]) -> str:
    figure, axes = blank(420, 340, 54, 16, 12, 46)
    axes.plot([0, 100], [0, 100], color=PAGE.ink, alpha=0.35, linewidth=1, linestyle=(0, (4, 4)))
    for point in points:
        low, high = point.measured.interval
        x = 100 * point.probability
        axes.plot([x, x], [100 * low, 100 * high], color=PAGE.series[0], alpha=0.4, linewidth=2)
    across = [100 * point.probability for point in points]
    up = [100 * point.measured.right / point.measured.images for point in points]
    axes.plot(across, up, color=PAGE.series[0], linewidth=2, marker="o", markersize=6)
    axes.set(xlim=(0, 103), ylim=(0, 103), xticks=range(0, 101, 25), yticks=range(0, 101, 25))
    axes.set_xlabel("probability, %", color=PAGE.ink, fontsize=11)
    axes.set_ylabel("right, %", color=PAGE.ink, fontsize=11)
    axes.grid(color=PAGE.ink, alpha=0.12, linewidth=1)
    return to_svg(figure, "calibration", "Share of right answers against their probability")


def _between(interval: Sequence[float]) -> str:
    low, high = interval
    return f"{100 * low:.0f} to {100 * high:.0f} %"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
