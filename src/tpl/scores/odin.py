"""ODIN: the softmax at a high temperature, of an image that was moved towards the predicted class."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from tpl.scores.logits import LogitScore


class Odin(LogitScore):
    """S(x) = max_c softmax(f(x') / T)_c, where x' = `perturb` of x.

    The image itself is out of a score's reach: whoever drives this one hands it the logits of x' in place of features.
    All values lie close to 1 / c, so they only compare in float64.
    """

    name = "odin"
    summary = "tempered softmax of the perturbed image"
    paper = "Liang et al., ODIN, ICLR 2018"
    perturbs: ClassVar[bool] = True

    def __init__(self, temperature: float = 1000.0, epsilon: float = 0.0014) -> None:
        self.temperature, self.epsilon = temperature, epsilon

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """max_c softmax(z / T)_c with `z` the logits of the perturbed image; those of the clean one are not needed."""
        return (z.double() / self.temperature).softmax(dim=1).amax(dim=1)


def perturb(images: Tensor, gradient: Tensor, epsilon: float, std: Tensor) -> Tensor:
    """x' = x - epsilon * sign(gradient) / std, for normalised images `[n, channels, h, w]`.

    `gradient` is that of CE(f / T, predicted class) with respect to the images, `std` the deviation per channel that
    they were divided by, `[channels]` or anything that broadcasts: `epsilon` counts in pixel values from 0 to 1.
    """
    if std.ndim == 1:
        std = std.view(-1, 1, 1)
    return images - epsilon * gradient.sign() / std.to(images)
