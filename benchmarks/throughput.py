"""Images per second through TPL's training step and through inference, on this machine.

python benchmarks/throughput.py                                  # compact on the CPU: about half a minute
python benchmarks/throughput.py --encoder vit_tiny_patch16_224 --weights FILE --device cuda --latent 128 --networks 1 5
python benchmarks/throughput.py --encoder resnet18 resnet18:128 --batch-size 64 256 --augment crop  # a minute on a GPU
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tpl.bench.results import describe_environment
from tpl.engine import CapturedStep, Compute, Feed, Samples, Step, choose_compute
from tpl.methods.bank.training import BankObjective
from tpl.methods.tpl import TPL, TPLConfig
from tpl.nets import Encoder, create_encoder


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", nargs="+", default=["compact"])
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--compile", default="auto", help="auto, on (small images, too) or off")
    parser.add_argument("--latent", type=int, default=32)
    parser.add_argument(
        "--batch-size", "--batch", type=int, nargs="+", default=[64], help="new images a step; as many replayed on top"
    )
    parser.add_argument("--augment", default="none", choices=("none", "flip", "crop"))
    parser.add_argument("--networks", type=int, nargs="+", default=[1], help="how many are trained side by side")
    parser.add_argument("--steps", type=int, help="steps between two looks at the clock: 40 on a GPU, else 4")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to measure each")
    options = parser.parse_args()
    compute = choose_compute(options.device, options.precision, options.compile)
    steps = options.steps or (40 if compute.device.type == "cuda" else 4)
    rows = []
    for name in options.encoder:
        for batch in options.batch_size:
            config = TPLConfig(latent=options.latent, batch_size=batch, augment=options.augment)
            row = measure(
                create_encoder(name, options.weights), config, compute, options.networks, steps, options.seconds
            )
            print(json.dumps(row), file=sys.stderr, flush=True)  # an interrupted measurement keeps what there is
            rows.append(row)
    result = {
        "precision": "bf16" if compute.bf16 else "fp32",
        "latent": options.latent,
        "augment": options.augment,
        "measured": rows,
        "environment": describe_environment(compute.device),
    }
    print(json.dumps(result, indent=2))


def measure(
    encoder: Encoder, config: TPLConfig, compute: Compute, networks: list[int], steps: int, seconds: float
) -> dict[str, Any]:
    """Training, forward and backward, and inference of one encoder at one batch size."""
    if not encoder.pretrained:
        networks = [1]  # without a common trunk there is nothing to share
    methods = [TPL(encoder, config, compute, seed) for seed in range(max(networks))]
    compute.forget_peak_memory()
    return {
        "encoder": encoder.name,
        "compiled": encoder.fused,
        "batch": f"{config.batch_size}+{config.batch_size}",
        "train_images_per_second": {count: rate(*training(methods[:count], steps), seconds) for count in networks},
        "inference_images_per_second": rate(*inference(methods[0]), seconds),
        "peak_device_bytes": compute.peak_memory(),
    }


def training(methods: list[TPL], steps: int) -> tuple[Callable[[], None], int]:
    """One epoch of a second task, of several methods side by side, and its number of images."""
    first = methods[0]
    captured = first.compute.device.type == "cuda"
    models, batches = [], []
    for method in methods:
        bank, generator = method.bank, torch.Generator().manual_seed(method.seed)
        bank.used = (torch.rand(bank.adapters.units, generator=generator) > 0.5).float().to(method.compute.device)
        models.append(bank.new_task(10, 11, generator))
        count = steps * method.config.batch_size
        new, replay = (random_samples(method, count, generator) for _ in range(2))
        batches.append(method.config.batches(new, replay, generator, whole=method.encoder.batch_norms))
    objective = BankObjective([method.bank for method in methods], models, methods[0].config.batch_size)
    optimiser = first.config.optimiser(objective.parameters())
    objective.protect(optimiser)
    feed = Feed(batches, full=captured)
    plain = Step(objective, optimiser, feed, first.normalise)
    step = CapturedStep(plain) if captured else plain
    progress = torch.tensor(0.5, device=first.compute.device)
    optimiser.scale_rate(0.5)  # as a falling rate does

    def epoch() -> None:
        for inputs in feed.epoch():
            step(progress, inputs)

    return epoch, feed.images


def inference(method: TPL) -> tuple[Callable[[], None], int]:
    """Features and logits of one task's model, and how many."""
    generator = torch.Generator().manual_seed(0)
    method.bank.add(method.bank.new_task(10, 11, generator))
    samples = random_samples(method, 4096 if method.compute.device.type == "cuda" else 256, generator)

    def ask() -> None:
        method.bank.outputs(samples.pixels, 0)

    return ask, len(samples)


def random_samples(method: TPL, count: int, generator: torch.Generator) -> Samples:
    """Noise, labelled 0 to 10."""
    shape = (count, 3, method.preprocess.height, method.preprocess.width)
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    device = method.compute.device
    return Samples(pixels.to(device), (torch.arange(count) % 11).to(device))


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
