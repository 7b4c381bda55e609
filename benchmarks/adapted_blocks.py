"""Images per second against the number of adapted blocks: training steps, and answers of ten tasks, on this machine.

Training: a second task with replay, the paper's batch of 64 new and 64 replayed images, on tokens that are computed
once (`on_tokens`), and what computing them costs; `on_images` computes the blocks below in every step, and is measured
with --images. Inference: all tasks' features and logits, in batches. Tasks are random and untrained, with 70 % of their
units open: only speed is measured.

python benchmarks/adapted_blocks.py --device cuda --encoder vit_tiny_patch16_224 --weights FILE --latent 128
python benchmarks/adapted_blocks.py --blocks 1 all --batch 16 --seconds 2           # compact on the CPU: half a minute
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpl.engine import CapturedStep, Feed, Samples, Step, choose_compute, no_callback, uses_cuda_graphs
from tpl.methods.bank.training import BankObjective, TrainingJob, unchanged, with_tokens
from tpl.methods.tpl import TPL, TPLConfig
from tpl.nets import Encoder, create_encoder

OPEN = 0.7  # share of units that a task has open
CLASSES = 10  # of a task


def main() -> None:
    """Measure and print one JSON object."""
    options = parsed()
    compute = choose_compute(options.device, options.precision, options.compile)
    encoder = create_encoder(options.encoder, options.weights)
    rows = []
    for blocks in options.blocks:
        config = TPLConfig.parse({
            "latent": options.latent, "batch_size": options.batch_size, "adapted_blocks": blocks,
            "augment": options.augment,
        })  # fmt: skip
        rows.append({"adapted_blocks": blocks} | measured(encoder, config, compute, options))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)  # an interrupted measurement keeps what there is
    result = {
        "encoder": encoder.name,
        "device": torch.cuda.get_device_name() if compute.device.type == "cuda" else platform.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "precision": "bf16" if compute.bf16 else "fp32",
        "compiled": encoder.fused,
        "latent": options.latent,
        "train_batch": f"{options.batch_size}+{options.batch_size}",
        "augment": options.augment,
        "tasks": options.tasks,
        "answer_batch": options.batch,
        "rows": rows,
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def parsed() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="compact")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--latent", type=int, default=64)
    parser.add_argument("--blocks", nargs="+", default=["3", "6", "all"], help="numbers of adapted blocks, or all")
    parser.add_argument("--batch-size", type=int, default=64, help="new images a step; as many replayed on top")
    parser.add_argument("--augment", default="none", choices=("none", "flip"))
    parser.add_argument("--networks", type=int, nargs="+", default=[1], help="how many are trained side by side")
    parser.add_argument("--images", action="store_true", help="also measure training on images")
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--batch", type=int, default=256, help="images of one answer by all tasks")
    parser.add_argument("--steps", type=int, help="steps of an epoch: 40 on a GPU, else 4")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to measure each")
    parser.add_argument("--json", type=Path, help="write the result here, too")
    return parser.parse_args()


def measured(encoder: Encoder, config: TPLConfig, compute: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Speeds at one number of adapted blocks."""
    methods = [TPL(encoder, config, compute, seed) for seed in range(max(options.networks))]
    steps = options.steps or (40 if uses_cuda_graphs(compute.device) else 4)
    compute.forget_peak_memory()
    found: dict[str, Any] = {}
    for count in options.networks:
        ways = {"on_tokens": True, "on_images": False} if options.images else {"on_tokens": True}
        for name, tokens in ways.items():
            found[f"train_images_per_second, {count} networks, {name}"] = training(
                methods[:count], steps, tokens, options.seconds
            )
    method = methods[0]
    generator = torch.Generator().manual_seed(0)
    for _ in range(options.tasks):
        add_task(method, generator)
    pixels = images_for(method, options.batch, generator)
    found["answers_per_second"] = rate(lambda: method.outputs(pixels), options.batch, options.seconds)
    return found | {"peak_device_bytes": compute.peak_memory()}


def training(methods: list[TPL], steps: int, on_tokens: bool, seconds: float) -> dict[str, float | bool]:
    """Images per second through the steps of a second task, and through what prepares their tokens."""
    first = methods[0]
    device = first.compute.device
    jobs, models = [], []
    for method in methods:
        bank, generator = method.bank, torch.Generator().manual_seed(method.seed)
        bank.used = (torch.rand(bank.adapters.units, generator=generator) > 0.5).float().to(device)
        models.append(bank.new_task(CLASSES, CLASSES + 1, generator))
        new, replay = (samples(method, steps * method.config.batch_size, generator) for _ in range(2))
        jobs.append(TrainingJob(bank, new, replay, CLASSES, CLASSES + 1, method.config, generator, no_callback))
    found: dict[str, float | bool] = {}
    prepared = with_tokens(jobs) if on_tokens else None
    if prepared is not None:
        wait()
        started = time.perf_counter()
        prepared = with_tokens(jobs)
        wait()
        count = sum(2 * len(job.samples) for job in jobs)
        found["tokens"] = round(count / (time.perf_counter() - started), 1)
    objective = BankObjective(
        [m.bank for m in methods], models, first.config.batch_size, on_tokens=prepared is not None
    )
    optimiser = first.config.optimiser(objective.parameters())
    objective.protect(optimiser)
    networks = [job.recipe.batches(job.samples, job.replay, job.generator) for job in prepared or jobs]
    captured = uses_cuda_graphs(device)
    feed = Feed(networks, full=captured)
    plain = Step(objective, optimiser, feed, first.normalise if prepared is None else unchanged)
    step = CapturedStep(plain) if captured else plain
    progress = torch.tensor(0.5, device=device)

    def epoch() -> None:
        for inputs in feed.epoch():
            step(progress, inputs)

    return {"steps": rate(epoch, feed.images, seconds)} | found | {"on_tokens": prepared is not None}


def add_task(method: TPL, generator: torch.Generator) -> None:
    """A task with random norms, head and mask."""
    model = method.bank.new_task(CLASSES, CLASSES + 1, generator)
    with torch.no_grad():
        model.norms.mul_(1 + 0.1 * torch.randn(model.norms.shape, generator=generator).to(model.norms.device))
        model.embedding.copy_(torch.rand(model.embedding.shape, generator=generator) - (1 - OPEN))
    method.bank.add(model)


def images_for(method: TPL, count: int, generator: torch.Generator) -> Tensor:
    """Noise in the encoder's size, on the device."""
    shape = (count, 3, method.preprocess.height, method.preprocess.width)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(method.compute.device)


def samples(method: TPL, count: int, generator: torch.Generator) -> Samples:
    """Noise, labelled 0 to 10."""
    labels = torch.arange(count) % (CLASSES + 1)
    return Samples(images_for(method, count, generator), labels.to(method.compute.device))


def rate(work: Callable[[], Any], images: int, seconds: float) -> float:
    """Images per second of `work`, after a warm-up."""
    work()
    wait()
    started, done = time.perf_counter(), 0
    while not done or time.perf_counter() - started < seconds:
        work()
        wait()
        done += images
    return round(done / (time.perf_counter() - started), 1)


def wait() -> None:
    """Until the GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
