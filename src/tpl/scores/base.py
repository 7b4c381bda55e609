"""The base class of scores: how in-distribution a feature is for a task; higher means more likely."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

import torch
from torch import Tensor


class Score(ABC):
    """A pure function of features and logits, fitted on one task.

    It works on plain tensors, so it can be tested without a network. Attributes that `fit_features` learns end in an
    underscore; `state` collects them for storage.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str] = ""

    def use_head(self, weight: Tensor, bias: Tensor) -> Self:
        """Store the task's head `[c, d]`, `[c]`, before `fit_features` or after `load_state`.

        For scores that need more than the logits; the head is not part of `state`.
        """
        return self

    def use_memory(self, own: Tensor) -> Self:
        """Store the features `[m, d]` of the task's images in the replay memory, which changes with every task.

        For scores that compare with single samples: the training data of earlier tasks is not stored.
        """
        return self

    @abstractmethod
    def fit_features(self, z: Tensor, logits: Tensor, y: Tensor, others: Tensor | None = None) -> Self:
        """Fit to a task's features `[n, d]`, own-class logits `[n, c]` and labels `[n]`.

        `others` are features of other tasks' replay samples under this task's model.
        """

    @abstractmethod
    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """One score per row, `[n]`, float64."""

    def state(self) -> dict[str, Tensor]:
        """Fitted tensors by name."""
        return {k: v for k, v in vars(self).items() if k.endswith("_") and isinstance(v, Tensor)}

    def load_state(self, state: dict[str, Tensor]) -> Self:
        """Restore what `state` returned."""
        for key, value in state.items():
            setattr(self, key, value)
        return self


def positive_mean(score: Tensor) -> Tensor:
    """The mean that scales a score to 1; where it is not clearly positive, the mean magnitude.

    Dividing by a negative mean would reverse the score, and by one near zero would let it explode.
    """
    mean, magnitude = score.double().mean(), score.double().abs().mean()
    return torch.where(mean > 0.1 * magnitude, mean, magnitude).clamp_min(1e-12)
