"""Curves of accuracy over tasks."""

from __future__ import annotations

import numpy as np
import pytest

from tpl.report.columns import CONTINUAL, UPPER
from tpl.report.figures import Line, draw_curves
from tpl.report.svg import PAGE

NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "role", "seen"),
    [
        ([NAN, NAN, 0.9], UPPER, True),  # a bound that was trained after the last task only
        ([0.9], UPPER, True),
        ([0.9, 0.8, 0.7], UPPER, False),  # a dashed line
        ([0.9, 0.8, 0.7], CONTINUAL, True),
    ],
)
def test_a_point_without_neighbours_is_drawn(values: list[float], role: str, seen: bool) -> None:
    figure = draw_curves([Line("method", np.array(values), role)], [10, 20, 30][: len(values)], PAGE)
    (axes,) = figure.axes
    (line,) = axes.get_lines()
    assert (line.get_marker() not in ("None", None)) == seen
    assert f"method {100 * values[-1]:.1f}" in [text.get_text() for text in axes.texts]
