"""GradNorm: size of the gradient that would make the prediction uniform."""

from __future__ import annotations

from torch import Tensor

from tpl.scores.logits import LogitScore


class GradNorm(LogitScore):
    """S(x) = || d/dW sum_c -log softmax(f)_c ||_1, over the weight of the head.

    The gradient is the outer product of C softmax(f) - 1 and z, so no backward pass is needed:
    S(x) = || C softmax(f) - 1 ||_1 * || z ||_1.
    """

    name = "gradnorm"
    summary = "size of the head's gradient towards a uniform prediction"
    paper = "Huang et al., GradNorm, NeurIPS 2021"

    def score_features(self, z: Tensor, logits: Tensor) -> Tensor:
        """|| C p - 1 ||_1 * || z ||_1."""
        slope = logits.shape[1] * logits.double().softmax(dim=1) - 1
        return slope.abs().sum(dim=1) * z.double().abs().sum(dim=1)
