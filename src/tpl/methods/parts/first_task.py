"""Adaptation to the first task, and closed-form classifiers over features that no later task changes.

With a pre-trained encoder, most of what training can gain is gained on the first task: adapters are trained on it and
then frozen. Every later task only adds its features to sums. So features never drift, nothing is forgotten, and no
image is needed twice.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from tpl.config import option
from tpl.engine import Callback, Compute, Samples
from tpl.methods.parts.fixed_features import FixedFeatures
from tpl.methods.parts.network import CosineScheduleConfig, NetworkMethod
from tpl.methods.parts.ridge import cross_entropies
from tpl.nets import Encoder
from tpl.store import State, under_prefix
from tpl.stream import Task

TEMPERATURES: tuple[float, ...] = tuple(2.0 ** (e / 4) for e in range(-48, 25))


@dataclass(frozen=True)
class FirstTaskConfig(CosineScheduleConfig):
    """Options of a method that adapts the encoder to the first task; those of training matter for that task alone."""

    adapt: str = option(
        "first",
        "first: adapters are trained on the first task, then frozen; none: the encoder as it is",
        ("first", "none"),
        group="encoder",
    )


class Classifier(Protocol):
    """A classifier of features in closed form: sums over samples, and what follows from them."""

    def learn(self, z: Tensor, y: Tensor, generator: torch.Generator) -> None:
        """Add a task's features `[n, dim]`, labelled by number among all classes."""

    def update(self, z: Tensor, y: Tensor) -> None:
        """Add more features of known classes."""

    def forget(self, c: int) -> None:
        """Remove a class."""

    def log_probabilities(self, z: Tensor) -> Tensor:
        """log P(class) of features, `[n, classes]`, float64."""

    def state(self) -> dict[str, Tensor]:
        """All tensors, for storage."""


class ClosedFormMethod(FixedFeatures, NetworkMethod):
    """A closed-form classifier over the features of an encoder that the first task may have adapted."""

    config_class = FirstTaskConfig
    config: FirstTaskConfig
    prefix: ClassVar[str] = "classifier."  # of the classifier's tensors in storage
    classifier: Classifier | None

    def __init__(self, encoder: Encoder, config: FirstTaskConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.classifier = None

    @abstractmethod
    def new_classifier(self, z: Tensor) -> Classifier:
        """A classifier without classes, for a first task with features `z`."""

    @abstractmethod
    def stored_classifier(self, tensors: dict[str, Tensor]) -> Classifier:
        """The classifier whose `state` is given, on the compute device."""

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Adapt to a first task if so configured; then add the task's features."""
        first = self.classifier is None
        if first and self.config.adapt == "first":
            super().learn_task(task, samples, callback)
            for _ in task.classes:
                self.network.drop(0)
        z, numbers = self.encode(samples, callback, self.features), samples.labels + len(self.classes_)
        if self.classifier is None:
            self.classifier = self.new_classifier(z)
        self.classifier.learn(z, numbers, self.generator("held out"))

    def features(self, pixels: Tensor) -> Tensor:
        """The encoder's features, or those of the network adapted to the first task."""
        return self.encoder_features(pixels) if self.config.adapt == "none" else NetworkMethod.features(self, pixels)

    def classify(self, z: Tensor) -> Tensor:
        """The classifier's log-probabilities."""
        return self.learned.log_probabilities(z)

    @property
    def learned(self) -> Classifier:
        """The classifier, which exists once there is a task."""
        assert self.classifier is not None
        return self.classifier

    def update_classes(self, task: Task, samples: Samples, held: Samples) -> None:
        """More images of known classes add to the sums."""
        self.learned.update(self.features(samples.pixels), self.numbers_of(task, samples))

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Drop the class's sums."""
        self.learned.forget(number)

    def state(self) -> State:
        """The adapted network, and the classifier's tensors."""
        found = super().state()
        shared = found.shared if self.config.adapt == "first" else {}
        own = {} if self.classifier is None else {self.prefix + k: v for k, v in self.classifier.state().items()}
        return State(shared | own, found.tasks)

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""
        if "head_bias" in state.shared:
            network = {k: v for k, v in state.shared.items() if not k.startswith(self.prefix)}
            super().load_state(State(network, state.tasks))
        own = {k: v.to(self.compute.device) for k, v in under_prefix(self.prefix, state.shared).items()}
        self.classifier = self.stored_classifier(own) if own else None


def best_temperature(logits: Tensor, y: Tensor) -> float:
    """The temperature at which logits `[n, classes]` of held-out samples have the smallest cross-entropy."""
    return TEMPERATURES[int(cross_entropies(logits, TEMPERATURES, y).mean(dim=1).argmin())]
