"""Joint training (Non-CL): at every stage a fresh network on all data so far. The upper bound.

Its accuracy at each stage is what the paper's rectified forgetting rate compares with.
"""

from __future__ import annotations

from tpl.engine import Callback, Samples
from tpl.methods.base import register
from tpl.methods.parts.network import NetworkMethod
from tpl.stream import Task


@register
class Joint(NetworkMethod):
    """One network trained on all classes at once, anew at every stage. Needs all data."""

    name = "joint"
    summary = "joint training on all data so far, anew at every stage (the upper bound, Non-CL)"
    keeps = "nothing: it needs all data again at every stage"
    cost = "every image of all tasks so far, anew at every stage; one pass an answer"
    splits = True
    from_scratch = True
    cumulative = True

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Forget everything and train on the union of all tasks."""
        self.network = self.new_network()
        super().learn_task(task, samples, callback)
