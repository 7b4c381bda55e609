"""What stand-alone pictures share: a light page, two colours, a title, a legend and a caption.

They are PNG or SVG files. matplotlib is imported when a picture is drawn, not before.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tpl.errors import TplError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
OWN, OTHERS = "#0067a5", "#d9660f"  # the task's images and everyone else's
INK, QUIET, RULE = "#1c2730", "#5d6a74", "#d5dbe0"
GAP, HEAD, FOOT = 0.2, 0.8, 0.6  # inches: around everything, for title and legend, for the caption


def check_format(file: Path) -> None:
    """Refuse what cannot be written, before anything is computed."""
    if file.suffix.lower() not in FORMATS:
        raise TplError(f"A picture is written as {' or '.join(FORMATS)}; got '{file.name}'.")


@contextmanager
def picture(file: Path, width: float, height: float) -> Iterator[Figure]:
    """A white figure of so many inches, written to `file` once it is drawn."""
    import matplotlib
    from matplotlib.figure import Figure

    check_format(file)
    kind = file.suffix.lower()[1:]
    figure = Figure(figsize=(width, height), facecolor="white")
    with matplotlib.rc_context({"svg.hashsalt": "tpl", "axes.linewidth": 0.8}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a class name in a script that the font lacks
        yield figure
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(file, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
        except OSError as error:
            raise TplError(f"{file} cannot be written: {error}.") from error


def say(figure: Figure, text: str, down: float, size: float, colour: str, weight: str = "normal") -> None:
    """Text from the left edge, so many inches from the top."""
    width, height = figure.get_size_inches()
    figure.text(
        GAP / width, 1 - down / height, text, fontsize=size, color=colour, fontweight=weight, va="center",
        parse_math=False, linespacing=1.5,
    )  # fmt: skip


def head(figure: Figure, title: str, own: str, others: str) -> None:
    """The title, and what the two colours stand for."""
    from matplotlib.patches import Patch

    say(figure, title, 0.3, 13, INK, "bold")
    pairs = (OWN, own), (OTHERS, others)
    keys = [Patch(facecolor=(colour, 0.35), edgecolor=colour, label=label) for colour, label in pairs]
    width, height = figure.get_size_inches()
    figure.legend(
        handles=keys, loc="center left", bbox_to_anchor=(GAP / width, 1 - 0.62 / height), ncols=2, frameon=False,
        borderpad=0, borderaxespad=0, handlelength=1.4, fontsize=10, labelcolor=INK, columnspacing=1.6,
    )  # fmt: skip
