"""Draw the pictures of docs/gallery.md from committed runs, and from one run on the bundled digits.

python recipes/gallery.py                             # all of them into docs/images, two minutes on two cores
python recipes/gallery.py --only accuracy-curve       # one of them, from results/ alone: three seconds
python recipes/gallery.py --run RUN --out pictures    # with a finished run of tpl on digits-5t instead of a new one

The pictures of the two web pages need Chromium; without it they are left out, and the recipe says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from tpl.bench.benchmarks import find_benchmark
from tpl.bench.densities import run_densities
from tpl.bench.metrics import accuracy_so_far
from tpl.bench.outputs import stream_of
from tpl.bench.results import RunResult
from tpl.bench.run import execute
from tpl.bench.spec import RunSpec
from tpl.learner import Learner
from tpl.report.columns import CONTINUAL, UPPER
from tpl.report.densities import draw_densities
from tpl.report.figures import Line, draw_curves, draw_scatter, scatter_of_study
from tpl.report.svg import CARD, PAGE, blank, standalone, to_svg

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "results" / "c100"
STUDY = RUNS / "study-vit-tiny-natural" / "study.json"
GROWTH = {"compact, two CPU cores": "growth-compact-cpu.json", "ViT-tiny, one H200": "growth-vit-tiny-grown-h200.json"}
BENCHMARK = "digits-5t"
INK, QUIET = PAGE.ink, 0.72


@dataclass
class Scene:
    """What the pictures are drawn from: committed runs, and one run of tpl on the digits that is made when needed."""

    folder: Path  # for the run and other files on the way
    given: Path | None = None
    epochs: int | None = None

    @cached_property
    def run(self) -> Path:
        """The directory of the run."""
        if self.given is not None:
            return self.given
        options = {} if self.epochs is None else {"epochs": self.epochs}
        execute(RunSpec(BENCHMARK, "tpl", device="cpu", options=options), self.folder / "run")
        return self.folder / "run"

    @cached_property
    def learner(self) -> Learner:
        """The run's model."""
        return Learner.load(self.run / "model", device="cpu")


def save(figure: Figure, file: Path, label: str) -> None:
    """An SVG file, readable on light and dark pages."""
    file.write_text(standalone(to_svg(figure, file.stem, label)), encoding="utf-8")


def save_webp(picture: Path, file: Path, width: int) -> None:
    """A picture as a small WebP file, at most `width` pixels wide."""
    with Image.open(picture) as image:
        small = image.convert("RGB")
        small.thumbnail((width, 10_000))
        small.save(file, quality=86, method=6)


def accuracy_curve(scene: Scene, file: Path) -> None:
    """Accuracy on all classes so far: fine-tuning falls; the upper bounds are points, trained after the last task."""
    runs = {
        "joint-ridge": (UPPER, sorted(RUNS.glob("c100-10t-vit-tiny-joint-ridge-*"))),
        "joint": (UPPER, sorted(RUNS.glob("c100-10t-vit-tiny-joint-[nr]a*"))),
        "tpl-plus": (CONTINUAL, sorted(RUNS.glob("c100-10t-vit-tiny-tpl-plus-grown-*"))),
        "ranpac": (CONTINUAL, sorted(RUNS.glob("c100-10t-vit-tiny-ranpac-first-*"))),
        "tpl": (CONTINUAL, sorted(RUNS.glob("c100-10t-vit-tiny-tpl-[nr]a*"))),
        "fine-tuning": (CONTINUAL, [RUNS / "c100-10t-vit-tiny-finetune-natural"]),
    }
    lines = []
    for name, (role, places) in runs.items():
        found = [RunResult.read(place) for place in places]
        curves = np.array([accuracy_so_far(run.matrices["cil"], run.sizes) for run in found])
        spread = curves.std(axis=0, ddof=1) if len(curves) > 1 else None
        lines.append(Line(name, curves.mean(axis=0), role, spread))
    classes = list(accumulate(len(names) for names in found[0].description["classes"]))
    ends = ", ".join(f"{line.name} {line.end[1]:.1f}" for line in lines if line.end)
    figure = draw_curves(lines, classes, PAGE)
    _magnify(figure, (5, 10), (76, 92))
    save(figure, file, f"Accuracy on all classes so far, C100-10T. At the end: {ends}.")


