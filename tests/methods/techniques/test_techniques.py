"""What every technique promises."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from toy_tasks import EVERY, PIXELS, SIDE, make, random, some_batch, some_network, step_loss

from tpl.engine import IGNORED
from tpl.methods.bank.bank import Technique
from tpl.methods.bank.techniques import TECHNIQUES

every_technique = pytest.mark.parametrize("name", EVERY)


def test_the_list_of_techniques() -> None:
    assert EVERY == ["none", "cmg", "vos", "oe", "mixoe", "logitnorm", "mcdropout", "mixup", "cutmix"]
    assert [name for name, t in TECHNIQUES.items() if t.outliers] == ["oe", "mixoe"]
    assert all(t.summary and (t.paper or name == "none") for name, t in TECHNIQUES.items())


def filled(name: str, own: int, dim: int, batch: int, constant: bool = False) -> Technique:
    """A technique that has seen enough steps for all of its terms to count."""
    technique = make(name, own, dim, batch)
    for seed in range(60 if name == "vos" else 0):
        _, labels, draws = some_batch(technique, seed)
        z = torch.ones(batch, dim) if constant else torch.randn(batch, dim, generator=random(seed))
        technique.loss(z, torch.zeros(own, dim), torch.zeros(own), labels, draws)
    return technique


@every_technique
@pytest.mark.parametrize("own", [1, 2, 5])
@pytest.mark.parametrize("case", ["plain", "one row", "constant", "extreme draws", "short batch", "bf16 images"])
def test_losses_and_gradients_are_finite(name: str, own: int, case: str) -> None:
    batch, dim = 8, 7
    technique = filled(name, own, dim, batch, constant=case == "constant")
    images, labels, draws = some_batch(technique, ignored=batch - 1 if case == "one row" else 0)
    if case == "constant":
        images = torch.ones_like(images)
    if case == "short batch":  # on a CPU an epoch's last batch is not filled up
        rows = torch.arange(len(labels)).view(-1, batch)[:, :3].flatten()
        images, labels = images[rows], labels[rows]
    for d in (torch.zeros_like(draws), torch.full_like(draws, 1 - 2**-24)) if case == "extreme draws" else (draws,):
        parameters = some_network(technique)
        shown = technique.mixed(images.bfloat16() if case == "bf16 images" else images, labels, d)
        assert shown.shape == images.shape
        assert shown.dtype == (torch.bfloat16 if case == "bf16 images" else torch.float32)
        z = F.linear(shown.float().flatten(1), parameters[0])
        loss = technique.loss(z, *parameters[1:], labels, d)
        assert loss.shape == () and loss.dtype == torch.float32
        gradients = torch.autograd.grad(loss, [*parameters, *technique.parameters()])
        assert all(bool(t.isfinite().all()) for t in (loss, *gradients))


@every_technique
def test_gradients_reach_every_row_that_counts(name: str) -> None:
    technique = filled(name, 3, 7, 8)
    images, labels, draws = some_batch(technique, ignored=2)
    network, weight, bias = some_network(technique)
    z = F.linear(technique.mixed(images, labels, draws).flatten(1), network).detach().requires_grad_()
    loss = technique.loss(z, weight, bias, labels, draws)
    per_row, *head = torch.autograd.grad(loss, [z, weight, bias, *technique.parameters()])
    torch.testing.assert_close(per_row.abs().sum(dim=1) > 0, labels != IGNORED)
    assert all(float(g.abs().sum()) > 0 for g in head)


@every_technique
def test_ignored_rows_have_no_influence(name: str) -> None:
    results = []
    for ignored_pixels in (0.0, 100.0):
        technique = filled(name, 3, 7, 8)
        images, labels, draws = some_batch(technique, ignored=3)
        images[labels == IGNORED] += ignored_pixels
        parameters = [*some_network(technique), *technique.parameters()]
        for _ in range(2):  # a second step: nothing of an ignored row is kept either
            loss = step_loss(technique, images, labels, draws, *parameters[:3])
        results.append([loss, *torch.autograd.grad(loss, parameters)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@every_technique
def test_filling_up_changes_no_loss(name: str) -> None:
    """What a GPU computes on a batch that is filled up is what a CPU computes on a short one."""
    technique, again = filled(name, 3, 7, 8), filled(name, 3, 7, 8)
    images, labels, draws = some_batch(technique, ignored=3)
    network = some_network(technique)
    short = step_loss(technique, images[labels != IGNORED], labels[labels != IGNORED], draws, *network)
    torch.testing.assert_close(step_loss(again, images, labels, draws, *network), short)


@every_technique
def test_a_step_never_looks_at_a_value(name: str) -> None:
    """Fake tensors have shapes and no values: what would wait for a GPU, or make a shape of its numbers, fails."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        technique = make(name, 3, 7, 8)
        rows = 16 if technique.outliers else 8
        images, labels = torch.empty(rows, 3, SIDE, SIDE), torch.empty(rows, dtype=torch.long)
        parameters = [torch.empty(s, requires_grad=True) for s in ((7, PIXELS), (3, 7), (3,))]
        loss = step_loss(technique, images, labels, torch.empty(technique.numbers), *parameters)
        torch.autograd.grad(loss, parameters)


@every_technique
def test_a_step_draws_nothing_itself(name: str) -> None:
    technique = filled(name, 3, 7, 8)
    before = torch.get_rng_state()
    step_loss(technique, *some_batch(technique), *some_network(technique))
    technique.logits(torch.randn(4, 7, generator=random(0)), torch.ones(3, 7), torch.ones(3))
    assert torch.equal(torch.get_rng_state(), before)


@every_technique
def test_answers_do_not_depend_on_the_batch(name: str) -> None:
    g = random(0)
    z, weight, bias = torch.randn(9, 7, generator=g), torch.randn(3, 7, generator=g), torch.randn(3, generator=g)
    together = TECHNIQUES[name].logits(z, weight, bias)
    alone = torch.cat([TECHNIQUES[name].logits(row, weight, bias) for row in z.split(1)])
    assert together.dtype == torch.float64 and together.shape == (9, 3)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
    assert TECHNIQUES[name].logits(z[:0], weight, bias).shape == (0, 3)


@every_technique
def test_a_hundred_steps_learn_a_toy_task(name: str) -> None:
    """Three noisy patterns through a linear network, trained and finished as a method does it."""
    g, own, batch = random(1), 3, 32
    patterns = torch.randn(own + 1, 3, SIDE, SIDE, generator=g)

    def pictures(labels: Tensor) -> Tensor:
        return patterns[labels] + 0.7 * torch.randn(len(labels), 3, SIDE, SIDE, generator=g)

    technique = make(name, own, 16, batch)
    network, weight, bias = some_network(technique)
    optimiser = torch.optim.SGD([network, weight, bias, *technique.parameters()], lr=0.02, momentum=0.9)
    for _ in range(100):
        labels = torch.randint(own, (batch,), generator=g)
        if technique.outliers:
            labels = torch.cat([labels, torch.full((batch,), own)])
        draws = torch.rand(technique.numbers, generator=g)
        optimiser.zero_grad()
        step_loss(technique, pictures(labels), labels, draws, network, weight, bias).backward()
        optimiser.step()
    y = torch.arange(300) % own
    with torch.no_grad():
        z = F.linear(pictures(y).flatten(1), network)
        head = technique.finish(z, y, weight, bias, g)
    answers = technique.logits(F.linear(pictures(y).flatten(1), network.detach()), *head)
    assert float((answers.argmax(dim=1) == y).double().mean()) > 0.9
