"""How long do the post-hoc detectors take from stored features? 10 000 images, 10 tasks of 10 classes, ViT-tiny's size.

python benchmarks/detectors.py > benchmarks/detectors-cpu.json      # about ten seconds on two cores

Features are random: the arithmetic does not depend on what they show. ODIN needs the network and is left out.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from tpl.bench.results import describe_environment
from tpl.scores import DETECTORS

IMAGES, TASKS, CLASSES, DIM, TRAINED, STORED = 10_000, 10, 10, 192, 5_000, 200


def measure() -> dict[str, Any]:
    """Seconds to fit each detector to all tasks, and to score all images under all of them."""
    g = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(CLASSES, DIM, generator=g) / DIM**0.5, torch.zeros(CLASSES)
    y = torch.arange(TRAINED) % CLASSES
    z = torch.randn(TRAINED, DIM, generator=g) + 2 * weight[y]
    images = torch.randn(IMAGES, DIM, generator=g)
    logits, asked = z @ weight.T + bias, images @ weight.T + bias
    found: dict[str, Any] = {}
    for name, kind in DETECTORS.items():
        if name == "odin":
            continue
        started = time.perf_counter()
        fitted = [kind().use_head(weight, bias).fit_features(z, logits, y).use_memory(z[:STORED]) for _ in range(TASKS)]
        between = time.perf_counter()
        for detector in fitted:
            detector.score_features(images, asked)
        found[name] = {"fit": between - started, "score": time.perf_counter() - between}
    return found


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    found = measure()
    sums = {key: sum(times[key] for times in found.values()) for key in ("fit", "score")}
    size = {"images": IMAGES, "tasks": TASKS, "classes": CLASSES, "dim": DIM, "threads": torch.get_num_threads()}
    environment = describe_environment(torch.device("cpu"))
    print(json.dumps({"size": size, "seconds": found, "all": sums, "environment": environment}, indent=2))


if __name__ == "__main__":
    main()
