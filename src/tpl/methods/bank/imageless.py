"""Statistics that replace the replay memory where no image may be stored.

`features`: a mean per class and one scatter matrix of the encoder's own features (`tpl.scores.encoded`), from which the
distance to other tasks' classes is computed, as otherwise from the memory. `none`: not even these. With both, the
weights of the scores (logits, distances) are fitted on every new task's images under the old tasks' models
(`tpl.scores.evidence`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpl.scores.encoded import EncoderSpace
from tpl.scores.evidence import Evidence
from tpl.scores.ratio import LOGITS, RatioConfig
from tpl.store import under_prefix

IMAGES, FEATURES, NONE = "images", "features", "none"
KINDS = (IMAGES, FEATURES, NONE)
SHOWN = 512  # number of a new task's images that are run through the old tasks' models
SPACE, SUMS = "memory.encoder.", "memory.evidence."
DISTANCE = len(LOGITS)  # the column of S_MD in the evidence; the contrast in encoder features is the next


class StoredStatistics:
    """Sums over images that are not stored, and the scores and weights computed from them."""

    def __init__(self, kind: str, shrinkage: str) -> None:
        self.space = EncoderSpace(shrinkage) if kind == FEATURES else None
        self.evidence = Evidence(DISTANCE + 1 + (kind == FEATURES))

    def contrast(self, common: Tensor, task_classes: Sequence[Sequence[str]]) -> Tensor:
        """`EncoderSpace.contrast` of every task, `[n, tasks]`."""
        assert self.space is not None
        return self.space.contrast(common[:, : self.space.means_.shape[1]], [len(names) for names in task_classes])

    def weigh(self, evidence: Tensor) -> None:
        """Add evidence `[n, tasks, kinds]` on images of the newest task, which is the last."""
        self.evidence.take(evidence[:, -1], evidence[:, :-1].flatten(0, 1))

    def weights(self, config: RatioConfig, contrasted: bool) -> Tensor:
        """The weight of every kind of evidence; 0 for those that the options exclude."""
        kinds = [] if config.logit_score == "none" else [list(LOGITS).index(config.logit_score)]
        kinds += [] if config.in_task == "none" else [DISTANCE]
        kinds += [DISTANCE + 1] if contrasted else []
        weights = torch.zeros(DISTANCE + 1 + contrasted, dtype=torch.float64)
        weights[kinds] = self.evidence.weights(kinds)
        return weights

    @property
    def bytes_used(self) -> int:
        """Size of the sums."""
        return sum(t.numel() * t.element_size() for t in self.state().values())

    def state(self) -> dict[str, Tensor]:
        """All sums."""
        space = {} if self.space is None else self.space.state()
        sums = {SUMS + k: v for k, v in self.evidence.state().items()}
        return sums | {SPACE + k: v for k, v in space.items()}

    def load_state(self, shared: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        if self.space is not None:
            self.space = EncoderSpace(self.space.shrinkage).load_state(under_prefix(SPACE, shared))
        if sums := under_prefix(SUMS, shared):
            self.evidence.load_state(sums)


def some_rows(count: int) -> Tensor:
    """Rows of a task's images to run through the old tasks' models: evenly spread, so from all its classes."""
    return torch.linspace(0, count - 1, min(count, SHOWN)).round().long()
