"""A second upper bound: ridge regression on the features of a jointly trained network and of the encoder itself.

The linear head of joint training is not the best classifier over its features. This one is RanPAC's, on the jointly
trained network's features beside the encoder's own, each scaled to length 1. Rectified forgetting is measured against
the better of the two bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.engine import Compute, Samples
from tpl.methods.base import register
from tpl.methods.joint import Joint, JointConfig
from tpl.methods.parts.ridge import RandomRidge, RidgeConfig
from tpl.nets import Encoder
from tpl.store import State, under_prefix

RIDGE = "ridge."


@dataclass(frozen=True)
class JointRidgeConfig(RidgeConfig, JointConfig):
    """Options of joint training and of the ridge."""


@register
class JointRidge(Joint):
    """Joint training whose head is replaced by ridge regression on random features."""

    name = "joint-ridge"
    summary = "ridge regression on the features of joint training and of the encoder (a second upper bound)"
    cost = "as joint, and one more pass an image; two an answer. In one command, joint and joint-ridge train once"
    config_class = JointRidgeConfig
    config: JointRidgeConfig

    def __init__(self, encoder: Encoder, config: JointRidgeConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.ridge: RandomRidge | None = None

    def conclude(self, samples: Samples) -> None:
        """Fit the ridge to the features of all images so far, anew at every stage."""
        inputs = self.features(samples.pixels)
        self.ridge = RandomRidge.drawn_for(inputs, self.config, self.generator("projection"))
        self.ridge.learn(inputs, samples.labels, self.generator("held out"))

    def features(self, pixels: Tensor) -> Tensor:
        """The network's features, after those of a pre-trained encoder itself; each scaled to length 1."""
        views = [self.encoder_features(pixels)] if self.encoder.pretrained else []
        return torch.cat([F.normalize(view, dim=1) for view in (*views, super().features(pixels))], dim=1)

    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """Softmax of the ridge's predictions."""
        assert self.ridge is not None
        return self.ridge.log_probabilities(self.features(pixels))

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Drop the class's row of the head, and its sum in the ridge."""
        super().remove_class(task, own, number)
        assert self.ridge is not None
        self.ridge.forget(number)

    def state(self) -> State:
        """The network and the ridge's sums."""
        found = super().state()
        ridge = {} if self.ridge is None else {RIDGE + k: v for k, v in self.ridge.state().items()}
        return State(found.shared | ridge, found.tasks)

    def load_state(self, state: State) -> None:
        """Restore network and ridge."""
        network = {k: v for k, v in state.shared.items() if not k.startswith(RIDGE)}
        super().load_state(State(network, state.tasks))
        ridge = {k: v.to(self.compute.device) for k, v in under_prefix(RIDGE, state.shared).items()}
        self.ridge = RandomRidge.from_state(ridge, self.config) if ridge else None
