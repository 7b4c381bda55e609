"""On a GPU a step is recorded and replayed; the numbers must be those of the plain step."""

from __future__ import annotations

import pytest
import torch

from tpl.engine import Batches, GatedSGD, RecordedStep, Samples, Step, choose_compute
from tpl.methods.bank import Bank, HatConfig, HatObjective
from tpl.nets import create_encoder
from tpl.stream import Preprocess

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def train_a_little(recorded: bool, precision: str) -> tuple[list[torch.Tensor], float]:
    compute = choose_compute("cuda", precision)
    encoder = create_encoder("compact").to(compute.device)
    generator = torch.Generator().manual_seed(0)
    normalise = Preprocess(encoder.data_config).normalise
    bank = Bank(encoder, HatConfig(latent=16), compute, normalise, generator)
    model = bank._new_task(3, 4, generator).to(compute.device)
    parameters = [*bank.adapters.parameters(), *model.parameters()]
    optimiser = GatedSGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4, nesterov=True)
    gate = (torch.rand(bank.adapters.up_weight.shape, generator=generator) > 0.5).float().cuda()
    optimiser.gate(bank.adapters.up_weight, gate)
    pixels = torch.randint(0, 256, (70, 3, 32, 32), generator=generator, dtype=torch.uint8).cuda()
    new = Samples(pixels[:50], torch.arange(50).cuda() % 3)
    replay = Samples(pixels[50:], torch.full((20,), 3).cuda())
    batches = Batches(new, replay, 16, torch.Generator().manual_seed(1))
    plain = Step(HatObjective(bank, model), optimiser, batches, normalise)
    step = RecordedStep(plain) if recorded else plain
    for _ in range(4):  # three full batches and one of two images an epoch
        for b, (rows, old) in enumerate(batches.epoch()):
            step(rows, old, torch.tensor(b / batches.steps, device="cuda"))
    return [p.detach().clone() for p in parameters], float(plain.total)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recorded_and_plain_steps_give_the_same_numbers(precision: str) -> None:
    (plain, plain_loss), (recorded, recorded_loss) = (train_a_little(r, precision) for r in (False, True))
    assert plain_loss == pytest.approx(recorded_loss, rel=1e-4)
    for a, b in zip(plain, recorded, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
