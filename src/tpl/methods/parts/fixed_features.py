"""Features that no later task changes, and a classifier of them: an image that is seen again is not encoded again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from tpl.methods.base import Answers, Method


class FixedFeatures(Method):
    """A method that classifies features which are final once the first task is learned."""

    @abstractmethod
    def features(self, pixels: Tensor) -> Tensor:
        """Features of uint8 images, `[n, dim]`, equal after every task."""

    @abstractmethod
    def classify(self, z: Tensor) -> Tensor:
        """log P(class) of features, `[n, classes]`, float64."""

    def forward(self, pixels: Tensor, want: Collection[str] = (), before: Tensor | None = None) -> Tensor:
        """The features; those of an earlier call are still right."""
        return self.features(pixels) if before is None else before

    def decide(self, passes: Sequence[Tensor], want: Collection[str] = ()) -> Answers:
        """Class probabilities."""
        return Answers(torch.cat([self.classify(z) for z in passes]))

    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """What the classifier says of the images' features."""
        return self.classify(self.features(pixels))
