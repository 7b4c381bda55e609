"""Images per second through TPL's training step and through inference, on this machine.

python benchmarks/throughput.py                                  # compact on the CPU: about half a minute
python benchmarks/throughput.py --encoder vit_tiny_patch16_224 --weights FILE --device cuda --latent 128 --networks 1 5
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tpl.bench.environment import describe_environment
from tpl.engine import Batches, Compute, Feed, Recipe, RecordedStep, Samples, Step, choose_compute
from tpl.methods.bank import Bank, HatConfig
from tpl.methods.lessons import HatObjective
from tpl.nets import Encoder, create_encoder
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
    parser.add_argument("--networks", type=int, nargs="+", default=[1], help="how many are trained side by side")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to measure each")
    options = parser.parse_args()
    compute = choose_compute(options.device, options.precision)
    encoder = create_encoder(options.encoder, options.weights).to(compute.device)
    result = {
        "encoder": encoder.name,
        "precision": "bf16" if compute.bf16 else "fp32",
        "latent": options.latent,
        "batch": f"{options.batch}+{options.batch}",
        "train_images_per_second": {
            count: rate(*training(encoder, compute, options.latent, options.batch, count), options.seconds)
            for count in options.networks
        },
        "inference_images_per_second": rate(*inference(encoder, compute, options.latent), options.seconds),
        "environment": describe_environment(compute.device),
    }
    print(json.dumps(result, indent=2))


def training(
    encoder: Encoder, compute: Compute, latent: int, batch: int, networks: int
) -> tuple[Callable[[], None], int]:
    """One epoch of a second task, and its number of images."""
    steps = 40 if compute.device.type == "cuda" else 4
    preprocess = Preprocess(encoder.data_config)
    banks, models, batches = [], [], []
    for seed in range(networks):
        generator = torch.Generator().manual_seed(seed)
        bank = Bank(encoder, HatConfig(latent=latent), compute, preprocess.normalise, generator)
        bank.used = (torch.rand(bank.adapters.units, generator=generator) > 0.5).float().to(compute.device)
        banks.append(bank)
        models.append(bank.new_task(10, 11, generator))
        new, replay = (random_samples(preprocess, compute, steps * batch, generator) for _ in range(2))
        batches.append(Batches(new, replay, batch, generator))
    objective = HatObjective(banks, models)
    optimiser = Recipe().optimiser(objective.parameters())
    objective.protect(optimiser)
    feed = Feed(batches, full=True)
    plain = Step(objective, optimiser, feed, preprocess.normalise)
    step = RecordedStep(plain) if compute.device.type == "cuda" else plain
    progress = torch.tensor(0.5, device=compute.device)

    def epoch() -> None:
        for inputs in feed.epoch():
            step(progress, inputs)

    return epoch, feed.images


def inference(encoder: Encoder, compute: Compute, latent: int) -> tuple[Callable[[], None], int]:
    """Features and logits of one task's model, and how many."""
    preprocess = Preprocess(encoder.data_config)
    generator = torch.Generator().manual_seed(0)
    bank = Bank(encoder, HatConfig(latent=latent), compute, preprocess.normalise, generator)
    bank.add(bank.new_task(10, 11, generator))
    samples = random_samples(preprocess, compute, 1024, generator)
    return lambda: (bank.outputs(samples.pixels, 0), None)[1], len(samples)


def random_samples(preprocess: Preprocess, compute: Compute, count: int, generator: torch.Generator) -> Samples:
    """Noise, labelled 0 to 10."""
    shape = (count, 3, preprocess.height, preprocess.width)
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return Samples(pixels.to(compute.device), (torch.arange(count) % 11).to(compute.device))


def rate(work: Callable[[], None], images: int, seconds: float) -> float:
    """Images per second of `work`, after a warm-up."""

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

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
