"""RanPAC: ridge regression on random projections of a frozen encoder's features (McDonnell et al., NeurIPS 2023).

One pass, no replay, nothing forgotten: a Gram matrix and class sums are all that is kept, and they do not depend on the
order of tasks. `adapt=first` trains adapters on the first task and freezes them, as published.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tpl.config import option
from tpl.engine import Callback, Compute, Samples
from tpl.methods.base import register
from tpl.methods.parts.network import NetworkConfig, NetworkMethod
from tpl.methods.parts.ridge import RandomRidge, RidgeConfig
from tpl.nets import Encoder
from tpl.store import State, under_prefix
from tpl.stream import Task

RIDGE = "ridge."


@dataclass(frozen=True)
class RanPACConfig(RidgeConfig, NetworkConfig):
    """RanPAC's options; those of training matter for the first task alone, with `adapt=first`."""

    logit_adjustment: bool = option(
        False, "answer as if all classes had equally many images; not as published", group="ridge classifier"
    )
    adapt: str = option(
        "none", "none: the encoder as it is; first: adapted to the first task", ("none", "first"), group="encoder"
    )


@register
class RanPAC(NetworkMethod):
    """A global classifier in closed form over random features."""

    name = "ranpac"
    summary = "ridge regression on random projections of frozen features; one pass, no replay"
    paper = "McDonnell et al., RanPAC: Random Projections and Pre-trained Models for Continual Learning, NeurIPS 2023"
    keeps = "a Gram matrix of random features and a sum a class"
    cost = "one forward pass an image, once; one an answer"
    config_class = RanPACConfig
    config: RanPACConfig

    def __init__(self, encoder: Encoder, config: RanPACConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.ridge: RandomRidge | None = None

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Adapt to a first task if so configured; then add the task's features."""
        if self.ridge is None and self.config.adapt == "first":
            super().learn_task(task, samples, callback)
        seen, numbers = self.features(samples.pixels), samples.labels + len(self.classes_)
        if self.ridge is None:
            self.ridge = RandomRidge.drawn_for(seen, self.config, self.generator("projection"))
        self.ridge.learn(seen, numbers, self.generator("held out"))

    def features(self, pixels: Tensor) -> Tensor:
        """The encoder's features, or those of the network adapted to the first task."""
        if self.config.adapt == "none":
            return self.encoder_features(pixels)
        return super().features(pixels)

    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """Softmax of the predictions at the temperature fitted on held-out images."""
        assert self.ridge is not None
        return self.ridge.log_probabilities(self.features(pixels))

    def update_classes(self, task: Task, samples: Samples, held: Samples) -> None:
        """More images of known classes add to the sums."""
        assert self.ridge is not None
        self.ridge.update(self.features(samples.pixels), self.numbers_of(task, samples))

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Drop the class's sum."""
        assert self.ridge is not None
        self.ridge.forget(number)

    def state(self) -> State:
        """The adapted network, and the ridge's sums."""
        found = super().state()
        shared = found.shared if self.config.adapt == "first" else {}
        ridge = {} if self.ridge is None else {RIDGE + k: v for k, v in self.ridge.state().items()}
        return State(shared | ridge, found.tasks)

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""
        if "head_bias" in state.shared:
            network = {k: v for k, v in state.shared.items() if not k.startswith(RIDGE)}
            super().load_state(State(network, state.tasks))
        ridge = {k: v.to(self.compute.device) for k, v in under_prefix(RIDGE, state.shared).items()}
        self.ridge = RandomRidge.from_state(ridge, self.config) if ridge else None
