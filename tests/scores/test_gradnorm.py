"""GradNorm's closed form against a backward pass per sample."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tpl.scores import GradNorm


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("classes", [1, 2, 6])
def test_is_the_norm_of_the_gradient_that_autograd_finds(classes: int) -> None:
    z, weight, bias = normal(15, 8), normal(classes, 8, seed=1).requires_grad_(), normal(classes, seed=2)
    expected = []
    for row in z:
        loss = -(weight @ row + bias).log_softmax(dim=0).sum()
        expected.append(torch.autograd.grad(loss, weight)[0].abs().sum())
    found = GradNorm().score_features(z, (z @ weight.T + bias).detach())
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-10, atol=1e-10)


def test_agrees_with_pytorch_ood_up_to_the_number_of_classes() -> None:
    """There the loss is the mean over classes, here the sum."""
    detector = pytest.importorskip("pytorch_ood.detector")
    z, head = normal(15, 8), torch.nn.Linear(8, 5).double()
    theirs = detector.GradNorm(head, param_filter=lambda name: name == "weight").to("cpu").predict(z)
    torch.testing.assert_close(GradNorm().score_features(z, head(z).detach()), -5 * theirs)
