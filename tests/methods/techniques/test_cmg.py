"""CMG: the generator's features, and what fine-tuning does to a head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from toy_tasks import CPU, random

from tpl.methods.bank.techniques import CMG, ClassVAE, energy

DIM = 12


def separable(own: int, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features around as many axes as there are classes, and a head that tells them apart."""
    g = random(seed)
    y = torch.arange(count) % own
    centres = 4 * torch.eye(own, DIM)
    return centres[y] + 0.5 * torch.randn(count, DIM, generator=g), y, 0.5 * centres, torch.zeros(own)


@pytest.fixture(scope="module")
def trained() -> ClassVAE:
    z, y, _, _ = separable(3, 600)
    return ClassVAE(z, y, 3, random(1))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that is hardly trained, where its quality does not matter."""
    monkeypatch.setattr(ClassVAE, "steps", 10)


def test_finishing_parts_the_energies_and_keeps_the_answers(trained: ClassVAE) -> None:
    z, y, weight, bias = separable(3, 600)
    fakes = trained.outliers(500)
    before = weight.clone()
    tuned = CMG(3, DIM, 64, CPU).finish(z, y, weight, bias, random(1))
    assert torch.equal(weight, before) and not tuned[0].requires_grad
    assert not torch.equal(tuned[0], weight)
    assert torch.equal(F.linear(z, *tuned).argmax(dim=1), F.linear(z, weight, bias).argmax(dim=1))

    def gap(head: tuple[torch.Tensor, torch.Tensor]) -> float:
        return float(energy(F.linear(fakes, *head)).mean() - energy(F.linear(z, *head)).mean())

    assert gap(tuned) > gap((weight, bias))
    confidence = [float(F.linear(fakes, *head).softmax(dim=1).amax(dim=1).mean()) for head in (tuned, (weight, bias))]
    assert confidence[0] < confidence[1]


def test_the_generator_learns_its_classes(trained: ClassVAE) -> None:
    """Decoded from the prior under a class's own embedding, features lie at the class's centre."""
    z, y, _, _ = separable(3, 600)
    for label in range(3):
        latent, condition = torch.randn(200, 32, generator=random(2)), trained.embedding[label].expand(200, 32)
        assert float((trained.decode(latent, condition).mean(dim=0) - z[y == label].mean(dim=0)).norm()) < 1


def test_pseudo_outliers_lie_beyond_the_classes(trained: ClassVAE) -> None:
    z, y, _, _ = separable(3, 600)
    centres = torch.stack([z[y == label].mean(dim=0) for label in range(3)])
    nearest = torch.cdist(trained.outliers(300), centres).amin(dim=1).mean()
    assert float(nearest) > 1.2 * float(torch.cdist(z, centres).amin(dim=1).mean())


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("own", "count"), [(1, 40), (1, 1), (2, 2), (3, 3), (5, 3)])
def test_small_tasks_get_a_sensible_head(own: int, count: int) -> None:
    z, y, weight, bias = separable(own, count)
    tuned = CMG(own, DIM, 64, CPU).finish(z, y, weight, bias, random(0))
    assert [t.shape for t in tuned] == [weight.shape, bias.shape]
    assert all(bool(t.isfinite().all()) for t in tuned)
    torch.testing.assert_close(tuned[0], weight, rtol=0, atol=0.1)
    assert torch.equal(F.linear(z, *tuned).argmax(dim=1), y)


@pytest.mark.usefixtures("short")
def test_constant_features_get_a_finite_head() -> None:
    y = torch.arange(10) % 2
    tuned = CMG(2, DIM, 64, CPU).finish(torch.ones(10, DIM), y, torch.ones(2, DIM), torch.zeros(2), random(0))
    assert all(bool(t.isfinite().all()) for t in tuned)


@pytest.mark.usefixtures("short")
def test_the_generator_alone_decides() -> None:
    z, y, weight, bias = separable(2, 70)
    state = torch.get_rng_state()
    with torch.no_grad():  # as a method calls it
        runs = [CMG(2, DIM, 64, CPU).finish(z, y, weight, bias, random(seed)) for seed in (4, 4, 5)]
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][0], runs[2][0])
    assert torch.equal(torch.get_rng_state(), state)
