"""Adam: torch's own, step by step; and a closed gate holds a weight still."""

from __future__ import annotations

import torch

from tpl.engine.adam import Adam


def test_it_is_torchs_adam() -> None:
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


def test_gates_and_rates_act_on_it() -> None:
    p = torch.ones(3, requires_grad=True)
    optimiser = Adam([p], 0.1)
    optimiser.gate(p, torch.tensor([0.0, 1.0, 1.0]))
    optimiser.scale_rate(0.5)
    p.grad = torch.tensor([1.0, 1.0, 0.0])
    optimiser.step()
    torch.testing.assert_close(p.detach(), torch.tensor([1.0, 0.95, 1.0]))  # a first step is one rate long
