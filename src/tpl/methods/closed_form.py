"""Closed form: discriminant analysis times ridge regression over the frozen encoder; one pass, no training.

Both are solved from sums over all images seen, so tasks in any order give the result of all images at once, in about
the time that the encoder needs to see them. What has to be chosen is chosen by leave-one-out, which also measures the
accuracy of every class and calibrates the unknown score: no image need be held out. See `parts.closed_form`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpl.config import Config, option
from tpl.engine import Callback, Compute, Samples
from tpl.methods.base import UNKNOWN, Answers, LeftOut, Method, register, seeded
from tpl.methods.parts.closed_form import ClosedForm
from tpl.nets import Encoder
from tpl.store import State
from tpl.stream import Task


@dataclass(frozen=True)
class ClosedFormConfig(Config):
    """The one option."""

    random_features: int = option(
        0, "random features of the ridge regression; 0: 1024", minimum=0, group="ridge classifier", maximum=32768
    )


@register
class ClosedFormExperts(Method):
    """A global classifier in closed form, with an unknown score."""

    name = "closed-form"
    summary = "discriminant analysis times ridge regression on frozen features, in seconds; no training, no replay"
    keeps = "a mean a class, a covariance, a Gram matrix of random features, and up to 2000 feature vectors"
    cost = "one forward pass an image, once; one an answer"
    leaves_one_out = True
    config_class = ClosedFormConfig
    config: ClosedFormConfig

    def __init__(self, encoder: Encoder, config: ClosedFormConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.classifier: ClosedForm | None = None

    @property
    def learned(self) -> ClosedForm:
        """The classifier, which exists once there is a task."""
        assert self.classifier is not None
        return self.classifier

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Add the task's features."""
        z = self.encode(samples, callback)
        if self.classifier is None:
            drawn = seeded(0, 0, "closed form")  # whatever the method's seed: then models can be merged
            self.classifier = ClosedForm.drawn(z.shape[1], self.config.random_features, drawn, z.device)
        self._add(z, samples.labels + len(self.classes_))

    def hold_out(self, held: Samples) -> None:
        """Add these images, too: leave-one-out measures without them."""
        first = len(self.classes_) - len(self.task_classes_[-1])
        self._add(self.encoder_features(held.pixels), held.labels + first)

    def update_classes(self, task: Task, samples: Samples, held: Samples) -> None:
        """Add more images of known classes, as if they had always been there."""
        for part in (samples, held):
            if len(part):
                self._add(self.encoder_features(part.pixels), self.numbers_of(task, part))

    def _add(self, z: Tensor, numbers: Tensor) -> None:
        """Add images; one that is there already counts once, or leaving one out would not leave it out."""
        new = self.learned.new_pictures(z, numbers)
        self.repeated_ += len(new) - int(new.sum())
        if new.any():
            self.learned.learn(z[new], numbers[new])

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Remove the class's sums and stored feature vectors."""
        self.learned.forget(number)

    def forward(self, pixels: Tensor, want: Collection[str] = (), before: Tensor | None = None) -> Tensor:
        """The encoder's features."""
        return self.encoder_features(pixels) if before is None else before

    def blank_pass(self, want: Collection[str] = (), warm: bool = True) -> Tensor:
        """A feature vector is as good as an image: all that is stored acts on features."""
        return super().blank_pass(want) if warm else torch.ones(1, self.encoder.dim, device=self.compute.device)

    def decide(self, passes: Sequence[Tensor], want: Collection[str] = ()) -> Answers:
        """Class probabilities, and the unknown score if it is wanted."""
        z = torch.cat(list(passes))
        unknown = self.learned.unknown_scores(z) if UNKNOWN in want else None
        return Answers(self.learned.log_probabilities(z), unknown=unknown)

    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """log P(class | image), `[n, classes]`."""
        return self.answer(pixels).log_p

    def stored_vectors(self) -> tuple[Tensor, Tensor] | None:
        """Those that are left out in turn."""
        return None if self.classifier is None else (self.classifier.features, self.classifier.labels)

    def class_directions(self) -> Tensor | None:
        """The class means that discriminant analysis uses."""
        return None if self.classifier is None else self.classifier.statistics.means

    def left_out(self) -> LeftOut | None:
        """Stored feature vectors, each classified by all other images."""
        return None if self.classifier is None else LeftOut(*self.classifier.measured())

    def rejection_floor(self) -> float:
        """The smallest share that rests on counted images and not on extrapolation: one in all of them, plus one."""
        return self.learned.smallest_share

    def state(self) -> State:
        """The classifier's tensors."""
        shared = {} if self.classifier is None else self.classifier.state()
        return State(shared, [{} for _ in self.task_classes_])

    def snapshot(self) -> State:
        """The same without copies and with the Gram matrix as it is: tensors are only replaced, never written to."""
        shared = {} if self.classifier is None else self.classifier.state(whole=True)
        return State(shared, [{} for _ in self.task_classes_])

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""
        shared = {name: part.to(self.compute.device) for name, part in state.shared.items()}
        self.classifier = ClosedForm.from_state(shared) if shared else None
