"""Joint training (Non-CL): at every stage a new network is trained on all data so far. An upper bound.

The paper's rectified forgetting rate compares with its accuracy at each stage. A bound must be trained to the end: the
benchmarks give it epochs, a falling rate and flips of its own, whatever the other methods have.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpl.config import option
from tpl.engine import Callback, Samples
from tpl.methods.base import Method, register
from tpl.methods.parts.network import NetworkConfig, NetworkMethod
from tpl.stream import Task


@dataclass(frozen=True)
class JointConfig(NetworkConfig):
    """Options of joint training."""

    stages: str = option(
        "all",
        "the stages of a run at which a network is trained: all, or only the last one, at a fraction of the cost",
        ("all", "last"),
        group="training",
    )


@register
class Joint(NetworkMethod):
    """One network trained on all classes at once, from scratch at every stage. Needs all data."""

    name = "joint"
    summary = "joint training on all data so far, anew at every stage (an upper bound, Non-CL)"
    keeps = "nothing: it needs all data again at every stage"
    cost = "every image of all tasks so far, anew at every stage; one pass an answer"
    config_class = JointConfig
    config: JointConfig
    splits = True
    from_scratch = True
    cumulative = True

    def first_stage(self, stages: int) -> int:
        """The last stage of a run with `stages=last`, else the first."""
        return stages - 1 if self.config.stages == "last" else 0

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Start with a new network and train on the union of all tasks."""
        self.network = self.new_network()
        super().learn_task(task, samples, callback)
        self.conclude(samples)

    def trains_like(self, other: Method) -> bool:
        """Whether both train the same network: on the same samples, the results would be equal."""
        return (
            isinstance(other, Joint)
            and self.config.part(NetworkConfig) == other.config.part(NetworkConfig)
            and self.encoder.fingerprint == other.encoder.fingerprint
            and (self.seed, self.compute) == (other.seed, other.compute)
        )

    def learn_task_from(self, other: Method, task: Task, samples: Samples) -> None:
        """Copy the network that `other` has just trained on the same samples."""
        assert isinstance(other, Joint)
        self.network = self.new_network()
        self.network.grow(len(task.classes), self.generator("head"))
        self.network.load_state_dict(other.network.state_dict())
        self.conclude(samples)

    def conclude(self, samples: Samples) -> None:
        """Called with the training samples once the network is trained."""
