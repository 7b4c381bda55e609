"""How much each of two opinions counts in their product, by images that neither was trained on.

    P(class | x) ~ P_bank(class | x)^a * P_global(class | x)^w

A task's model knows its training images too well, and the bank is as sure of a wrong answer as of a right one if it had
few images or little time. So a and w are those with the largest likelihood on held-out images. Of these nothing is kept
but their likelihood at every a and w that is tried; it is added up over tasks, each of which is asked about its own
images when it is learned. A few images say little, so there is a prior for what is usual.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

BANK = tuple(2.0**e for e in range(-6, 1))
EXPERT = tuple(2.0 ** (e / 2) for e in range(-4, 5))
# The expert's temperature is fitted already, the bank's is not. Chosen on held-out digits, 10 and 30 images a class.
USUAL = 1 / 8, 1.0
PRIOR = 1.0  # nats that half or twice the usual costs; it grows with the square of the logarithm


class Balance:
    """The likelihoods of held-out images, and the exponents they ask for."""

    def __init__(self, likelihoods: Tensor | None = None, images: int = 0) -> None:
        nothing = torch.zeros(len(BANK), len(EXPERT), dtype=torch.float64)
        self.likelihoods = nothing if likelihoods is None else likelihoods.cpu()  # logarithms
        self.images = images
        self.exponents = self._likeliest()  # a and w

    def noted(self, bank: Tensor, expert: Tensor, labels: Tensor) -> Self:
        """One that also knows some more held-out images: both log P(class | x), `[n, classes]`, and the truth."""
        own = labels.unsqueeze(1)
        more = [[(a * bank + w * expert).log_softmax(dim=1).gather(1, own).sum() for w in EXPERT] for a in BANK]
        told = torch.stack([torch.stack(row) for row in more]).cpu()
        return type(self)(self.likelihoods + told, self.images + len(labels))

    def _likeliest(self) -> tuple[float, float]:
        """By what was noted and by what is usual."""
        bank, expert = (torch.tensor(values, dtype=torch.float64) for values in (BANK, EXPERT))
        far = (bank / USUAL[0]).log2().square().unsqueeze(1) + (expert / USUAL[1]).log2().square()
        best = int((self.likelihoods - PRIOR * far).argmax())
        return BANK[best // len(EXPERT)], EXPERT[best % len(EXPERT)]

    def state(self) -> dict[str, Tensor]:
        """Everything."""
        return {"likelihoods": self.likelihoods, "images": torch.tensor(self.images)}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Self:
        """The one that `state` came from; a new one, if there is none."""
        return cls(state["likelihoods"], int(state["images"])) if state else cls()
