"""Seconds from a command to its end where nothing is computed, or one image: what is imported decides them.

A small model is learned first. Then every command runs some times in a process of its own, in turns; printed are the
least wall-clock and the least processor seconds (a busy machine disturbs the former more). `import torch` is the
yardstick for `predict`.

    PYTHONPATH=src python benchmarks/startup.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

TORCH = "import torch"


def photos(folder: Path, classes: int = 2, count: int = 5) -> Path:
    """Class folders with a few images of noise, each class of another colour."""
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True)
        rng = np.random.default_rng(label)
        for number in range(count):
            noise = rng.integers(0, 64, (48, 48, 3)) + 90 * label
            Image.fromarray(noise.astype(np.uint8)).save(folder / f"class{label}" / f"{number}.png")
    return folder


def commands(model: Path, image: Path) -> dict[str, list[str]]:
    """Arguments of the interpreter for each thing that is measured."""
    package = {
        "tpl --help": ["--help"],
        "tpl list": ["list"],
        "tpl describe tpl-plus": ["describe", "tpl-plus"],
        "tpl show MODEL": ["show", str(model)],
        "a mistake in an option": ["run", "digits-5t", "--set", "nope=1"],
        "a model that is not there": ["predict", str(model / "absent"), str(image)],
        "tpl predict MODEL IMAGE": ["predict", str(model), str(image), "--device", "cpu"],
    }
    found = {name: ["-m", "tpl", *arguments] for name, arguments in package.items()}
    return {'python -c "import tpl"': ["-c", "import tpl"], f'python -c "{TORCH}"': ["-c", TORCH]} | found


def seconds(arguments: list[str]) -> tuple[float, float]:
    """Wall-clock and processor seconds of one process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, check=False)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="measure commands that contain this text")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder, model = photos(Path(place) / "photos"), Path(place) / "model"
        learn = [sys.executable, "-m", "tpl", "learn", str(model), str(folder), "--epochs", "1", "--device", "cpu"]
        subprocess.run(learn, capture_output=True, check=True)
        wanted = {k: v for k, v in commands(model, folder / "class0" / "0.png").items() if given.only in k}
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name in wanted}
        for _ in range(given.rounds):
            for name, arguments in wanted.items():
                measured[name].append(seconds(arguments))
    least = {
        name: {"wall": round(min(w for w, _ in each), 2), "cpu": round(min(c for _, c in each), 2)}
        for name, each in measured.items()
    }
    if given.json:
        print(json.dumps({"rounds": given.rounds, "seconds": least}, indent=2))
        return
    for name, found in least.items():
        print(f"{name:32} {found['wall']:6.2f} s, {found['cpu']:6.2f} s of a processor")


if __name__ == "__main__":
    main()
