"""What several techniques share: means over rows, partners within a batch, boxes, images out of joint."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.engine import IGNORED


def mean_over(values: Tensor, rows: Tensor) -> Tensor:
    """The mean of the values `[b]` where `rows` is true, 0 where it is nowhere."""
    return torch.where(rows, values, 0).sum() / rows.sum().clamp_min(1)


def to_uniform(logits: Tensor) -> Tensor:
    """Cross-entropy of every row to the uniform distribution: logsumexp f - mean f."""
    return logits.logsumexp(dim=1) - logits.mean(dim=1)


def mixed_entropy(logits: Tensor, labels: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """The mean cross-entropy to `share` of a row's label and the rest of its partner's."""
    own, other = (F.cross_entropy(logits, y, ignore_index=IGNORED, reduction="none") for y in (labels, others))
    return mean_over(torch.lerp(other, own, share), labels != IGNORED)


def partners(labels: Tensor, draws: Tensor) -> Tensor:
    """For every row another one to mix it with, `[b]`: the next in a random circle of all rows that count.

    A row that is ignored, or counts alone, is its own partner.
    """
    ignored = labels == IGNORED
    order = (draws[: len(labels)] + ignored).argsort(stable=True)  # a draw is below 1: ignored rows come last
    place = torch.arange(len(labels), device=labels.device)
    counted = (~ignored).sum()
    following = torch.where(place < counted, (place + 1) % counted.clamp_min(1), place)
    return torch.empty_like(order).scatter(0, order, order[following])


def box(size: tuple[int, int], share: Tensor, draws: Tensor) -> Tensor:
    """A box, true inside, in images of this size `[h, w]`; it covers about `share` `[1]` of them.

    Its centre is drawn from all pixels; what would lie beyond the edge is cut off.
    """
    inside = []
    for length, draw in zip(size, draws.split(1), strict=True):
        pixel = torch.arange(length, device=draws.device)
        half, centre = (length * share.sqrt() / 2).floor(), (length * draw).floor()
        inside.append((pixel >= centre - half) & (pixel < centre + half))
    return torch.logical_and(inside[0].unsqueeze(1), inside[1])


def misplaced(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Images `[n, c, h, w]` whose quarters have changed places, all by one, two or three places each.

    They have a task's colours and strokes but are none of its things: outliers where there are no others.
    """
    high, wide = pixels.shape[2] // 2, pixels.shape[3] // 2
    corners = [(top, left) for top in (0, high) for left in (0, wide)]
    quarters = torch.stack([pixels[:, :, top : top + high, left : left + wide] for top, left in corners], dim=1)
    by = torch.randint(1, 4, (len(pixels), 1), generator=generator)
    order = ((torch.arange(4) + by) % 4).to(pixels.device)
    moved = quarters[torch.arange(len(pixels), device=pixels.device).unsqueeze(1), order]
    image = pixels.clone()  # of an odd number of rows or columns the last one stays
    for number, (top, left) in enumerate(corners):
        image[:, :, top : top + high, left : left + wide] = moved[:, number]
    return image
