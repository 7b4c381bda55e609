"""Which unlabelled images are most worth a label: those the model is unsure about, and that differ from each other.

An image's embedding is the gradient of the loss with respect to the last layer, if the predicted class were right: its
length says how unsure the model is, its direction what the image looks like (Ash et al., 2020, BADGE). Images are
chosen one by one, each the farthest from all chosen before, and so never two that are nearly equal.
"""

from __future__ import annotations

import torch
from torch import Tensor


def most_useful(probabilities: Tensor, features: Tensor, count: int, unknown: Tensor | None = None) -> list[int]:
    """The rows of `count` images to label, the most useful first.

    `probabilities` are `[n, classes]`, `features` `[n, dim]` of unit length; `unknown` are scores from 0 to 1.
    """
    predicted = probabilities.argmax(dim=1, keepdim=True)
    gradient = probabilities.scatter_add(1, predicted, -torch.ones_like(predicted, dtype=probabilities.dtype))
    if unknown is not None:  # an image of no known class is worth a label, however sure the model is
        gradient = torch.cat([gradient, unknown.to(gradient).unsqueeze(1) ** 4], dim=1)
    length = gradient.square().sum(dim=1)
    distance = length.clone()
    chosen: list[int] = []
    for _ in range(min(count, len(length))):
        best = int(distance.argmax())
        chosen.append(best)
        product = (gradient @ gradient[best]) * (features @ features[best])
        distance = torch.minimum(distance, (length + length[best] - 2 * product).clamp_min(0))
        distance[chosen] = -1
    return chosen
