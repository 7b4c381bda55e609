"""How an answer looks at an image: as it is, and as its mirror image and its quarter turns beside that.

Features are the mean over looks at the upright image. A head that was trained with turned classes has outputs for every
turn, and each look is read by its own: the logits are the mean over turns (self-supervised label augmentation, Lee et
al., ICML 2020). Every look costs a pass, and none depends on the rest of the batch.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tpl.engine import QUARTERS


class Look(NamedTuple):
    """One look at images: mirrored or not, then turned by so many quarters."""

    mirrored: bool
    quarters: int

    def at(self, pixels: Tensor) -> Tensor:
        """The images `[..., size, size]` as this look has them."""
        pixels = pixels.flip(-1) if self.mirrored else pixels
        return pixels.rot90(self.quarters, dims=(-2, -1)) if self.quarters else pixels


Looks = tuple[Look, ...]


def _looks(mirrored: bool, turned: bool) -> Looks:
    sides = (False, True) if mirrored else (False,)
    return tuple(Look(side, quarters) for quarters in ((0, *QUARTERS) if turned else (0,)) for side in sides)


LOOKS: dict[str, Looks] = {
    "upright": _looks(mirrored=False, turned=False),
    "mirrored": _looks(mirrored=True, turned=False),
    "turned": _looks(mirrored=False, turned=True),
    "both": _looks(mirrored=True, turned=True),
}
UPRIGHT = LOOKS["upright"]
