"""A network with one extractor a task: old ones keep every bit, and the classifier reads all of them."""

from __future__ import annotations

import pytest
import torch

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.engine import Compute, Event
from tpl.errors import TplError
from tpl.methods.parts.expansion import ExpandedNetwork, ExpansionMethod
from tpl.methods.parts.network import NetworkConfig
from tpl.nets import Encoder, create_encoder
from tpl.stream import Stream

CPU = Compute(torch.device("cpu"), bf16=False)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return create_encoder(SMALL_VIT)


@pytest.fixture
def network(encoder: Encoder) -> ExpandedNetwork:
    network = ExpandedNetwork(encoder, NetworkConfig(latent=8), CPU, torch.Generator().manual_seed(0))
    network.grow(3, torch.Generator().manual_seed(1))
    return network


def images(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(2))


def test_after_expanding_the_old_features_are_the_same_and_the_new_ones_begin_as_they_are(
    network: ExpandedNetwork,
) -> None:
    x = images()
    before, weight = network.features(x), network.head_weight.detach().clone()
    network.expand(torch.Generator().manual_seed(3))
    after = network.features(x)
    dim = network.dim
    assert torch.equal(after[:, :dim], before) and torch.equal(after[:, dim:], before)
    assert torch.equal(network.head_weight[:, :dim], weight)
    network.grow(2, torch.Generator().manual_seed(4))
    assert network.head_weight.shape == (5, 2 * dim)
    torch.testing.assert_close(network(x), after @ network.head_weight.T + network.head_bias)


def test_only_the_newest_extractor_gets_gradients_and_moves(network: ExpandedNetwork) -> None:
    x = images()
    network.expand(torch.Generator().manual_seed(3))
    old = network.frozen[0].copy()
    before = network.features(x).detach()
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        network(x).square().sum().backward()
        optimiser.step()
    assert all(torch.equal(a, b) for a, b in zip(old.state().values(), network.frozen[0].state().values(), strict=True))
    after = network.features(x)
    assert torch.equal(after[:, : network.dim], before[:, : network.dim])
    assert not torch.allclose(after[:, network.dim :], before[:, network.dim :])


def test_a_copy_shares_no_tensor_and_restart_takes_over_all_of_another(network: ExpandedNetwork) -> None:
    kept = network.extractors[-1].copy()
    with torch.no_grad():
        network.norms += 1
        network.adapters.up_weight += 1
    assert not torch.equal(kept.norms, network.norms)
    network.restart(kept)
    for a, b in zip(network.extractors[-1].state().values(), kept.state().values(), strict=True):
        assert torch.equal(a, b)


def test_a_task_that_is_interrupted_leaves_nothing_and_can_be_learned_again(small_stream: Stream) -> None:
    """The network is rebuilt from the state: as many extractors as tasks, and the same answers afterwards."""
    options = {"latent": 8, "epochs": 1, "batch_size": 16, "lr": 0.05, "memory": 12}
    learners = [Learner("der", SMALL_VIT, device="cpu", **options) for _ in range(2)]
    for learner in learners:
        learner.learn(small_stream[0])
    images = small_stream[0].test
    assert images is not None
    before = learners[0].log_probabilities(images)

    def stop(event: Event) -> None:
        if event.kind == "epoch":
            raise KeyboardInterrupt

    method = learners[0].method
    with pytest.raises(KeyboardInterrupt):
        method.learn(small_stream[1], stop)
    assert isinstance(method, ExpansionMethod) and len(method.network.extractors) == 1
    assert torch.equal(learners[0].log_probabilities(images), before)
    for learner in learners:
        learner.learn(small_stream[1])
    assert torch.equal(learners[0].log_probabilities(images), learners[1].log_probabilities(images))
    with pytest.raises(TplError, match="cannot remove a class"):
        method.remove(method.classes_[0])