def _magnify(figure: Figure, stages: tuple[int, int], percent: tuple[int, int]) -> None:
    """A part of the curves, magnified in the empty middle of the figure."""
    (axes,) = figure.axes
    inset = axes.inset_axes((0.37, 0.33, 0.55, 0.4))
    inset.patch.set_facecolor(CARD)
    for line in axes.get_lines():
        inset.plot(
            *line.get_data(), color=line.get_color(), alpha=line.get_alpha(), linestyle=line.get_linestyle(),
            linewidth=line.get_linewidth(), marker=line.get_marker(), markersize=5, markeredgewidth=0,
        )  # fmt: skip
    inset.set(xlim=(stages[0] - 0.15, stages[1] + 0.15), ylim=percent)
    inset.set_xticks(range(stages[0], stages[1] + 1))
    inset.set_yticks(range(percent[0], percent[1] + 1, 4))
    inset.tick_params(colors=INK, length=0, labelsize=10.5, pad=5)
    inset.grid(axis="y", color=INK, alpha=0.14, linewidth=0.8)
    inset.spines[:].set(color=INK, alpha=0.3)
    inset.set_title(f"the same, {percent[0]} to {percent[1]} %", fontsize=11, color=INK, alpha=QUIET, loc="left", pad=6)


def how_tpl_works(scene: Scene, file: Path) -> None:
    """The overview, drawn by a tool of its own."""
    subprocess.run([sys.executable, ROOT / "tools" / "draw_overview.py", file], check=True)


def auroc_line(scene: Scene, file: Path) -> None:
    """Better out-of-distribution detectors are better task predictors: accuracy against AUROC."""
    scatter = scatter_of_study(json.loads(STUDY.read_text(encoding="utf-8")))
    label = f"Last accuracy against AUROC of {len(scatter.points)} detectors on C100-10T. {scatter.sentence}"
    figure = draw_scatter(scatter, PAGE)
    (axes,) = figure.axes
    for line, (mark, text, colour) in enumerate(
        (("●", "post-hoc detectors", PAGE.series[0]), ("■", "training techniques", PAGE.series[1]))
    ):
        axes.text(
            0.98, 0.16 - 0.06 * line, f"{mark} {text}", transform=axes.transAxes, ha="right", fontsize=11.5,
            color=colour,
        )  # fmt: skip
    if scatter.fit is not None:
        sentence = f"Pearson's r = {scatter.fit['r']:.2f}"
        axes.text(0.98, 0.03, sentence, transform=axes.transAxes, ha="right", fontsize=11.5, color=INK)
    save(figure, file, label)


def growth(scene: Scene, file: Path) -> None:
    """What a model of 5 to 100 tasks costs, in units of its cost at 5: learning a task, an answer, memory."""
    panels = {  # what it is called, its unit, and where the lower line's label stands
        "learn_s": ("time to learn a task", "s", 18),
        "answer_ms_batch": ("time of an answer", "ms", 18),
        "tensors_mb": ("size in memory", "MB", 45),
    }
    measured = {
        who: [p for p in json.loads((ROOT / "benchmarks" / name).read_text())["points"] if p["tasks"] >= 5]
        for who, name in GROWTH.items()
    }
    figure, first = blank(960, 300, 40, 640, 56, 46)
    places = [first, *(figure.add_axes(first.get_position().translated(x / 960, 0).bounds) for x in (318, 636))]
    said = []
    for axes, (key, (title, unit, below)) in zip(places, panels.items(), strict=True):
        axes.sharey(first)
        axes.patch.set_visible(False)
        axes.spines[:].set_visible(False)
        axes.tick_params(colors=INK, length=0, labelsize=11, pad=6)
        axes.grid(axis="y", color=INK, alpha=0.14, linewidth=0.8)
        axes.set_title(title, fontsize=13, color=INK, loc="left", pad=12)
        for (who, points), colour, mark in zip(measured.items(), PAGE.series, "os", strict=False):
            values = [point[key] / points[0][key] for point in points]
            tasks = [point["tasks"] for point in points]
            axes.plot(tasks, values, color=colour, marker=mark, markersize=5, linewidth=2, clip_on=False)
            higher = values[-1] == max(of[-1][key] / of[0][key] for of in measured.values())
            text = f"{points[0][key]:.3g} to {points[-1][key]:.3g} {unit}"
            axes.annotate(text, (100, values[-1]), (0, 8 if higher else -below), textcoords="offset points",
                          ha="right", fontsize=11.5, color=colour)  # fmt: skip
            said.append(f"{who}, {title}: {text}")
        axes.set_xticks([5, 20, 50, 100])
    first.set_ylim(0, 12)
    first.set_yticks([0, 1, 2, 4, 8, 12], ["0", "1 ×", "2 ×", "4 ×", "8 ×", "12 ×"])
    for number, (who, colour) in enumerate(zip(GROWTH, PAGE.series, strict=False)):
        figure.text((40 + 260 * number) / 960, 0.93, f"{'●■'[number]} {who}", fontsize=12, color=colour)
    figure.text(0.5, 0.02, "tasks learned", fontsize=11.5, color=INK, alpha=QUIET, ha="center")
    save(figure, file, "From 5 to 100 tasks. " + "; ".join(said))


