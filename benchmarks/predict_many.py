"""Does `tpl predict` need the same memory for any number of images? Images per second and peak memory, on this machine.

python benchmarks/predict_many.py                    # 1 000 and 10 000 images of 32 px: about two minutes on two cores
python benchmarks/predict_many.py --images 500 2000
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tpl import Learner, Task
from tpl.bench.results import describe_environment
from tpl.stream import load_source, split

UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


def main() -> None:
    """Make images and a small model, predict, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--tasks", type=int, default=2, help="tasks of the model; each sees every image")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        learn(root / "model", options.tasks)
        startup, _ = predict(root / "model", images(root / "one", 1), options.device)
        rows = []
        for count in options.images:
            seconds, peak = predict(root / "model", images(root / str(count), count), options.device)
            rows.append(
                {
                    "images": count,
                    "seconds": round(seconds, 2),
                    "images_per_second": round(count / max(seconds - startup, 1e-9)),
                    "peak_rss_mb": round(peak / 1e6),
                }
            )
    environment = describe_environment(torch.device(options.device))
    print(json.dumps({"startup_seconds": round(startup, 2), "runs": rows, "environment": environment}, indent=2))


def learn(model: Path, tasks: int) -> None:
    """A model of digits: how well it knows them does not matter here."""
    source = load_source("digits")
    learner = Learner(epochs=1, latent=8, memory=20, device="cpu")
    for task in split(source.train, None, source.class_names, 2)[:tasks]:
        learner.learn(Task(task.name, task.classes, task.train.select(np.arange(60))))
    learner.save(model)


def images(folder: Path, count: int) -> Path:
    """A folder of noisy pictures of 32 pixels, 1000 to a folder inside."""
    rng = np.random.default_rng(0)
    for i in range(count):
        place = folder / f"{i // 1000:04d}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(place / f"{i % 1000:03d}.png")
    return folder


def predict(model: Path, folder: Path, device: str) -> tuple[float, int]:
    """Seconds and peak bytes of one `tpl predict` in a process of its own."""
    command = [sys.executable, "-m", "tpl", "predict", str(model), str(folder), "--json", "--device", device]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as program:
        _, status, usage = os.wait4(program.pid, 0)
        program.returncode = os.waitstatus_to_exitcode(status)
    if program.returncode:
        raise SystemExit(f"tpl predict ended with {program.returncode}")
    return time.perf_counter() - started, usage.ru_maxrss * UNIT


if __name__ == "__main__":
    main()
