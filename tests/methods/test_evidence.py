"""How much kinds of evidence count: the discriminant, from sums."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from tpl.methods.bank.imageless import Evidence


def drawn(n: int, shift: list[float], seed: int) -> torch.Tensor:
    mixing = torch.tensor([[1.0, 0.4, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 0.5]])
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed)) @ mixing + torch.tensor(shift)


def test_weights_are_those_of_a_linear_discriminant_whatever_the_parts() -> None:
    own, foreign = drawn(300, [1.0, 2.0, 1.0], 0), drawn(300, [0.0, 0.0, 0.0], 1)
    parts = Evidence(3).add(own[:100], foreign[:250]).add(own[100:], foreign[250:])
    weights = parts.weights([0, 1, 2])
    labels = np.repeat([1, 0], 300)
    fitted = LinearDiscriminantAnalysis(solver="lsqr").fit(torch.cat([own, foreign]).numpy(), labels).coef_[0]
    np.testing.assert_allclose(weights.numpy(), fitted / fitted.sum(), rtol=1e-3)
    assert parts.weights([1])[0] == 1


def test_evidence_that_speaks_against_own_images_is_left_out() -> None:
    evidence = Evidence(3).add(drawn(300, [1.0, -2.0, 1.0], 0), drawn(300, [0.0, 0.0, 0.0], 1))
    weights = evidence.weights([0, 1, 2])
    assert weights[1] == 0 and bool((weights[[0, 2]] > 0).all())
    torch.testing.assert_close(weights[[0, 2]], evidence.weights([0, 2]))


def test_without_foreign_images_or_variation_weights_are_still_numbers() -> None:
    assert Evidence(2).weights([0, 1]).tolist() == [0.5, 0.5]
    still = torch.ones(5, 2)
    assert bool(Evidence(2).add(still, still).weights([0, 1]).isfinite().all())
