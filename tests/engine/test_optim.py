"""The gated optimisers: torch's SGD and Adam where the gate is open, exact stillness where it is closed."""

from __future__ import annotations

import pytest
import torch

from tpl.engine import Adam, GatedSGD


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 5e-4])
def test_equals_torch_sgd_when_nothing_is_gated(nesterov: bool, weight_decay: float) -> None:
    torch.manual_seed(0)
    ours = torch.randn(7, 5, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_(True)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": weight_decay, "nesterov": nesterov}
    a, b = GatedSGD([ours], **options), torch.optim.SGD([theirs], **options)
    for _ in range(10):
        target = torch.randn(5)
        for p, optimiser in ((ours, a), (theirs, b)):
            optimiser.zero_grad()
            ((p @ target).square().sum()).backward()
            optimiser.step()
    torch.testing.assert_close(ours, theirs)


def test_closed_gate_keeps_every_bit_despite_momentum_and_weight_decay() -> None:
    torch.manual_seed(0)
    p = torch.randn(6, 4, requires_grad=True)
    before = p.detach().clone()
    optimiser = GatedSGD([p], lr=0.5, momentum=0.9, weight_decay=0.1, nesterov=True)
    gate = torch.zeros(6, 4)
    gate[2] = 1
    optimiser.gate(p, gate)
    for _ in range(20):
        optimiser.zero_grad()
        p.square().sum().backward()
        optimiser.step()
    closed = gate == 0
    assert torch.equal(p.detach()[closed], before[closed])
    assert not torch.equal(p.detach()[2], before[2])


def test_an_overflow_cannot_reach_a_protected_weight() -> None:
    p = torch.ones(2, requires_grad=True)
    optimiser = GatedSGD([p], lr=0.1)
    optimiser.gate(p, torch.tensor([0.0, 1.0]))
    p.grad = torch.tensor([torch.inf, 1.0])
    optimiser.step()
    assert p[0] == 1


def test_a_half_open_gate_lets_half_of_the_update_through_at_any_rate() -> None:
    """And so do gates of 0 and 1 alone, which need no product."""
    for gate in (torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0.0, 1.0, 1.0])):
        p = torch.ones(3, requires_grad=True)
        optimiser = GatedSGD([p], lr=0.1)
        optimiser.gate(p, gate)
        optimiser.scale_rate(0.5)
        p.grad = torch.full((3,), 2.0)
        optimiser.step()
        torch.testing.assert_close(p.detach(), 1 - 0.1 * gate)


def test_adam_equals_torchs() -> None:
    g = torch.Generator().manual_seed(0)
    start, target = torch.randn(4, 3, generator=g), torch.randn(4, 3, generator=g)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    one = Adam([ours], 0.05, (0.8, 0.95), weight_decay=0.1)
    two = torch.optim.Adam([theirs], 0.05, (0.8, 0.95), weight_decay=0.1)
    for step in range(12):
        for p, optimiser in ((ours, one), (theirs, two)):
            optimiser.zero_grad()
            ((p - target).abs() ** 1.5 * (1 + step % 3)).sum().backward()
            optimiser.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(ours, start, atol=0.1)


def test_gates_and_rates_act_on_adam() -> None:
    p = torch.ones(3, requires_grad=True)
    optimiser = Adam([p], 0.1)
    optimiser.gate(p, torch.tensor([0.0, 1.0, 1.0]))
    optimiser.scale_rate(0.5)
    p.grad = torch.tensor([1.0, 1.0, 0.0])
    optimiser.step()
    torch.testing.assert_close(p.detach(), torch.tensor([1.0, 0.95, 1.0]))  # a first step is one rate long