def densities(scene: Scene, file: Path) -> None:
    """P_t and P_tc in the features of every task's model."""
    picture = scene.folder / "densities.png"
    draw_densities(run_densities(scene.run, device="cpu"), picture)
    save_webp(picture, file, 1400)


@dataclass(frozen=True)
class Case:
    """A test image that was answered wrongly."""

    pixels: np.ndarray  # [h, w], from 0 to 1
    true: int
    answered: int
    tasks: np.ndarray  # P(task | image)
    within: float  # P(true class | image, true task)


def wrong_cases(scene: Scene, count: int) -> tuple[list[Case], int, int]:
    """Wrong answers, the surest first; how many there are, and how many of these are in the wrong task."""
    learner = scene.learner
    classes = learner.method.task_classes_
    owner = np.repeat(np.arange(len(classes)), [len(names) for names in classes])
    found: list[tuple[float, Case]] = []
    for number, task in enumerate(stream_of(RunResult.read(scene.run).description, None)):
        assert task.test is not None
        probabilities, tasks = learner.predict_proba(task.test), learner.task_proba(task.test)
        offset = int((owner < number).sum())
        for row, answered in enumerate(probabilities.argmax(axis=1)):
            true = offset + int(task.test.labels[row])
            if answered != true:
                pixels = np.asarray(task.test.load(row).convert("L"), dtype=float) / 255
                within = probabilities[row, true] / probabilities[row, owner == number].sum()
                case = Case(pixels, true, int(answered), tasks[row], float(within))
                found.append((float(probabilities[row, answered]), case))
    found.sort(key=lambda pair: -pair[0])
    wrong_task = [case for _, case in found if owner[case.true] != owner[case.answered]]
    return wrong_task[:count], len(found), len(wrong_task)


def failure(scene: Scene, file: Path) -> None:
    """The surest answers in a wrong task."""
    cases, wrong, wrong_task = wrong_cases(scene, 3)
    names, classes = scene.learner.classes_, scene.learner.method.task_classes_
    owner = [t for t, own in enumerate(classes) for _ in own]
    images = sum(RunResult.read(scene.run).description["test_images"])
    width, height = 960, 270
    figure, sheet = blank(width, height, 0, 0, 0, 0)
    sheet.set(xlim=(0, width), ylim=(0, height), xticks=[], yticks=[])
    title = f"{wrong} of {images} test images are answered wrongly, {wrong_task} of them in the wrong task"
    sheet.text(24, height - 28, title, va="center", fontsize=14, fontweight="bold", color=INK)
    for number, case in enumerate(cases):
        left = 24 + 312 * number
        _draw_digit(sheet, case.pixels, left, 94, 96)
        text = f"This is a {names[case.true]}, not a {names[case.answered]}"
        sheet.text(left, 212, text, va="center", fontsize=12.5, fontweight="bold", color=INK)
        within = f"given its task: {names[case.true]} with {100 * case.within:.0f} %"
        sheet.text(left, 70, within, va="center", fontsize=11.5, color=INK, alpha=QUIET)
        for task, share in enumerate(case.tasks.tolist()):
            y = 182 - 20 * task
            true, answered = task == owner[case.true], task == owner[case.answered]
            colour = PAGE.series[2] if true else PAGE.series[1] if answered else INK
            alpha = 1 if true or answered else 0.4
            sheet.barh(y, max(88 * share, 1), height=12, left=left + 158, alpha=alpha, color=colour)
            sheet.text(left + 152, y, ", ".join(classes[task]), ha="right", va="center", fontsize=11, color=INK)
            sheet.text(left + 164 + 88 * share, y, f"{share:.2f}", va="center", fontsize=11, color=INK)
    caption = "Bars: P(task | image). Green: the image's own task. Orange: the task that was chosen."
    sheet.text(24, 28, caption, va="center", fontsize=11.5, color=INK, alpha=QUIET)
    save(figure, file, f"{title}. The surest three, with the probability of every task.")


