"""A-GEM: the gradient that is left never points against the memory."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tpl.engine import IGNORED
from tpl.methods.agem import ProjectedGradient, project


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.flatten() for t in tensors])


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_projection_on_plain_vectors(sign: float) -> None:
    """g = (3, 4), r = (sign, 0): against it, the first number goes; along with it, nothing happens."""
    g, r = [torch.tensor([3.0]), torch.tensor([4.0])], [torch.tensor([sign]), torch.tensor([0.0])]
    project(g, r)
    assert flat(g).tolist() == ([0.0, 4.0] if sign < 0 else [3.0, 4.0])


def test_a_memory_without_gradient_changes_nothing() -> None:
    g = [torch.tensor([3.0, -4.0])]
    project(g, [torch.zeros(2)])
    assert g[0].tolist() == [3.0, -4.0]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("case", ["against", "along"])
def test_a_step_takes_the_projected_gradient_of_the_whole_network(case: str, together: bool) -> None:
    """By autograd on each half alone: stored images with other labels pull against, the same ones along."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    fresh = torch.randn(6, 4)
    new = torch.tensor([0, 1, 2, 0, 1, IGNORED])
    old = new if case == "along" else torch.where(new == IGNORED, IGNORED, (new + 1) % 3)
    parameters = list(network.parameters())
    g = flat(list(torch.autograd.grad(F.cross_entropy(network(fresh[:5]), new[:5]), parameters)))
    r = flat(list(torch.autograd.grad(F.cross_entropy(network(fresh[:5]), old[:5]), parameters)))
    assert (float(g @ r) < 0) == (case == "against")
    wanted = g - (g @ r) / (r @ r) * r if case == "against" else g

    objective = ProjectedGradient(cast(Any, network), together)
    none = torch.zeros(())
    losses = objective.losses(torch.cat([fresh, fresh]), torch.cat([new, old]).unsqueeze(0), none, none)
    losses.sum().backward()
    objective.after_backward(none)
    left = flat([p.grad for p in parameters if p.grad is not None])
    torch.testing.assert_close(losses[0], F.cross_entropy(network(fresh[:5]), new[:5]))
    torch.testing.assert_close(left, wanted)
    assert float(left @ r) > -1e-6


@pytest.mark.parametrize("together", [False, True])
def test_a_compiled_network_takes_the_same_step(together: bool) -> None:
    """The backward pass of a compiled network reuses the memory of its activations: none may follow on the same."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    compiled = torch.compile(network, backend="aot_eager", dynamic=False)
    images, labels, none = torch.randn(12, 4), torch.arange(12).remainder(3), torch.zeros(())
    for part in (images, images[:6]):  # compiled by a plain step
        compiled(part).sum().backward()
    gradients = []
    for shown in (network, compiled):
        network.zero_grad()
        objective = ProjectedGradient(cast(Any, shown), together)
        objective.losses(images, labels.unsqueeze(0), none, none).sum().backward()
        objective.after_backward(none)
        gradients.append(flat([p.grad for p in network.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients)
