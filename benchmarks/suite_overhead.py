"""What `tpl suite --engine local` costs over giving its commands by hand, one after the other.

By hand: one `tpl run` for each run of the grid. The suite: one `tpl suite --workers 1`. Both with the same threads, in
turns, in fresh directories. Prints wall-clock and processor seconds of both (a busy machine disturbs the former more);
ends with 1 if the numbers of the runs differ.

    python benchmarks/suite_overhead.py --methods tpl,slda --orders natural,random:1 --rounds 2 --json
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
from collections.abc import Callable
from pathlib import Path
from typing import Any


def tpl(*arguments: str) -> Any:
    """What a command prints as JSON."""
    command = [sys.executable, "-m", "tpl", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def timed(work: Callable[[], dict[str, float]]) -> tuple[dict[str, float], float, float]:
    """What `work` gives, with the wall-clock and processor seconds of its processes."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    found = work()
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return found, wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def by_hand(given: argparse.Namespace, out: Path) -> dict[str, float]:
    """Last of every run, by its directory's name."""
    found = {}
    for method in given.methods.split(","):
        for order in given.orders.split(","):
            cell = ["--method", method, "--order", order, "--out", str(out / f"{method} {order}")]
            result = tpl("run", given.benchmark, *cell, "--device", given.device)
            found[f"{method} {order}"] = result["last"]
    return found


def by_suite(given: argparse.Namespace, out: Path) -> dict[str, float]:
    """The same from one suite."""
    grid = ["--methods", given.methods, "--benchmarks", given.benchmark, "--orders", given.orders]
    runs = tpl("suite", *grid, "--out", str(out), "--workers", "1", "--device", given.device)["runs"]
    return {f"{run['method']} {run['order']}": run["last"] for run in runs}


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmark", default="digits-5t")
    parser.add_argument("--methods", default="tpl,slda")
    parser.add_argument("--orders", default="natural,random:1")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)  # for all processes started from here
    seconds: dict[str, list[float]] = {f"{way}_{kind}": [] for way in ("hand", "suite") for kind in ("wall", "cpu")}
    same = True
    with tempfile.TemporaryDirectory() as place:
        for number in range(given.rounds):
            numbers = []
            for way, work in (("hand", by_hand), ("suite", by_suite)):
                out = Path(place) / f"{way}-{number}"
                found, wall, cpu = timed(lambda work=work, out=out: work(given, out))  # type: ignore[misc]
                numbers.append(found)
                seconds[f"{way}_wall"].append(round(wall, 2))
                seconds[f"{way}_cpu"].append(round(cpu, 2))
            same &= numbers[0] == numbers[1]
    overhead = {kind: sum(seconds[f"suite_{kind}"]) / sum(seconds[f"hand_{kind}"]) - 1 for kind in ("wall", "cpu")}
    result = {"runs": len(numbers[0]), "threads": given.threads, "same_numbers": same, "overhead": overhead} | seconds
    if given.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{result['runs']} runs: the suite took {100 * overhead['wall']:+.1f} % more time", end="")
        print(f" and {100 * overhead['cpu']:+.1f} % more processor time; same numbers: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
