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

import numpy as np
import onnxruntime
import torch

from tpl import Learner
from tpl.bench.environment import describe_environment
from tpl.export.compare import compare
from tpl.export.file import export_onnx
from tpl.export.ready import PRECISIONS
from tpl.stream import load_source, split

BATCHES = (1, 64)


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
    ask = learner.method.log_probabilities
    rows = [{"what": "PyTorch", **speeds(lambda part: ask(part), pixels, options.seconds)}]
    with tempfile.TemporaryDirectory() as folder:
        for precision in PRECISIONS:
            started = time.perf_counter()
            made = export_onnx(learner, Path(folder) / f"{precision}.onnx", precision)
            seconds = time.perf_counter() - started
            session = opened(made.file, options.threads)
            rate = speeds(lambda part, s=session: s.run(None, {"images": part.numpy()}), pixels, options.seconds)
            row = {"what": precision, "bytes": made.bytes, "export_seconds": round(seconds, 1), **rate}
            rows.append(row | compare(learner, made.file, [(pixels, names)]).to_dict())
    environment = describe_environment(torch.device("cpu")) | {"onnxruntime": version("onnxruntime")}
    print(json.dumps({"tasks": options.tasks, "threads": options.threads, "rows": rows, "on": environment}, indent=2))


def opened(file: Path, threads: int) -> onnxruntime.InferenceSession:
    """The file in ONNX Runtime with so many threads."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])


def speeds(ask: Callable[[torch.Tensor], object], pixels: torch.Tensor, seconds: float) -> dict[str, float]:
    """Milliseconds a call, the median of as many as fit in the time, and images a second, for each batch size."""
    found = {}
    for batch in BATCHES:
        part = pixels[:batch].contiguous()
        ask(part)
        times, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            started = time.perf_counter()
            ask(part)
            times.append(time.perf_counter() - started)
        found[f"ms_batch_{batch}"] = round(1000 * float(np.median(times)), 2)
        found[f"fastest_ms_batch_{batch}"] = round(1000 * min(times), 2)
    return found


if __name__ == "__main__":
    main()
