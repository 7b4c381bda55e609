"""SupSup for class-incremental learning: a supermask over random adapters for every task (Wortsman et al., 2020).

`hat` with another protection: only masks, norms and heads are trained, and no trained weight is shared.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpl.config import option
from tpl.methods.bank.protect import PROTECTIONS
from tpl.methods.base import register
from tpl.methods.hat import HAT, HATConfig


@dataclass(frozen=True)
class SupSupConfig(HATConfig):
    """HAT's options with supermasks as the default."""

    protect: str = option("supsup", "how tasks are kept apart", tuple(PROTECTIONS), group="masks")


@register
class SupSup(HAT):
    """Task models as supermasks, and a detector to choose among them."""

    name = "supsup"
    summary = "a supermask over random adapters for every task; an OOD detector (MSP) chooses the task"
    paper = "Wortsman et al., Supermasks in Superposition, NeurIPS 2020"
    keeps = "a task's supermask, norms, head, and what its detector needs"
    cost = "one pass a training image and epoch; a pass a task and answer"
    config_class = SupSupConfig
    from_scratch = False  # supermasks are laid over adapters
