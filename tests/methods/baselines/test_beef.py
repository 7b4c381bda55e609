"""BEEF: its losses by hand, and a fusion that leaves old extractors and old answers as they are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.engine import IGNORED
from tpl.methods.beef import BEEF, BEEFConfig, BiCompatible, merged
from tpl.methods.parts.expansion import ExpandedNetwork, Head
from tpl.stream import Stream

OPTIONS = {"latent": 8, "epochs": 1, "batch_size": 16, "lr": 0.05, "memory": 12, "negative_steps": 1}


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@pytest.fixture(scope="module")
def method(small_stream: Stream) -> BEEF:
    """One that has learned two tasks of two classes."""
    learner = Learner("beef", SMALL_VIT, device="cpu", **OPTIONS)
    assert isinstance(learner.method, BEEF)
    for task in (small_stream[0], small_stream[1]):
        learner.learn(task)
    return learner.method


@pytest.fixture(scope="module")
def network(method: BEEF) -> ExpandedNetwork:
    """A copy of its network, ready for a third task."""
    network = method.network.copy().requires_grad_(True)
    network.expand(seeded(0))
    return network


def objective_for(network: ExpandedNetwork, **options: float) -> BiCompatible:
    config = BEEFConfig(latent=8, **options)  # type: ignore[arg-type]
    objective = BiCompatible(network, torch.tensor([0, 0, 1, 1]), 2, config, seeded(1))
    for head in (objective.backward, objective.new, objective.forward):
        head.bias.data += torch.randn(head.bias.shape, generator=seeded(2))
    return objective


def test_old_images_ask_for_their_task_and_new_ones_for_their_class(network: ExpandedNetwork) -> None:
    objective = objective_for(network)
    labels = torch.tensor([0, 1, 2, 3, 4, 5, IGNORED])
    assert objective.columns_of(labels).tolist() == [0, 0, 1, 1, 2, 3, IGNORED]


def test_both_losses_by_hand(network: ExpandedNetwork) -> None:
    objective = objective_for(network, energy_weight=0.5, negative_steps=1)
    images, labels = torch.randn(4, 3, 32, 32, generator=seeded(3)), torch.tensor([[3, 5, 0, IGNORED]])
    nothing = torch.zeros(())
    loss = objective.losses(images, labels, nothing, nothing)[0]

    z = network.newest_features(images[:3])
    old, new = objective.backward(z) / 1.7, objective.new(z)
    by_hand = -torch.cat([old, new], dim=1).log_softmax(1)[[0, 1, 2], [1, 3, 0]].mean()

    upside_down = torch.rot90(images[:3], 2, (2, 3)).requires_grad_()
    z = network.newest_features(upside_down)
    everything = torch.cat([objective.backward(z), objective.new(z), objective.forward(z)], dim=1)
    everything.softmax(dim=1)[:, 4:].sum(dim=1).log().sum().backward()  # type: ignore[no-untyped-call]
    assert upside_down.grad is not None
    negatives = upside_down.detach() - 0.01 * upside_down.grad
    z = network.newest_features(negatives)
    rows = torch.cat([objective.backward(z), objective.new(z), objective.forward(z)], dim=1)
    for row, own in zip(rows, (1, 3, 0), strict=True):
        row.data[own] = 0.0
    energy = -rows.log_softmax(1)[[0, 1, 2], [4 + 3, 4 + 5, 4 + 0]].mean()  # four outputs, then six energies
    torch.testing.assert_close(loss, by_hand + 0.5 * energy)


def test_negatives_move_to_where_energy_outputs_are_less_probable(network: ExpandedNetwork) -> None:
    objective = objective_for(network, negative_steps=3)
    images = torch.randn(6, 3, 32, 32, generator=seeded(3))

    def log_p(x: torch.Tensor) -> torch.Tensor:
        z = network.newest_features(x)
        return torch.cat([objective.outputs(z), objective.forward(z)], dim=1).log_softmax(1)[:, 4:].logsumexp(dim=1)

    negatives = objective.negatives(images)
    with torch.no_grad():
        assert bool((log_p(negatives) < log_p(images.flip(-1, -2))).all())
    alone = objective.negatives(images[2:3])  # a negative does not depend on the rest of its batch
    torch.testing.assert_close(alone, negatives[2:3], rtol=1e-4, atol=1e-6)


def test_the_merged_classifier_says_what_its_parts_say_together(network: ExpandedNetwork) -> None:
    dim, owner = network.dim, torch.tensor([0, 0, 1, 1])
    backward, forward = Head.new(2, network, seeded(5)).detached(), Head.new(2, network, seeded(6)).detached()
    backward.bias.copy_(torch.tensor([0.3, -0.2]))
    scale, shift = torch.tensor([0.5, 2.0]), torch.tensor([0.1, -1.0])
    weight, bias = merged(network, backward, forward, owner, scale, shift)
    z = torch.randn(5, 3 * dim, generator=seeded(7))
    before = F.linear(z[:, : 2 * dim], network.head_weight[:, : 2 * dim], network.head_bias).detach()
    said = backward(z[:, 2 * dim :])
    by_hand = [before[:, c] + scale[i] * said[:, i] + shift[i] for c, i in enumerate(owner.tolist())]
    by_hand += list(forward(z[:, 2 * dim :]).T)
    torch.testing.assert_close(F.linear(z, weight, bias), torch.stack(by_hand, dim=1))


def test_fusion_touches_no_extractor_and_no_old_column(method: BEEF, small_stream: Stream) -> None:
    """A third task: what the first two brought keeps every bit, and the set that fuses is fitted better than before."""
    extractors = [e.copy().state() for e in method.network.extractors]
    weight = method.network.head_weight.detach().clone()
    learned: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    fused = method.fused

    def noted(*parts: object) -> tuple[torch.Tensor, torch.Tensor]:
        learned["fusion"] = fused(*parts)  # type: ignore[arg-type]
        return learned["fusion"]

    method.fused = noted  # type: ignore[method-assign]
    method.learn(small_stream[2])
    for before, after in zip(extractors, method.network.extractors, strict=False):
        assert all(torch.equal(before[k], v) for k, v in after.state().items())
    dim = method.network.dim
    assert torch.equal(method.network.head_weight[:4, : 2 * dim], weight)
    assert not method.network.head_weight[4:, : 2 * dim].any()  # new classes read the new extractor alone
    assert method.network.head_weight[4:, 2 * dim :].any()
    scale, shift = learned["fusion"]
    assert scale.shape == shift.shape == (2,) and not torch.equal(scale, torch.ones(2))
    new = method.network.head_weight[:4, 2 * dim :]
    assert torch.equal(new[0], new[1]) and torch.equal(new[2], new[3]) and not torch.equal(new[0], new[2])
