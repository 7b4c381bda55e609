"""Draw docs/images/how-tpl-works.svg: how three task models claim one image, and how their claims become a class.

python tools/draw_overview.py [FILE]     # 2 seconds; the panels are computed from made-up points, by TPL's own score
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Ellipse, FancyArrowPatch, FancyBboxPatch, Rectangle

from tpl.report.svg import PAGE, blank, standalone, to_svg
from tpl.scores import LikelihoodRatio

FILE = Path(__file__).parents[1] / "docs/images/how-tpl-works.svg"
INK, COLOURS = PAGE.ink, PAGE.series[:3]
QUIET, FAINT = 0.72, 0.16  # opacities of ink: captions; frames and unused units
TASKS = (("Task 1", "cat", "dog"), ("Task 2", "car", "bus"), ("Task 3", "oak", "elm"))
OWNER = 1  # the task whose model knows the image in the example
GAMMA = 0.5  # ten times TPL's temperature: with 0.05 the largest of these three probabilities would be 1.00
WITHIN = ((0.71, 0.29), (0.06, 0.94), (0.55, 0.45))  # P(class | image, task), made up
WIDTH, HEIGHT = 1080, 540
LABEL = (
    "A new image passes through one frozen encoder with a mask for each of three tasks. Each task's score is high "
    "where the image is near the task's own classes and far from stored images of other tasks. A softmax of the scores "
    "is the probability of the task; times the probability of the class within the task, it is the answer: a bus."
)


@dataclass(frozen=True)
class Points:
    """What one task's model makes of its own images, other tasks' stored images, and the new image."""

    own: np.ndarray
    classes: np.ndarray
    others: np.ndarray
    new: np.ndarray

    @classmethod
    def of(cls, task: int) -> Points:
        """The made-up points of a task."""
        random = np.random.default_rng(task + 7)
        centres = np.array([[-1.5, 0.75], [1.3, 0.75]])
        classes = np.repeat([0, 1], 26)
        own = centres[classes] + 0.34 * random.standard_normal((52, 2))
        others = np.array([0.0, -1.2]) + np.array([0.75, 0.34]) * random.standard_normal((22, 2))
        new = np.array([0.95, 0.45]) if task == OWNER else np.array([(0.35, 0, -0.5)[task], -1.0])
        return cls(own, classes, others, new)

    def score(self) -> float:
        """TPL's score of the new image, with logits that fall with the distance to a class."""
        own, classes, others, new = map(torch.tensor, (self.own, self.classes, self.others, self.new[None]))
        means = torch.stack([own[classes == c].mean(0) for c in (0, 1)])
        score = LikelihoodRatio().fit_features(own, 6 - 2 * torch.cdist(own, means), classes, others)
        return float(score.score_features(new, 6 - 2 * torch.cdist(new, means)))


def feature_panel(axes: Axes, task: int, points: Points) -> None:
    """One task's feature space."""
    axes.scatter(*points.others.T, s=15, marker="x", linewidths=1.1, color=INK, alpha=0.55)
    for c, alpha in ((0, 1), (1, 0.6)):
        some = points.own[points.classes == c]
        x, y = some.mean(0)
        for radius, strength in ((1.1, 0.16), (1.9, 0.1)):
            axes.add_patch(Ellipse((x, y), radius, radius, color=COLOURS[task], alpha=strength, linewidth=0))
        axes.scatter(*some.T, s=9, color=COLOURS[task], alpha=alpha, linewidths=0)
        axes.text(x, y + 0.98, TASKS[task][1 + c], ha="center", va="bottom", fontsize=12, color=COLOURS[task])
    mean = min(
        (points.own[points.classes == c].mean(0) for c in (0, 1)), key=lambda m: float(np.linalg.norm(m - points.new))
    )
    other = min(points.others, key=lambda each: float(np.linalg.norm(each - points.new)))
    axes.plot(*zip(points.new, mean, strict=True), color=COLOURS[task], linewidth=1.6)
    axes.plot(*zip(points.new, other, strict=True), color=INK, linewidth=1.3, linestyle=(0, (2, 2)))
    axes.scatter(*points.new, s=190, marker="*", color=INK, zorder=5, linewidths=0)
    axes.set(xlim=(-3.1, 3.1), ylim=(-2.1, 2.45), xticks=[], yticks=[])


def bars(axes: Axes, values: list[float], names: list[str], colours: list[str]) -> None:
    """Horizontal bars with their values."""
    places = np.arange(len(values))[::-1]
    axes.barh(places, values, height=0.62, color=colours)
    for place, value, name in zip(places, values, names, strict=True):
        axes.text(-0.06, place, name, ha="right", va="center", color=INK, fontsize=12)
        axes.text(value + 0.05, place, f"{value:.2f}", ha="left", va="center", color=INK, fontsize=12)
    axes.set(xlim=(0, 1), ylim=(-0.6, len(values) - 0.4), xticks=[], yticks=[])


def rounded(sheet: Axes, x: float, y: float, width: float, height: float, corner: float = 8, **look: Any) -> None:
    """A box with round corners."""
    sheet.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=f"round,pad=0,rounding_size={corner}", linewidth=1.3, **look)
    )


def arrow(sheet: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """An arrow in pixels of the drawing."""
    sheet.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=12, color=INK, alpha=0.6, linewidth=1.3, shrinkA=0, shrinkB=0
        )
    )


