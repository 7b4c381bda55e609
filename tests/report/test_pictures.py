"""Stand-alone pictures: complete files of either kind, and the toy example's numbers as the paper has them."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from tpl.bench.densities import RunDensities, TaskDensities, densities
from tpl.errors import TplError
from tpl.report.densities import LETTERS, columns_for, draw_densities
from tpl.report.toy import draw_toy, log_normal, toy_numbers

DESCRIPTION = {"benchmark": "made-up", "method": "tpl", "order": "random:1"}


def task(number: int, *classes: str) -> TaskDensities:
    features = np.random.default_rng(number).normal(size=(60, 4))
    features[:20] += 2
    return densities(features, np.arange(60) < 20, number, classes)


@pytest.fixture(scope="module")
def found() -> RunDensities:
    return RunDensities(DESCRIPTION, "test images", [task(1, "cat", "$5", "犬"), task(2, *("long name",) * 5)])


def texts(file: Path) -> str:
    """All that an SVG says; matplotlib draws letters as shapes and notes the words in comments."""
    ElementTree.parse(file)
    return file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("panels", "columns"), [(1, 1), (2, 2), (5, 5), (6, 3), (7, 4), (8, 4), (9, 3), (10, 5), (20, 5)]
)
def test_panels_leave_few_places_empty(panels: int, columns: int) -> None:
    assert columns_for(panels) == columns


def test_the_densities_name_what_they_show(found: RunDensities, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "picture.svg"
    draw_densities(found, file)
    said = texts(file)
    assert "made-up, tpl, class order random:1" in said
    assert "Features of test images" in said
    assert "Task 1: cat, $5, 犬" in said
    assert len(", ".join(("long name",) * 5)) > LETTERS and "Task 2: 5 classes" in said
    for each in found.tasks:
        assert f"overlap {each.overlap:.2f}" in said
    assert said.count("the task's own images") == 1  # one legend for all panels
    again = tmp_path / "again.svg"
    draw_densities(found, again)
    assert again.read_bytes() == file.read_bytes()


def test_a_png_can_be_looked_at(found: RunDensities, tmp_path: Path) -> None:
    draw_densities(found, tmp_path / "densities.PNG")
    draw_toy(tmp_path / "toy.png")
    for name in ("densities.PNG", "toy.png"):
        with Image.open(tmp_path / name) as image:
            assert image.format == "PNG" and image.width > 900
            assert len(image.convert("RGB").getcolors(1 << 24)) > 100


def test_the_toy_example_is_the_papers(tmp_path: Path) -> None:
    numbers = toy_numbers()
    at_0, at_1 = numbers["points"]
    assert (at_0["x"], at_1["x"]) == (0, 1)
    assert at_0["p_t"] > at_1["p_t"] and numbers["likelihood_chooses"] == 0
    assert at_0["ratio"] == pytest.approx(0.1)
    assert at_1["ratio"] == pytest.approx(0.1 * math.exp(49.5))
    assert at_0["ratio"] < at_1["ratio"] and numbers["ratio_chooses"] == 1
    x, step = np.linspace(-8, 8, 4001, retstep=True)
    for variance in (1.0, 0.01):
        density = np.exp(log_normal(x, variance))
        assert density.sum() * step == pytest.approx(1)
        assert (density * x**2).sum() * step == pytest.approx(variance)
    draw_toy(tmp_path / "toy.svg")
    said = texts(tmp_path / "toy.svg")
    assert "assigns x = 0 to the task" in said and "assigns x = 1 to the task" in said


def test_what_cannot_be_written_is_said(found: RunDensities, tmp_path: Path) -> None:
    with pytest.raises(TplError, match=r"written as \.png or \.svg; got 'picture\.jpg'"):
        draw_densities(found, tmp_path / "picture.jpg")
    (tmp_path / "file").write_text("")
    with pytest.raises(TplError, match="cannot be written"):
        draw_toy(tmp_path / "file" / "toy.png")
