"""One network that rehearses: every task is trained together with a memory of old images."""

from __future__ import annotations

from dataclasses import dataclass

from tpl.config import option
from tpl.engine import Callback, Compute, Samples
from tpl.memory import FEATURE_POLICIES, POLICIES, Memory
from tpl.methods.parts.network import NetworkConfig, NetworkMethod
from tpl.nets import Encoder
from tpl.stream import Task


@dataclass(frozen=True)
class RehearsalConfig(NetworkConfig):
    """Options of a method that trains one network on new and remembered images."""

    memory: int = option(2000, "images kept for replay, all classes together", minimum=0)
    memory_policy: str = option(
        "random",
        "which images of a class are kept; herding: those whose mean feature stays closest to the class's",
        (*POLICIES, *FEATURE_POLICIES),
    )


class RehearsalMethod(NetworkMethod):
    """One growing head, and a memory with equally many images of every class.

    A step has as many remembered images as new ones. The first task has nothing to remember.
    """

    config_class = RehearsalConfig
    config: RehearsalConfig
    memory: Memory

    def __init__(self, encoder: Encoder, config: RehearsalConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.memory = Memory(config.memory, config.memory_policy, seed)

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Grow the head, train on new and remembered images, then remember some of the new ones."""
        self.fit(self.grow(task, samples), callback, replay=self.old_samples())
        self.remember(task, samples)

    def old_samples(self) -> Samples | None:
        """The memory's images, labelled by their class numbers; None while it is empty."""
        if not len(self.memory):
            return None
        device = self.compute.device
        return Samples(self.memory.pixels(self.preprocess, device), self.memory.labels.to(device))

    def remember(self, task: Task, samples: Samples) -> None:
        """Keep some images of a task that was just trained; `samples` are its images as the encoder takes them."""
        features = self.features(samples.pixels) if self.memory.ranks_by_features else None
        self.memory.add(task.train, len(task.classes), self.preprocess, self.compute.device, features)

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Drop the class's row of the head, and its images."""
        super().remove_class(task, own, number)
        self.memory.remove(number)
