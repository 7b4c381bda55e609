"""Options under the names they have today.

Model directories and runs keep the options they were made with. Some options have been renamed since; here are the
names and values that earlier versions wrote. An option that came later gets the value that stands for what was done
before. Only stored files are read this way: a command line or a program uses today's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_RENAMED = {  # the same in every method that had them
    "turned_classes": "rotation_classes",
    "looks": "tta",
    "even": "logit_adjustment",
    "sees": "expert_views",
    "covered": "passes_mass",
    "logit": "logit_score",
}
_RIDGE = {"width": "random_features", "ridge": "ridge_criterion"}
_HAT = {"choice": "task_choice", "also": "extra_scores", "store": "keep_images"}
_RENAMED_IN: dict[str, dict[str, str]] = {
    "ranpac": _RIDGE,
    "tpl-plus": _RIDGE | {"weight": "expert_weight", "balance": "expert_weighting"},
    "hat": _HAT,
    "supsup": _HAT,
    "afc": {"consolidation": "consolidation_weight", "scale": "logit_scale"},
    "beef": {"energy": "energy_weight"},
    "der": {"auxiliary": "auxiliary_weight"},
    "foster": {"keep": "distill_weight"},
    "gd": {"confidence": "confidence_weight"},
    "l2p": {"chosen": "prompts_per_image", "pool": "prompt_pool", "length": "prompt_length", "pull": "key_weight"},
    "pass": {"distill": "distill_weight", "prototypes": "prototype_weight"},
}
_VALUES: dict[str, dict[Any, Any]] = {
    "tta": {"upright": "none", "mirrored": "flip", "turned": "rotate"},
    "augment": {"mirror": "flip"},
}
# Options that are constants now, with the value they have.
_FIXED_IN: dict[str, dict[str, Any]] = {
    "afc": {"margin": 0.6, "stages": 4, "balanced_lr": 0.5},
    "beef": {"alignment": 1.7, "negative_lr": 0.01, "fusion_lr": 0.05},
    "der": {"retrained_lr": 1.0},
    "eeil": {"balanced_rate": 0.1},
    "foster": {"boosting_beta": 0.96, "compression_beta": 0.97},
    "gd": {"balanced_rate": 0.1},
    "hal": {"anchor_rate": 4.0},
    "more": {"back_update_batch": 16, "back_update_lr": 0.01},
    "owm": {"clip": 10.0},
    "row": {"head_batch": 32},
}
# Options that came later, with the value that stands for what was done before.
_REHEARSING = ("afc", "beef", "der", "eeil", "foster", "gd", "hal", "icarl", "replay")
_WITH_TASK_MODELS = ("hat", "more", "row", "supsup", "tpl", "tpl-plus")
_BEFORE_IN: dict[str, dict[str, Any]] = {method: {"replay_batches": "balanced"} for method in _REHEARSING}
_BEFORE_IN |= {method: {"adapted_blocks": "all"} for method in _WITH_TASK_MODELS}


def current_options(method: str, stored: Mapping[str, Any], complete: bool = True) -> dict[str, Any]:
    """The options that some version stored for a method, under today's names and with today's values.

    An option that is a constant now is left out if it had that value; with another value it stays, for whoever reads it
    to refuse. `complete`: these are all options of the method, so that one which is missing came later.
    """
    renamed, fixed = _RENAMED | _RENAMED_IN.get(method, {}), _FIXED_IN.get(method, {})
    found = {}
    for name, value in stored.items():
        if name in fixed and value == fixed[name]:
            continue
        today = renamed.get(name, name)
        found[today] = _VALUES.get(today, {}).get(value, value) if isinstance(value, str) else value
    return _BEFORE_IN.get(method, {}) | found if complete else found