def bus(sheet: Axes, x: float, y: float) -> None:
    """A photo of a bus, 76 by 76."""
    rounded(sheet, x, y, 76, 76, 6, facecolor="none", edgecolor=(INK, 0.4))
    rounded(sheet, x + 12, y + 26, 52, 30, 5, facecolor=INK, edgecolor="none")
    for window in range(3):
        sheet.add_patch(Rectangle((x + 17 + 15 * window, y + 40), 12, 10, facecolor=COLOURS[OWNER], linewidth=0))
    for wheel in (25, 51):
        sheet.add_patch(Circle((x + wheel, y + 25), 6, facecolor=INK, linewidth=0))
        sheet.add_patch(Circle((x + wheel, y + 25), 2.4, facecolor=COLOURS[OWNER], linewidth=0))


def mask(sheet: Axes, task: int, x: float, y: float) -> None:
    """The units that a task uses, in its colour."""
    rounded(sheet, x, y, 118, 92, facecolor="none", edgecolor=COLOURS[task])
    sheet.text(
        x + 59, y + 76, TASKS[task][0], ha="center", va="center", color=COLOURS[task], weight="bold", fontsize=12
    )
    used = np.random.default_rng(task).random((4, 6)) < 0.42
    for row, column in np.ndindex(*used.shape):
        look = {"facecolor": COLOURS[task]} if used[row, column] else {"facecolor": INK, "alpha": FAINT}
        sheet.add_patch(Rectangle((x + 16 + 15 * column, y + 8 + 15 * row), 11, 11, linewidth=0, **look))


def add_panel(figure: Figure, x: float, y: float, width: float, height: float) -> Axes:
    """Axes without frame, in pixels of the drawing."""
    axes = figure.add_axes((x / WIDTH, y / HEIGHT, width / WIDTH, height / HEIGHT))
    axes.patch.set_visible(False)
    axes.spines[:].set_visible(False)
    return axes


def write_texts(sheet: Axes) -> None:
    """Headings above the steps and captions below them."""
    for x, text in (
        (56, "A new image"),
        (214, "1  One frozen encoder,\na mask for each task"),
        (434, "2  Near its own classes?\nFar from all others?"),
        (744, "3  P(task | image):\nsoftmax of the scores"),
        (965, "4  Times\nP(class | image, task)"),
    ):
        sheet.text(x, 508, text, ha="center", va="center", color=INK, weight="bold", fontsize=13, linespacing=1.35)
    for x, y, text in (
        (56, 197, "nobody says\nof which task"),
        (234, 26, "coloured: units\nthe task may use"),
        (434, 26, "dots: the task's classes; crosses: stored\nimages of other tasks; star: the new image"),
        (
            848,
            92,
            "score: near own classes (Mahalanobis distance), far\nfrom others (kNN distance), or a high maximum logit",
        ),
        (848, 48, "Eq. 7 to 11 and Eq. 3 of the paper"),
    ):
        sheet.text(
            x, y, text, ha="center", va="center", color=INK, alpha=QUIET, fontsize=11.5 if x > 800 else 11,
            linespacing=1.4,
        )  # fmt: skip


def draw() -> Figure:
    """The whole picture."""
    figure, sheet = blank(WIDTH, HEIGHT, 0, 0, 0, 0)
    sheet.set(xlim=(0, WIDTH), ylim=(0, HEIGHT), xticks=[], yticks=[])
    write_texts(sheet)
    bus(sheet, 18, 226)
    rounded(sheet, 122, 66, 32, 396, facecolor=(INK, 0.08), edgecolor=(INK, 0.4))
    sheet.text(138, 264, "frozen encoder", rotation=90, ha="center", va="center", color=INK, fontsize=12)
    arrow(sheet, (98, 264), (119, 264))
    found = [Points.of(task) for task in range(len(TASKS))]
    scores = np.array([points.score() for points in found])
    shares = np.exp((scores - scores.max()) / GAMMA)
    shares /= shares.sum()
    for task, points in enumerate(found):
        y = 338 - 137 * task
        arrow(sheet, (156, y + 62), (174, y + 62))
        mask(sheet, task, 176, y + 16)
        arrow(sheet, (297, y + 62), (323, y + 62))
        rounded(sheet, 326, y, 216, 124, facecolor="none", edgecolor=(INK, 0.25))
        feature_panel(add_panel(figure, 326, y, 216, 124), task, points)
        arrow(sheet, (545, y + 62), (568, y + 62))
        sheet.text(574, y + 71, "score", va="center", color=INK, alpha=QUIET, fontsize=11)
        sheet.text(574, y + 54, f"{scores[task]:.2f}", va="center", color=COLOURS[task], weight="bold", fontsize=14)
        arrow(sheet, (618, y + 62), (656, 264 + 60 * (1 - task)))
    bars(add_panel(figure, 716, 174, 84, 180), shares.tolist(), [name for name, *_ in TASKS], list(COLOURS))
    arrow(sheet, (848, 264), (880, 264))
    final = np.array([shares[t] * p for t in range(len(TASKS)) for p in WITHIN[t]])
    best = np.argsort(final)[::-1][:4]
    names = [TASKS[i // 2][1 + i % 2] for i in best]
    bars(add_panel(figure, 930, 174, 90, 180), final[best].tolist(), names, [COLOURS[i // 2] for i in best])
    return figure


def main() -> None:
    """Write the file."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(standalone(to_svg(draw(), "how", LABEL)), encoding="utf-8")


if __name__ == "__main__":
    main()
