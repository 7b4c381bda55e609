"""The contract of a score: how much does a feature look like this task's? Higher means more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor


class Score(ABC):
    """A pure function of features and logits, fitted on one task.

    Works on plain tensors, so it is tested without a network. What `fit_features` learns ends in an
    underscore; `state` collects it for storage.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str] = ""

    def use_head(self, weight: Tensor, bias: Tensor) -> Self:
        """Take note of the task's head `[c, d]`, `[c]`, before `fit_features` or after `load_state`.

        For scores that look behind the logits; it is no part of `state`.
        """
        return self

    def use_memory(self, own: Tensor) -> Self:
        """Take note of the features `[m, d]` of the task's stored images as they are now; they change with every task.

        For scores that compare with single samples: a task's training data is gone.
        """
        return self

    @abstractmethod
    def fit_features(self, z: Tensor, logits: Tensor, y: Tensor, others: Tensor | None = None) -> Self:
        """Learn from a task's features `[n, d]`, own-class logits `[n, c]` and labels `[n]`.

        `others` are features of other tasks' replay samples under this task's model.
        """

    @abstractmethod
    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """One score per row, `[n]`, float64."""

    def state(self) -> dict[str, Tensor]:
        """What was learned, by name."""
        return {k: v for k, v in vars(self).items() if k.endswith("_") and isinstance(v, Tensor)}

    def load_state(self, state: dict[str, Tensor]) -> Self:
        """Take up what `state` gave."""
        for key, value in state.items():
            setattr(self, key, value)
        return self


def in_blocks(rows: Tensor, size: int) -> Sequence[Tensor]:
    """Rows in blocks that bound the memory; all at once while a graph is traced, whose number of rows is left open."""
    return [rows] if torch.compiler.is_compiling() else rows.split(size)
