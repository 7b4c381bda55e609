"""Fine-tuning: train on each new task without any protection of the old ones. The lower bound."""

from __future__ import annotations

from tpl.methods.base import register
from tpl.methods.parts.network import NetworkMethod


@register
class FineTune(NetworkMethod):
    """One network, trained on the newest task alone: it forgets."""

    name = "finetune"
    summary = "plain fine-tuning on each new task; no protection, no memory (the lower bound)"
    keeps = "the network alone"
    cost = "one pass a training image and epoch; one an answer"
    splits = True
    from_scratch = True
