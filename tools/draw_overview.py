"""Draw docs/images/how-tpl-works.svg: how three task models claim one image, and how their claims become a class.

python tools/draw_overview.py [FILE]     # 2 seconds; the panels are computed from made-up points, by TPL's own score
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from tpl.scores import LikelihoodRatio

FILE = Path(__file__).parents[1] / "docs/images/how-tpl-works.svg"
INK, QUIET, LINE, PAPER = "#1f2937", "#6b7280", "#cbd5e1", "#f8fafc"
COLOURS = ("#2563eb", "#d97706", "#059669")
TASKS = (("Task 1", "cat", "dog"), ("Task 2", "car", "bus"), ("Task 3", "oak", "elm"))
OWNER = 1  # the task whose model knows the image in the example
GAMMA = 0.5  # ten times TPL's temperature: with 0.05 the largest of these three probabilities would be 1.00
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "tpl", "font.family": "sans-serif", "font.size": 11}


def points(task: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What one task's model makes of its own images, their classes, other tasks' stored images, and the new image."""
    random = np.random.default_rng(task + 7)
    centres = np.array([[-1.5, 0.9], [1.3, 0.9]])
    classes = np.repeat([0, 1], 26)
    own = centres[classes] + 0.34 * random.standard_normal((52, 2))
    others = np.array([0.0, -1.2]) + np.array([0.75, 0.34]) * random.standard_normal((22, 2))
    new = np.array([1.05, 0.7]) if task == OWNER else np.array([(0.35, 0, -0.5)[task], -1.0])
    return own, classes, others, new


def scores() -> list[float]:
    """Each task's score of the new image."""
    found = []
    for task in range(len(TASKS)):
        own, classes, others, new = (torch.tensor(part) for part in points(task))
        logits = torch.stack([6 * (1 - (own - own[classes == c].mean(0)).norm(dim=1) / 3) for c in (0, 1)], dim=1)
        new = new.unsqueeze(0)
        of_new = torch.stack([6 * (1 - (new - own[classes == c].mean(0)).norm(dim=1) / 3) for c in (0, 1)], dim=1)
        score = LikelihoodRatio().fit_features(own, logits, classes, others)
        found.append(float(score.score_features(new, of_new)))
    return found


def feature_panel(axes: Axes, task: int) -> None:
    """One task's feature space."""
    own, classes, others, new = points(task)
    axes.scatter(*others.T, s=13, marker="x", linewidths=1, color="#94a3b8")
    for c, alpha in ((0, 0.95), (1, 0.5)):
        axes.scatter(*own[classes == c].T, s=11, color=COLOURS[task], alpha=alpha, linewidths=0)
        x, y = own[classes == c].mean(0)
        axes.annotate(TASKS[task][1 + c], (x, y + 0.83), ha="center", color=COLOURS[task])
    axes.scatter(*new, s=150, marker="*", color=INK, zorder=5, linewidths=0)
    axes.set(xlim=(-3.0, 3.0), ylim=(-2.2, 2.35), xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_color(LINE)


def bars(axes: Axes, values: list[float], names: list[str], colours: list[str]) -> None:
    """Horizontal bars with their values."""
    places = np.arange(len(values))[::-1]
    axes.barh(places, values, height=0.62, color=colours)
    for place, value, name in zip(places, values, names, strict=True):
        axes.text(-0.04, place, name, ha="right", va="center", color=INK)
        axes.text(value + 0.03, place, f"{value:.2f}", ha="left", va="center", color=INK)
    axes.set(xlim=(0, 1.25), ylim=(-0.6, len(values) - 0.4), xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)


def box(sheet: Axes, x: float, y: float, width: float, height: float, **look: Any) -> None:
    """A rounded box."""
    shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=8", linewidth=1.2, **look)
    sheet.add_patch(shape)


def arrow(sheet: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """An arrow in pixels of the drawing."""
    sheet.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=QUIET, linewidth=1.3))


def draw(file: Path) -> None:
    """The whole picture, 1080 by 560."""
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(10.8, 5.6), facecolor="white")
        sheet = figure.add_axes((0, 0, 1, 1))
        sheet.set(xlim=(0, 1080), ylim=(0, 560))
        sheet.axis("off")
        heads = [
            (70, "A new image"),
            (262, "1  Frozen encoder,\na mask for each task"),
            (483, "2  Own classes against\nstored images of others"),
            (755, "3  Softmax of scores:\nP(task | image)"),
            (967, "4  Times\nP(class | image, task)"),
        ]
        for x, text in heads:
            sheet.text(x, 524, text, ha="center", va="center", color=INK, weight="bold", fontsize=11.5)
        for offset, colour in ((8, "#e2e8f0"), (4, "#f1f5f9"), (0, "white")):
            sheet.add_patch(Rectangle((32 + offset, 243 + offset), 72, 72, facecolor=colour, edgecolor=LINE))
        sheet.scatter([68], [279], marker="*", s=620, color=INK, linewidths=0)
        claims = np.array(scores())
        shares = np.exp((claims - claims.max()) / GAMMA)
        shares /= shares.sum()
        for task, (name, *_) in enumerate(TASKS):
            y = 352 - 153 * task
            arrow(sheet, (114, 280), (176, y + 64))
            box(sheet, 178, y + 14, 168, 100, facecolor=PAPER, edgecolor=COLOURS[task])
            sheet.text(262, y + 96, name, ha="center", va="center", color=COLOURS[task], weight="bold")
            random = np.random.default_rng(task)
            for column in range(9):
                for row in range(4):
                    on = random.random() < 0.42
                    place = (196 + 15 * column, y + 25 + 15 * row)
                    unit = Rectangle(place, 11, 11, facecolor=COLOURS[task] if on else "#e2e8f0", linewidth=0)
                    sheet.add_patch(unit)
            arrow(sheet, (348, y + 64), (378, y + 64))
            panel = figure.add_axes((380 / 1080, (y + 0) / 560, 206 / 1080, 128 / 560))
            feature_panel(panel, task)
            arrow(sheet, (590, y + 64), (622, y + 64))
            sheet.text(630, y + 64, f"score\n{claims[task]:.2f}", va="center", linespacing=1.3, color=INK)
            arrow(sheet, (684, y + 64), (712, 280 + (64 - 64 * task)))
        names = [name for name, *_ in TASKS]
        inner = figure.add_axes((770 / 1080, 190 / 560, 84 / 1080, 180 / 560))
        bars(inner, shares.tolist(), names, list(COLOURS))
        arrow(sheet, (874, 280), (900, 280))
        within = [(0.71, 0.29), (0.06, 0.94), (0.55, 0.45)]
        final = [float(shares[t] * p) for t in range(3) for p in within[t]]
        order = np.argsort(final)[::-1][:4]
        labels = [TASKS[i // 2][1 + i % 2] for i in order]
        last = figure.add_axes((946 / 1080, 190 / 560, 92 / 1080, 180 / 560))
        bars(last, [final[i] for i in order], labels, [COLOURS[i // 2] for i in order])
        for x, y, text in (
            (70, 214, "its task is\nnot known"),
            (262, 18, "coloured: units\nthis task may use"),
            (483, 18, "dots: own classes; star: the new image;\ncrosses: stored images of other tasks"),
            (832, 92, "score: likelihood ratio composed with\nthe maximum logit, Eq. 7 to 11"),
            (986, 165, "the class, Eq. 3"),
        ):
            sheet.text(x, y, text, ha="center", va="center", color=QUIET, fontsize=9.5)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, format="svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
