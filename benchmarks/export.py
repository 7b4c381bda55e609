"""How large and how fast is an exported model? ONNX Runtime against PyTorch, in all precisions, on this machine.

python benchmarks/export.py                        # compact encoder, 3 tasks of digits: about four minutes on one core
python benchmarks/export.py --tasks 5 --threads 2
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from tpl import Learner
from tpl.bench.results import describe_environment
from tpl.export import PRECISIONS
from tpl.export.file import compare, export_onnx
from tpl.stream import load_source, split

BATCHES = (1, 64)
Ask = Callable[[torch.Tensor], object]


def main() -> None:
    """Learn, export, time, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=3, help="tasks of two digits")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each figure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    source = load_source("digits")
    learner = Learner(epochs=options.epochs, device="cpu", precision="fp32")
    tasks = split(source.train, source.test, source.class_names, 2)[: options.tasks]
    for task in tasks:
        learner.learn(task)
    tests = [task.test for task in tasks if task.test is not None]
    pixels = torch.cat([learner.prepare(images) for images in tests])
    names = [task.classes[y] for task, images in zip(tasks, tests, strict=True) for y in images.labels]
    rows: dict[str, dict[str, Any]] = {"PyTorch": {}}
    asks: dict[str, Ask] = {"PyTorch": learner.method.log_probabilities}
    with tempfile.TemporaryDirectory() as folder:
        for precision in PRECISIONS:
            started = time.perf_counter()
            made = export_onnx(learner, Path(folder) / f"{precision}.onnx", precision)
            seconds = round(time.perf_counter() - started, 1)
            compared = compare(learner, made.file, [(pixels, names)]).to_dict()
            rows[precision] = {"bytes": made.bytes, "export_seconds": seconds, **compared}
            asks[precision] = asking(made.file, options.threads)
    for batch in BATCHES:
        for name, figures in speeds(asks, pixels[:batch].contiguous(), options.seconds).items():
            rows[name] |= {f"{key}_batch_{batch}": value for key, value in figures.items()}
    environment = describe_environment(torch.device("cpu")) | {"onnxruntime": version("onnxruntime")}
    print(json.dumps({"tasks": options.tasks, "threads": options.threads, "rows": rows, "on": environment}, indent=2))


def asking(file: Path, threads: int) -> Ask:
    """The file in ONNX Runtime with so many threads."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
    return lambda pixels: session.run(None, {"images": pixels.numpy()})


def speeds(asks: dict[str, Ask], pixels: torch.Tensor, seconds: float) -> dict[str, dict[str, float]]:
    """Milliseconds a call, median and fastest: all take turns, so that whatever else the machine does hits all alike.

    CPU milliseconds leave out what other programs took, and add up over threads.
    """
    walls: dict[str, list[float]] = {name: [] for name in asks}
    cpus: dict[str, list[float]] = {name: [] for name in asks}
    for ask in asks.values():
        ask(pixels)
    end = time.perf_counter() + seconds * len(asks)
    while time.perf_counter() < end or len(walls["PyTorch"]) < 5:
        for name, ask in asks.items():
            wall, cpu = time.perf_counter(), time.process_time()
            ask(pixels)
            walls[name].append(1000 * (time.perf_counter() - wall))
            cpus[name].append(1000 * (time.process_time() - cpu))
    return {
        name: {
            "ms": round(float(np.median(walls[name])), 2),
            "fastest_ms": round(min(walls[name]), 2),
            "cpu_ms": round(float(np.median(cpus[name])), 2),
        }
        for name in asks
    }


if __name__ == "__main__":
    main()
