"""Options that earlier versions stored are read under today's names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpl.bench.results import read_description
from tpl.methods import find_method, load_methods
from tpl.migrate import current_options

ROOT = Path(__file__).parents[1]
LATER = {"replay_batches", "adapted_blocks"}  # options that are added to those of early versions
RUNS = sorted(file.parent for file in (ROOT / "results").rglob("run.json"))
# One option that is not in the configuration of every method that has it stored would make this a test of nothing.
OLD = {
    "tpl": {"turned_classes": True, "looks": "turned", "augment": "mirror", "logit": "ebo"},
    "tpl-plus": {"width": 64, "ridge": "error", "even": False, "sees": "first", "weight": 1.0, "balance": "fixed",
                 "covered": 0.9, "looks": "upright"},
    "ranpac": {"width": 64, "even": True},
    "hat": {"choice": "calibrated", "also": "all", "store": True},
    "supsup": {"choice": "hard"},
    "afc": {"consolidation": 2.0, "scale": 5.0, "margin": 0.6, "stages": 4, "balanced_lr": 0.5},
    "beef": {"energy": 0.1, "alignment": 1.7, "negative_lr": 0.01, "fusion_lr": 0.05},
    "der": {"auxiliary": 0.5, "retrained_lr": 1.0},
    "eeil": {"balanced_rate": 0.1},
    "gd": {"confidence": 0.5, "balanced_rate": 0.1},
    "foster": {"keep": 0.5, "boosting_beta": 0.96, "compression_beta": 0.97},
    "hal": {"anchor_rate": 4.0},
    "l2p": {"chosen": 2, "pool": 4, "length": 3, "pull": 0.2},
    "more": {"back_update_batch": 16, "back_update_lr": 0.01},
    "owm": {"clip": 10.0},
    "pass": {"distill": 2.0, "prototypes": 3.0},
    "row": {"head_batch": 32},
}  # fmt: skip


@pytest.mark.parametrize("method", sorted(OLD))
def test_old_names_and_values_become_those_of_today(method: str) -> None:
    today = current_options(method, OLD[method])
    config_class = find_method(method).config_class
    config = config_class.parse(today)
    kept = [value for name, value in OLD[method].items() if not hasattr(config_class, name)]
    later = len(LATER & set(today))
    assert len(today) == len(kept) + ("augment" in OLD[method]) + later
    assert current_options(method, config.to_dict()) == config.to_dict()  # today's own are left as they are
    for name, value in OLD[method].items():
        if name not in today and hasattr(config_class, name):
            assert getattr(config, name) == value  # a constant with the value that was the default


def test_replay_was_balanced_before_there_was_a_choice() -> None:
    for name in ("replay", "icarl", "eeil", "gd", "der", "foster", "afc", "beef", "hal"):
        options = find_method(name).config_class().to_dict()
        del options["replay_batches"]
        assert current_options(name, options)["replay_batches"] == "balanced", name
        assert current_options(name, options | {"replay_batches": "union"})["replay_batches"] == "union"
    assert "replay_batches" not in current_options("replay", {"memory": 5}, complete=False)
    assert "replay_batches" not in current_options("agem", find_method("agem").config_class().to_dict())
    run = read_description(ROOT / "results/c100/baselines-vit-tiny-natural/eeil")
    assert run["options"]["replay_batches"] == "balanced"


def test_values_follow() -> None:
    assert current_options("tpl", OLD["tpl"]) == {
        "rotation_classes": True, "tta": "rotate", "augment": "flip", "logit_score": "ebo", "adapted_blocks": "all"
    }  # fmt: skip


def test_a_constant_that_had_another_value_is_refused() -> None:
    today = current_options("owm", {"clip": 3.0})
    with pytest.raises(Exception, match="no option 'clip'"):
        find_method("owm").config_class.parse(today)


def test_every_committed_run_has_options_that_exist() -> None:
    methods = load_methods()
    assert len(RUNS) > 50
    for run in RUNS:
        description = read_description(run)
        methods[description["method"]].config_class.parse(description["options"])
        raw = json.loads((run / "run.json").read_text(encoding="utf-8"))
        later = len(LATER & (set(description["options"]) - set(raw["options"])))
        assert len(description["options"]) <= len(raw["options"]) + later
