"""ODIN against numpy, and its perturbation against a gradient worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.scores import Odin
from tpl.scores.logits import perturb


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_score_is_the_tempered_softmax_of_what_comes_in_place_of_features() -> None:
    perturbed, clean = 5 * normal(30, 4), normal(30, 4, seed=1)
    expected = scipy.special.softmax(perturbed.double().numpy() / 1000, axis=1).max(axis=1)
    np.testing.assert_allclose(Odin().score_features(perturbed, clean).numpy(), expected, rtol=1e-14)
    assert Odin.perturbs


def test_scores_at_a_high_temperature_still_differ() -> None:
    logits = torch.stack([torch.tensor([1.0, 0.0]), torch.tensor([1.0 + 1e-5, 0.0])])  # float32 would make them equal
    low, high = Odin().score_features(logits, logits)
    assert high > low


def test_at_temperature_one_it_is_the_maximum_softmax() -> None:
    logits = normal(9, 3)
    torch.testing.assert_close(
        Odin(temperature=1.0).score_features(logits, logits), logits.double().softmax(dim=1).amax(dim=1)
    )


@pytest.mark.parametrize("shape", [(3,), (3, 1, 1), (1, 3, 1, 1)])
def test_perturbation_by_hand(shape: tuple[int, ...]) -> None:
    images, gradient, std = normal(2, 3, 4, 4), normal(2, 3, 4, 4, seed=1), torch.tensor([0.2, 0.5, 1.0])
    gradient[0, 0, 0, 0] = 0
    found = perturb(images, gradient, 0.01, std.view(shape)).numpy()
    for channel, step in enumerate((0.05, 0.02, 0.01)):
        expected = images[:, channel].numpy() - step * np.sign(gradient[:, channel].numpy())
        np.testing.assert_allclose(found[:, channel], expected, rtol=1e-6)


def test_the_perturbation_makes_the_predicted_class_more_likely() -> None:
    weight, images = normal(4, 12).double(), normal(20, 3, 2, 2, seed=1).double().requires_grad_()
    logits = images.flatten(1) @ weight.T
    loss = F.cross_entropy(logits / 1000, logits.argmax(dim=1), reduction="sum")
    (gradient,) = torch.autograd.grad(loss, images)
    moved = perturb(images.detach(), gradient, 0.0014, torch.ones(3)).flatten(1) @ weight.T
    score = Odin()
    assert bool((score.score_features(moved, logits) > score.score_features(logits, logits)).all())
