"""Images per second through TPL's training step and through inference, on this machine.

python benchmarks/throughput.py                                  # compact on the CPU: about half a minute
python benchmarks/throughput.py --encoder vit_tiny_patch16_224 --weights FILE --device cuda --latent 128
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from tpl.bench.environment import describe_environment
from tpl.engine import Batches, GatedSGD, RecordedStep, Samples, Step, choose_compute, in_batches
from tpl.methods.bank import Bank, HatConfig, HatObjective
from tpl.nets import create_encoder
from tpl.stream import Preprocess


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="compact")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--latent", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64, help="new images a step; as many replayed ones come on top")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to measure each")
    options = parser.parse_args()

    compute = choose_compute(options.device, options.precision)
    encoder = create_encoder(options.encoder, options.weights).to(compute.device)
    preprocess = Preprocess(encoder.data_config)
    generator = torch.Generator().manual_seed(0)
    bank = Bank(encoder, HatConfig(latent=options.latent), compute, preprocess.normalise, generator)
    model = bank._new_task(10, 11, generator).to(compute.device)
    shape = (2 * options.batch, 3, preprocess.height, preprocess.width)
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(compute.device)
    labels = torch.arange(len(pixels), device=compute.device) % 11
    new = Samples(pixels[: options.batch], labels[: options.batch])
    replay = Samples(pixels[options.batch :], labels[options.batch :])
    batches = Batches(new, replay, options.batch, generator)
    optimiser = GatedSGD([*bank.adapters.parameters(), *model.parameters()], lr=1e-3, nesterov=True)
    plain = Step(HatObjective(bank, model), optimiser, batches, preprocess.normalise)
    step = RecordedStep(plain) if compute.device.type == "cuda" else plain
    progress = torch.tensor(0.5, device=compute.device)

    def train() -> None:
        for rows, old in batches.epoch():
            step(rows, old, progress)

    def infer() -> None:
        mask = torch.ones(bank.adapters.units, device=compute.device)
        in_batches(lambda images: bank.features(images, model, mask), pixels, compute, preprocess.normalise)

    result = {
        "encoder": encoder.name,
        "precision": "bf16" if compute.bf16 else "fp32",
        "latent": options.latent,
        "batch": f"{options.batch}+{options.batch}",
        "train_images_per_second": rate(train, len(pixels), options.seconds, compute.device),
        "inference_images_per_second": rate(infer, len(pixels), options.seconds, compute.device),
        "environment": describe_environment(compute.device),
    }
    print(json.dumps(result, indent=2))


def rate(work: object, images: int, seconds: float, device: torch.device) -> float:
    """Images per second of `work`, after a warm-up."""
    assert callable(work)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(5):
        work()
    wait()
    started, done = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        work()
        wait()
        done += images
    return round(done / (time.perf_counter() - started), 1)


if __name__ == "__main__":
    main()
