"""On a GPU a step is captured and replayed; the numbers must be those of the plain step."""

from __future__ import annotations

import math
from itertools import chain, count
from typing import Any

import pytest
import torch

from tpl.engine import Batches, CapturedStep, Feed, Recipe, Samples, Step, choose_compute
from tpl.methods.bank import Bank
from tpl.methods.bank.bank import Technique
from tpl.methods.bank.protect import ProtectConfig
from tpl.methods.bank.techniques import TECHNIQUES, VOS
from tpl.methods.bank.training import BankObjective
from tpl.nets import create_encoder
from tpl.stream import Preprocess

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

RECIPE = Recipe(lr=0.01, momentum=0.9, weight_decay=5e-4, nesterov=True)


def train_a_little(
    captured: bool,
    precision: str,
    networks: int = 1,
    compiled: bool = False,
    technique: type[Technique] = Technique,
    protect: str = "hat",
    encoder_name: str = "compact",
    steps: int = 16,
) -> tuple[list[torch.Tensor], list[float]]:
    """A plain network has a class for replayed images; a technique has none, and only some want to see them."""
    plain_head = technique is Technique
    compute = choose_compute("cuda", precision)
    encoder = create_encoder(encoder_name).to(compute.device)
    if compiled:
        encoder.fuse()
    normalise = Preprocess(encoder.data_config).normaliser(compute.device, compute.dtype)
    banks, models, batches = [], [], []
    for seed in range(networks):
        generator = torch.Generator().manual_seed(seed)
        bank = Bank(encoder, ProtectConfig(latent=16, protect=protect), compute, normalise, generator, technique)
        bank.used = (torch.rand(bank.adapters.units, generator=generator) > 0.5).float().cuda()
        pixels = torch.randint(0, 256, (70, 3, 32, 32), generator=generator, dtype=torch.uint8).cuda()
        new = Samples(pixels[:50], torch.arange(50).cuda() % 3)
        replay = Samples(pixels[50:], torch.full((20,), 3).cuda())
        banks.append(bank)
        models.append(bank.new_task(3, 3 + plain_head, generator))
        batches.append((new, replay if plain_head or technique.outliers else None, 16, generator))
    objective = BankObjective(banks, models, 16)
    optimiser = RECIPE.optimiser(objective.parameters())
    objective.protect(optimiser)
    numbers = objective.techniques[0].numbers
    feed = Feed([Batches(*own, numbers=numbers, whole=encoder.batch_norms) for own in batches], full=captured)
    plain = Step(objective, optimiser, feed, normalise)
    step = CapturedStep(plain) if captured else plain
    epochs = chain.from_iterable(feed.epoch() for _ in count())  # each three full batches and one of two images
    for number, inputs in zip(range(steps), epochs, strict=False):
        progress = number % feed.steps / feed.steps
        optimiser.scale_rate(1 - progress)  # a captured step must obey, too
        step(torch.tensor(progress, device="cuda"), inputs)
    return [p.detach().clone() for p in objective.parameters()], plain.total.tolist()


def assert_captured_is_plain(precision: str, networks: int, **options: Any) -> None:
    (plain, plain_loss), (captured, captured_loss) = (
        train_a_little(r, precision, networks, **options) for r in (False, True)
    )
    assert all(math.isfinite(loss) for loss in captured_loss)
    assert plain_loss == pytest.approx(captured_loss, rel=5e-3 if precision == "bf16" else 1e-3)  # bf16 rounds by 4e-3
    for a, b in zip(plain, captured, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=2e-3 if precision == "bf16" else 1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("networks", [1, 3])
def test_captured_and_plain_steps_give_the_same_numbers(precision: str, networks: int) -> None:
    assert_captured_is_plain(precision, networks)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TECHNIQUES)
def test_captured_and_plain_steps_of_every_technique_give_the_same_numbers(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VOS, "queue_size", 20)  # full within two epochs: its outliers count
    assert_captured_is_plain(precision, 2, technique=TECHNIQUES[name])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_and_plain_steps_under_supermasks_give_the_same_numbers(precision: str) -> None:
    assert_captured_is_plain(precision, 2, protect="supsup")


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_and_plain_steps_give_the_same_numbers() -> None:
    (plain, plain_loss), (compiled, compiled_loss) = (train_a_little(c, "fp32", 2, compiled=c) for c in (False, True))
    assert plain_loss == pytest.approx(compiled_loss, rel=1e-3)
    for a, b in zip(plain, compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_resnet_takes_the_plain_step() -> None:
    """One step: batch norms and masks make 0.2 of a rounding of 1e-7 in 16, 0.3 % of the loss in four (on a CPU)."""

    def trained(**options: Any) -> tuple[torch.Tensor, list[float]]:
        parameters, loss = train_a_little(False, "fp32", encoder_name="resnet18:8", **options)
        return torch.cat([p.flatten() for p in parameters]), loss

    start, _ = trained(steps=0)
    (plain, plain_loss), (compiled, compiled_loss) = (trained(steps=1, compiled=c) for c in (False, True))
    assert plain_loss == pytest.approx(compiled_loss, rel=1e-3)
    assert (compiled - plain).norm() < 0.01 * (plain - start).norm()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_image_has_the_same_answer_alone_and_among_many(precision: str) -> None:
    compute = choose_compute("cuda", precision)
    encoder = create_encoder("compact").to(compute.device)
    generator = torch.Generator().manual_seed(0)
    normalise = Preprocess(encoder.data_config).normaliser(compute.device, compute.dtype)
    bank = Bank(encoder, ProtectConfig(latent=16), compute, normalise, generator)
    for _ in range(2):
        bank.add(bank.new_task(3, 4, generator))
    pixels = torch.randint(0, 256, (600, 3, 32, 32), generator=generator, dtype=torch.uint8)
    many = [bank.outputs(pixels, t) for t in (0, 1)]
    for t in (1, 0):  # the CUDA graph is the same, the weights are not
        for i in (0, 17, 599):
            alone = bank.outputs(pixels[i : i + 1], t)
            assert torch.equal(alone.features[0], many[t].features[i])
    assert not torch.equal(many[0].features, many[1].features)
    direct = encoder(normalise(pixels[:9].cuda()), bank.tasks[0].norms, bank.weights(0), dtype=compute.dtype)
    torch.testing.assert_close(many[0].features[:9], direct, rtol=1e-2, atol=1e-2 if precision == "fp32" else 0.1)
