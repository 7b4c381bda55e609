"""Two models on the same images: which one is better, and whether that could be chance.

Only images that one model names right and the other wrong tell the models apart. If neither model is better, each of
these falls to either side like a coin: the exact test of McNemar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

SIGNIFICANT, PLAUSIBLE = 0.05, 0.5


@dataclass(frozen=True)
class Paired:
    """The comparison of a model with an older one on images whose classes both know."""

    images: int
    right: int  # images that the model names right
    right_before: int  # images that the older one names right
    gained: int  # right now, wrong before
    lost: int  # wrong now, right before
    lost_classes: dict[str, int]  # the lost images, by class

    @classmethod
    def of(cls, truth: Sequence[str], now: Sequence[str], before: Sequence[str]) -> Paired:
        """The comparison from the true classes and both models' predictions."""
        rows = list(zip(truth, now, before, strict=True))
        lost = [t for t, a, b in rows if a != t and b == t]
        counts = {name: lost.count(name) for name in dict.fromkeys(lost)}
        right, earlier = sum(t == a for t, a, _ in rows), sum(t == b for t, _, b in rows)
        by_count = dict(sorted(counts.items(), key=lambda entry: -entry[1]))
        return cls(len(rows), right, earlier, right - earlier + len(lost), len(lost), by_count)

    @property
    def chance(self) -> float:
        """The probability of a difference at least as large, in either direction, if neither model is better."""
        total, fewer = self.gained + self.lost, min(self.gained, self.lost)
        if not total:
            return 1.0
        tail: int = sum(comb(total, k) for k in range(fewer + 1))
        return min(1.0, float(2 * tail / 2**total))

    @property
    def verdict(self) -> str:
        """better or worse, with `perhaps` where it may be chance; equal where chance does as much every other time."""
        if self.gained == self.lost or self.chance > PLAUSIBLE:
            return "equal"
        word = "better" if self.gained > self.lost else "worse"
        return word if self.chance < SIGNIFICANT else f"perhaps {word}"

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON."""
        return {
            "images": self.images,
            "right": self.right,
            "right_before": self.right_before,
            "accuracy": self.right / self.images if self.images else None,
            "accuracy_before": self.right_before / self.images if self.images else None,
            "gained": self.gained,
            "lost": self.lost,
            "lost_classes": self.lost_classes,
            "chance": round(self.chance, 6),
            "verdict": self.verdict,
        }
