"""HAT's arithmetic against hand computation and autograd."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tpl.methods.bank import protect
from tpl.nets import Adapters
from tpl.nets.blocks import AdapterMasks, adapt


def test_scale_rises_from_the_inverse_and_never_reaches_the_maximum() -> None:
    scales = [protect.scale_at(b / 79, 400.0) for b in range(79)]
    assert scales[0] == 1 / 400
    assert all(a < b for a, b in itertools.pairwise(scales))
    assert scales[-1] < 400
    assert scales[40] - scales[39] == pytest.approx((400 - 1 / 400) / 79)


def test_regulariser_is_the_mean_mask_at_first_and_counts_free_units_later() -> None:
    mask = torch.tensor([1.0, 0.5, 0.0, 1.0])
    assert protect.regulariser(mask, None) == pytest.approx(2.5 / 4)
    used = torch.tensor([1.0, 0.0, 0.0, 1.0])
    assert protect.regulariser(mask, used) == pytest.approx(0.5 / 2)
    assert protect.regulariser(used, used) == 0  # a mask inside what is used costs nothing
    assert protect.regulariser(mask, torch.ones(4)) == 0  # and a full network is no 0/0


@pytest.mark.parametrize("scale", [1 / 400, 1.0, 20.0, 400.0])
def test_compensated_gradient_does_not_depend_on_the_scale(scale: float) -> None:
    """g * factor = dL/dm * s_max * sigmoid'(e) wherever |s e| is small enough for float32."""
    embedding = torch.tensor([-0.03, -0.01, 0.005, 0.02], requires_grad=True)
    pull = torch.tensor([1.0, -2.0, 3.0, 0.5])
    (protect.soft_mask(embedding, scale) * pull).sum().backward()
    assert embedding.grad is not None
    compensated = protect.compensate(embedding.grad, embedding.detach(), scale, 400.0)
    open_ = torch.sigmoid(embedding.detach())
    torch.testing.assert_close(compensated, pull * 400 * open_ * (1 - open_), rtol=2e-3, atol=0)


def test_compensation_is_the_published_factor() -> None:
    g, e, s = torch.tensor([0.7]), torch.tensor([0.11]), 37.0
    factor = 400 / s * (math.cosh(s * 0.11) + 1) / (math.cosh(0.11) + 1)
    torch.testing.assert_close(protect.compensate(g, e, s, 400.0), g * factor)


def test_compensation_stays_finite_at_the_extremes() -> None:
    embedding = torch.tensor([-6.0, -0.2, 0.0, 0.2, 6.0], requires_grad=True)
    for scale in (1 / 400, 400.0):
        embedding.grad = None
        protect.soft_mask(embedding, scale).sum().backward()
        assert embedding.grad is not None
        assert protect.compensate(embedding.grad, embedding.detach(), scale, 400.0).isfinite().all()


def test_analytic_mask_has_the_soft_masks_value_and_the_compensated_gradient() -> None:
    embedding = torch.tensor([-0.5, 0.01, 2.0], requires_grad=True)
    mask = protect.AnalyticMask.apply(embedding, 50.0, 400.0)
    torch.testing.assert_close(mask, protect.soft_mask(embedding, 50.0))
    mask.sum().backward()
    open_ = torch.sigmoid(embedding.detach())
    torch.testing.assert_close(embedding.grad, 400 * open_ * (1 - open_))


def test_gates_protect_a_weight_only_between_two_used_units() -> None:
    adapters = Adapters(count=1, dim=3, latent=2)
    used = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0])  # hidden units 0, 1; outputs 0, 1, 2
    gates = adapters.weights.gates(used)
    assert gates.down_weight[0].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert gates.down_bias[0].tolist() == [0, 1]
    assert gates.up_weight[0].tolist() == [[1, 1], [0, 1], [0, 1]]
    assert gates.up_bias[0].tolist() == [1, 0, 0]


def test_masks_are_laid_out_adapter_by_adapter_hidden_units_first() -> None:
    adapters = Adapters(count=2, dim=3, latent=2)
    masks = adapters.weights.split(torch.arange(10.0))
    assert masks.down.tolist() == [[0, 1], [5, 6]] and masks.up.tolist() == [[2, 3, 4], [7, 8, 9]]
    assert adapters.weights.split(torch.zeros(4, 10)).up.shape == (4, 2, 3)


def test_folding_a_mask_into_the_weights_equals_masking_the_activations() -> None:
    adapters = Adapters(count=1, dim=6, latent=4)
    with torch.no_grad():
        for parameter in adapters.parameters():
            parameter.normal_()
    x, mask = torch.randn(3, 5, 6), torch.rand(10)
    mask[[0, 7]] = 0.0
    (layer,), (folded,) = adapters.weights.layers(), adapters.weights.fold(mask).layers()
    rows = AdapterMasks(*(part[0].expand(3, -1) for part in adapters.weights.split(mask)))
    torch.testing.assert_close(adapt(x, folded), adapt(x, layer, rows))
    closed = adapters.weights.fold(torch.zeros(10)).layers()[0]
    assert torch.equal(adapt(x, closed), x)
