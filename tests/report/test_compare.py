"""What moved between two sets of runs: paired over class orders and seeds, with an interval and a verdict."""

from __future__ import annotations

from typing import Any

import pytest
from made_runs import LEVELS, found, in_order
from scipy import stats

from tpl.bench.results import RunResult
from tpl.report.compare import BETTER, NOISE, TOO_FEW, WORSE, Comparison, compare, comparison_table


def moved(before: list[RunResult], now: list[RunResult]) -> dict[str, Any]:
    return {d.column.key: d for d in compare(found(*now), found(*before)).differences}


def test_differences_are_paired_over_class_orders() -> None:
    gains = (0.02, 0.03, 0.025)
    before = [in_order("tpl", n, level) for n, level in enumerate(LEVELS)]
    now = [in_order("tpl", n, level + gains[n]) for n, level in enumerate(LEVELS)]
    last = moved(before, now[::-1])["last"]  # in whatever order they come
    assert last.mean == pytest.approx(0.025)
    test = stats.ttest_rel([run.summary["last"] for run in now], [run.summary["last"] for run in before])
    assert last.interval == pytest.approx(tuple(test.confidence_interval(0.95)))
    # The orders differ by six points, so that the unpaired means say nothing; the pairs do.
    assert last.verdict == BETTER
    assert moved(now, before)["last"].verdict == WORSE


def test_less_forgetting_is_better_and_noise_is_noise() -> None:
    before = [in_order("tpl", n, level, 0.08) for n, level in enumerate(LEVELS)]
    now = [
        in_order("tpl", n, level, drop) for n, (level, drop) in enumerate(zip(LEVELS, (0.05, 0.06, 0.055), strict=True))
    ]
    found = moved(before, now)
    assert found["forgetting_classic"].mean < 0 and found["forgetting_classic"].verdict == BETTER
    assert found["auroc"].verdict == NOISE and found["auroc"].mean == 0
    shown = {row[2].text: row[5].text for row in comparison_table(Comparison(tuple(found.values()), (), ())).rows}
    assert shown["AUROC"] == "0.00" and shown["Last"].startswith("+") and shown["Classic"].startswith("\N{MINUS SIGN}")
    wobble = [
        in_order("tpl", n, level + d) for n, (level, d) in enumerate(zip(LEVELS, (0.03, -0.02, 0.01), strict=True))
    ]
    assert moved([in_order("tpl", n, level) for n, level in enumerate(LEVELS)], wobble)["last"].verdict == NOISE


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_pairs_have_no_verdict(count: int) -> None:
    before = [in_order("tpl", n, 0.5) for n in range(count)]
    last = moved(before, [in_order("tpl", n, 0.9) for n in range(count)])["last"]
    assert last.verdict == TOO_FEW and (last.interval is None) == (count == 1)


def test_only_the_same_tasks_images_and_seeds_are_pairs() -> None:
    base = in_order("tpl", 0, 0.9)
    strangers = [
        in_order("tpl", 1, 0.9),
        in_order("tpl", 0, 0.9, seed=1),
        in_order("hat", 0, 0.9),
        in_order("tpl", 0, 0.9, data={"train": "x", "test": "x"}),
        in_order("tpl", 0, 0.9, validation=0.2),
    ]
    comparison = compare(found(base), found(*strangers))
    assert comparison.differences == () and len(comparison.only_ours) == 1 and len(comparison.only_theirs) == 5
    # Two that fit: the one with the same options is meant.
    tuned = in_order("tpl", 0, 0.6, options={"lr": 1.0})
    last = compare(found(base), found(tuned, in_order("tpl", 0, 0.8))).differences[0]
    assert last.theirs == in_order("tpl", 0, 0.8).summary["last"]
    assert compare(found(base), found(tuned, tuned)).differences == ()
