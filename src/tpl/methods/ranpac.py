"""RanPAC: ridge regression on random projections of a frozen encoder's features (McDonnell et al., NeurIPS 2023).

One pass, no replay, nothing forgotten: a Gram matrix and class sums are all that is kept, and they do not depend on the
order of tasks. `adapt=first` trains adapters on the first task and freezes them, as published.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpl.config import option
from tpl.engine import Compute, Inference, Listener, Samples
from tpl.methods.base import register
from tpl.methods.parts.network import NetworkConfig, NetworkMethod
from tpl.methods.parts.ridge import RandomRidge, features_for, held_out_rows
from tpl.nets import AdapterStack, Encoder
from tpl.state import State
from tpl.stream import Task


@dataclass(frozen=True)
class RanPACConfig(NetworkConfig):
    """RanPAC's options; those of training matter for the first task alone, with `adapt=first`."""

    width: int = option(0, "random features; 0: by the first task's size, 10 000 at most", minimum=0)
    adapt: str = option("none", "none: the encoder as it is; first: adapted to the first task", ("none", "first"))


@register
class RanPAC(NetworkMethod):
    """A global classifier in closed form over random features."""

    name = "ranpac"
    summary = "ridge regression on random projections of frozen features; one pass, no replay"
    paper = "McDonnell et al., RanPAC: Random Projections and Pre-trained Models for Continual Learning, NeurIPS 2023"
    config_class = RanPACConfig
    config: RanPACConfig

    def __init__(self, encoder: Encoder, config: RanPACConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.ridge: RandomRidge | None = None
        self._plain = Inference(encoder.plain, compute, self.preprocess.normaliser(compute.device, torch.float32))
        self._adapted = Inference(
            lambda images, norms, *weights: encoder(images, norms, AdapterStack(*weights), dtype=compute.dtype),
            compute,
            self.normalise,
        )

    def learn_task(self, task: Task, samples: Samples, listen: Listener) -> None:
        """Adapt to a first task if wanted; then take up the task's features."""
        if self.ridge is None:
            if self.config.adapt == "first":
                super().learn_task(task, samples, listen)
            width = self.config.width or features_for(len(samples))
            self.ridge = RandomRidge(self.encoder.dim, width, self.generator("projection"), self.compute.device)
        z, y = self.features(samples.pixels), samples.labels + len(self.classes_)
        self.ridge.learn(z, y, held_out_rows(samples.labels, self.generator("held out")))

    def features(self, pixels: Tensor) -> Tensor:
        """The encoder's features, or those of the network adapted to the first task."""
        if self.config.adapt == "none":
            return self._plain(pixels)
        return self._adapted(pixels, self.network.norms, *self.network.adapters.weights)

    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """Softmax of the answers at the temperature that fitted held-out images."""
        assert self.ridge is not None
        return self.ridge.logits(self.features(pixels)).log_softmax(dim=1)

    def update_classes(self, task: Task, samples: Samples, held: Samples) -> None:
        """More images of known classes add to the sums, as if they had always been there."""
        assert self.ridge is not None
        numbers = torch.tensor([self.classes_.index(name) for name in task.classes], device=samples.labels.device)
        self.ridge.add(self.features(samples.pixels), numbers[samples.labels])
        self.ridge.solve()

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Drop the class's sum."""
        assert self.ridge is not None
        self.ridge.forget(number)

    def state(self) -> State:
        """The adapted network, and the ridge's sums."""
        found = super().state()
        shared = found.shared if self.config.adapt == "first" else {}
        ridge = {} if self.ridge is None else {f"ridge.{k}": v for k, v in self.ridge.state().items()}
        return State(shared | ridge, found.tasks)

    def load_state(self, state: State) -> None:
        """Take up what `state` gave."""
        mine = {k.removeprefix("ridge."): v for k, v in state.shared.items() if k.startswith("ridge.")}
        if self.config.adapt == "first" and "head_bias" in state.shared:
            super().load_state(
                State({k: v for k, v in state.shared.items() if not k.startswith("ridge.")}, state.tasks)
            )
        device = self.compute.device
        self.ridge = RandomRidge.from_state({k: v.to(device) for k, v in mine.items()}) if mine else None