def _draw_digit(sheet: Any, pixels: np.ndarray, left: float, bottom: float, side: float) -> None:
    """An image in ink, so that it is readable on light and dark pages."""
    rows, columns = pixels.shape
    cell = side / columns
    for row, column in np.argwhere(pixels > 0.04):
        corner = (left + cell * column, bottom + cell * (rows - 1 - row))
        sheet.bar(
            corner[0], cell, width=cell, bottom=corner[1], align="edge", color=INK, alpha=float(pixels[row, column]),
            linewidth=0,
        )  # fmt: skip
    sheet.plot(
        [left, left + side, left + side, left, left], [bottom, bottom, bottom + side, bottom + side, bottom],
        color=INK, alpha=0.3, linewidth=1,
    )  # fmt: skip


@contextmanager
def _browser(folder: Path) -> Iterator[Any]:
    """The tests' browser."""
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        from browser import Browser  # type: ignore[import-not-found,unused-ignore]
    finally:
        sys.path.pop(0)
    with Browser(folder / "profile") as opened:
        yield opened


def serve_page(scene: Scene, file: Path) -> None:
    """The page of `tpl serve`, with the answer to one image."""
    task = find_benchmark(BENCHMARK).stream(None, "natural")[2]
    assert task.test is not None
    image = scene.folder / "a digit.png"
    task.test.load(3).resize((128, 128), Image.Resampling.BICUBIC).save(image)
    command = [sys.executable, "-m", "tpl", "serve", str(scene.run / "model"), "--port", "0", "--device", "cpu"]
    server = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert server.stdout is not None
        address = json.loads("".join(iter(server.stdout.readline, "}\n")) + "}")["url"]
        with _browser(scene.folder) as browser:
            browser.open(address, 1000, 800)
            browser.choose("#images", [image])
            browser.wait("document.querySelector('.result .verdict b')")
            browser.wait("parseFloat(document.querySelector('.of-classes .fill').style.width) > 0")
            _shoot(browser, scene.folder / "serve.png", file, 1000, 800)
    finally:
        server.kill()
        server.communicate()


def report_page(scene: Scene, file: Path) -> None:
    """The page of `tpl report` about four methods and both upper bounds."""
    methods = "tpl-plus-grown", "tpl", "ranpac-first", "finetune", "joint", "joint-ridge"
    runs = [RUNS / f"c100-10t-vit-tiny-{name}-natural" for name in methods]
    page = scene.folder / "report.html"
    command = [sys.executable, "-m", "tpl", "report", *map(str, runs), "--out", str(page)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with _browser(scene.folder) as browser:
        browser.open(page.as_uri(), 1100, 1000)
        _shoot(browser, scene.folder / "report.png", file, 1100, 1350)


def _shoot(browser: Any, picture: Path, file: Path, width: int, height: int) -> None:
    """The page's upper part as WebP, after its transitions."""
    browser.evaluate("new Promise((done) => setTimeout(done, 700))")
    size = browser.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
    browser.picture(picture, (min(width, size[0]), min(height, size[1])))
    save_webp(picture, file, 1000)


PICTURES: dict[str, Callable[[Scene, Path], None]] = {
    "accuracy-curve.svg": accuracy_curve,
    "how-tpl-works.svg": how_tpl_works,
    "auroc-line.svg": auroc_line,
    "growth.svg": growth,
    "densities.webp": densities,
    "failure.svg": failure,
    "serve-page.webp": serve_page,
    "report-page.webp": report_page,
}
NEED_BROWSER = ("serve-page.webp", "report-page.webp")


def has_browser() -> bool:
    """Whether the tests' browser is installed."""
    from shutil import which

    return any(which(name) for name in ("chromium", "chromium-browser", "google-chrome"))


def make(names: Sequence[str], out: Path, scene: Scene) -> list[Path]:
    """Draw the pictures of these names; returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for name in names:
        if name in NEED_BROWSER and not has_browser():
            print(f"{name} is left out: Chromium is not installed.")
            continue
        PICTURES[name](scene, out / name)
        files.append(out / name)
        print(f"{out / name}: {files[-1].stat().st_size / 1000:.0f} kB")
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stems = {Path(name).stem: name for name in PICTURES}
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="the folder of the pictures")
    parser.add_argument("--only", help=f"some of them, joined by commas: {', '.join(stems)}")
    parser.add_argument("--run", type=Path, help="a finished run of tpl on digits-5t; without it, one is made")
    parser.add_argument("--epochs", type=int, help="epochs a task of the run that is made")
    given = parser.parse_args()
    wanted = given.only.split(",") if given.only else list(stems)
    if unknown := set(wanted) - set(stems):
        parser.error(f"there is no picture {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        make([stems[name] for name in wanted], given.out, Scene(Path(folder), given.run, given.epochs))


if __name__ == "__main__":
    main()
