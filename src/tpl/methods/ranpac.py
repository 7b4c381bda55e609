"""RanPAC: ridge regression on random projections of first-task features (McDonnell et al., NeurIPS 2023).

Adapters are trained on the first task and frozen. An image's features z are then projected at random, and one ridge
regression to one-hot targets classifies all classes:

    h = relu(z R),   G = sum h h^T,   C = sum h y^T,   W = (G + lambda I)^-1 C,   class = argmax of h W

G and C are sums over all images seen, so they do not depend on the order of tasks, and no image is needed twice.
lambda is chosen anew after every task, by powers of ten: the one with the smallest squared error on a fifth of the
task's images that is left out of the sums meanwhile. By the paper's text (`ridge_fit=all`) these sums are those of all
tasks so far; in the public code (`ridge_fit=task`) those of the task alone.

As published: 10 000 random features for a first task of 2500 images or more; a cosine schedule and weight decay while
the first task is trained. Adapted to this toolkit: its adapters behind attention and MLP, layer norms and a linear head
are trained, where the paper has AdaptFormer, SSF or prompts under a cosine head; features are scaled to one length
before the projection; lambda is searched from its last value downhill, in units of G's mean diagonal, from 1e-8 to 10.
`ridge_criterion=entropy` is this toolkit's own rule. `adapt=none` leaves the encoder as it is. The softmax temperature,
which no prediction depends on, is fitted on the held-out fifth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpl.config import option
from tpl.methods.base import register
from tpl.methods.parts.first_task import ClosedFormMethod, FirstTaskConfig
from tpl.methods.parts.ridge import RandomRidge, RidgeConfig


@dataclass(frozen=True)
class RanPACConfig(RidgeConfig, FirstTaskConfig):
    """RanPAC's options; those of training matter for the first task alone, with `adapt=first`."""

    ridge_criterion: str = option(
        "error",
        "what the ridge's strength is chosen by: squared error, as published, or (entropy) cross-entropy first",
        ("error", "entropy"),
        group="ridge classifier",
    )
    ridge_fit: str = option(
        "all",
        "the sums under which the strength is chosen: of all tasks (paper), or of the newest task (public code)",
        ("all", "task"),
        group="ridge classifier",
    )
    logit_adjustment: bool = option(
        False, "answer as if all classes had equally many images; not as published", group="ridge classifier"
    )


class OwnTaskRidge(RandomRidge):
    """A ridge regression whose strength is chosen under the newest task's sums alone."""

    def learn(self, z: Tensor, y: Tensor, generator: torch.Generator) -> None:
        """Add a task; ridge and temperature are those that a regression on this task alone would choose."""
        alone = RandomRidge(self.projections, self.config)
        alone.learn(z, y - y.min(), generator)
        size = float(alone.gram.diagonal().mean())
        self.update(z, y)
        self.strength = alone.strength * size / (float(self.gram.diagonal().mean()) or 1.0)
        self.temperature = alone.temperature
        self._solve()


@register
class RanPAC(ClosedFormMethod):
    """A global classifier in closed form over random features."""

    name = "ranpac"
    summary = "ridge regression on random projections of features adapted to the first task; no replay"
    paper = "McDonnell et al., RanPAC: Random Projections and Pre-trained Models for Continual Learning, NeurIPS 2023"
    keeps = "a Gram matrix of random features and a sum a class"
    cost = "training on the first task alone, then one forward pass an image, once; one an answer"
    config_class = RanPACConfig
    config: RanPACConfig
    prefix = "ridge."

    @property
    def _kind(self) -> type[RandomRidge]:
        return OwnTaskRidge if self.config.ridge_fit == "task" else RandomRidge

    def new_classifier(self, z: Tensor) -> RandomRidge:
        """A ridge regression whose number of random features suits the first task."""
        return self._kind.drawn_for(z, self.config, self.generator("projection"))

    def stored_classifier(self, tensors: dict[str, Tensor]) -> RandomRidge:
        """The ridge regression that was stored."""
        return self._kind.from_state(tensors, self.config)
