"""Seconds that `tpl learn` takes from command to prompt: for 40 photos in 4 classes, then for 20 in 2 more.

    PYTHONPATH=src python benchmarks/learn_time.py photos/ --encoder vit_tiny_patch16_224 --weights FILE

Each command runs in a process of its own, some rounds in turns; the least seconds of a round are printed, and what the
preset chose. The photos are those of the first class folders that have enough.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tpl.stream import is_image_name

CLASSES = 4, 2  # of the two tasks


def lists(photos: Path, each: int, place: Path) -> list[Path]:
    """A CSV file for each task, with `each` photos of every class."""
    places = sorted(path for path in photos.iterdir() if path.is_dir())
    folders = {path.name: sorted(p for p in path.iterdir() if is_image_name(p.name)) for path in places}
    usable = [(name, files[:each]) for name, files in folders.items() if len(files) >= each]
    if len(usable) < sum(CLASSES):
        sys.exit(f"{len(usable)} folders have {each} photos or more; {sum(CLASSES)} are needed.")
    found, first = [], 0
    for number, count in enumerate(CLASSES, start=1):
        found.append(place / f"task {number}.csv")
        with found[-1].open("w", newline="") as file:
            rows = ((str(path.resolve()), name) for name, files in usable[first : first + count] for path in files)
            csv.writer(file).writerows(rows)
        first += count
    return found


def learn(model: Path, table: Path, options: list[str]) -> dict[str, Any]:
    """What a command reports, and the seconds it took."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "tpl", "learn", str(model), str(table), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    report: dict[str, Any] = json.loads(done.stdout)
    return report | {"wall": round(time.perf_counter() - started, 1)}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path, help="class folders")
    parser.add_argument("--each", type=int, default=10, help="photos of a class")
    parser.add_argument("--encoder", default="compact")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--product",
        nargs="+",
        default=["--preset quick", "--preset balanced --time 2m", "--preset best --adapted-blocks 3"],
        metavar="OPTIONS",
        help="options of the first `tpl learn`, a row for each",
    )
    given = parser.parse_args()
    common = ["--encoder", given.encoder, "--device", "cpu"]
    common += ["--weights", str(given.weights)] if given.weights else []
    least: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as place:
        first, second = lists(given.photos, given.each, Path(place))
        for number in range(given.rounds):
            for row, name in enumerate(given.product):
                model = Path(place) / f"model {number} {row}"
                pair = [learn(model, first, common + shlex.split(name)), learn(model, second, ["--device", "cpu"])]
                before = least.get(name, pair)
                least[name] = [min(both, key=lambda one: one["wall"]) for both in zip(before, pair, strict=True)]
    print("| `tpl learn` with | first task, s | next task, s | blocks with adapters | epochs |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, pair in least.items():
        blocks, epochs = (
            pair[0].get("choice", {}).get("adapted_blocks") or "–",
            [str(one["epochs"] or "–") for one in pair],
        )
        print(f"| `{name}` | {pair[0]['wall']} | {pair[1]['wall']} | {blocks} | {', '.join(epochs)} |")


if __name__ == "__main__":
    main()
