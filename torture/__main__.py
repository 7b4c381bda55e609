"""The torture programme.

python -m torture                        all parts, some minutes
python -m torture --long                 all parts with the counts of the long form, some hours
python -m torture --hours 8              all parts again and again, with further seeds
python -m torture kills --cases 10000    one part

Prints a line for every part: its seed, what happened how often, and every case that broke a promise. The exit status is
1 if there was one. A case is repeated by the part's name and its seed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes with threads of their own cannot be copied by fork
sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]


class Part(NamedTuple):
    """One part of the programme: where it is, how many cases it tries, and what it attacks."""

    module: str
    function: str
    cases: int
    long: int  # cases of the long form
    text: str


PARTS = {
    "hostile": Part("hostile", "run", 1, 1, "a hostile model under an audit hook"),
    "formats": Part("old_formats", "run", 1, 1, "stored models of earlier versions"),
    "kills": Part("kills", "run", 300, 9_500, "writers killed at their n-th file operation"),
    "instants": Part("kills", "at_random", 20, 400, "writers killed at random instants"),
    "runs-killed": Part("run_kills", "run", 10, 100, "benchmark runs killed and resumed"),
    "faults": Part("faults", "run", 3500, 20_000, "the n-th file operation fails"),
    "power": Part("power_loss", "run", 5000, 50_000, "power cuts"),
    "interleaved": Part("interleaved", "run", 300, 10_000, "two writers and two readers"),
    "flips": Part("flips", "run", 4000, 20_000, "flipped bytes"),
    "models": Part("fuzz_models", "run", 500, 2_000, "changed model directories"),
    "headers": Part("fuzz_stores", "run_headers", 5000, 100_000, "changed headers of models"),
    "tensors": Part("fuzz_stores", "run_tensors", 2000, 60_000, "changed bytes of tensors"),
    "waiting": Part("fuzz_stores", "run_waiting", 200, 1_000, "changed images that wait"),
    "images": Part("fuzz_images", "run", 5000, 800_000, "changed images"),
    "archives": Part("fuzz_archives", "run", 1500, 10_000, "changed archives"),
    "requests": Part("fuzz_requests", "run", 800, 20_000, "changed requests"),
    "label-studio": Part("fuzz_label_studio", "run", 800, 15_000, "changed messages of Label Studio"),
    "runs": Part("fuzz_runs", "run", 500, 10_000, "changed run files"),
    "suites": Part("fuzz_runs", "run_suites", 1000, 10_000, "changed suites"),
    "server": Part("server", "run", 1, 1, "a server that learns and is killed"),
}
SERVER = {False: {"seconds": 60.0, "clients": 8}, True: {"seconds": 1800.0, "clients": 50}}  # True: the long form


@contextmanager
def _quiet():  # type: ignore[no-untyped-def]
    """Without what C libraries print about damaged images."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def run_part(name: str, seed: int, cases: int | None, long: bool, place: Path | None) -> tuple[int, int]:
    """Run a part and print its line; returns the numbers of cases and of broken promises."""
    part = PARTS[name]
    function: Callable[..., object] = getattr(import_module(f"torture.{part.module}"), part.function)
    count = cases or (part.long if long else part.cases)
    with tempfile.TemporaryDirectory(dir=place) as folder, _quiet():
        tally = function(seed, count, Path(folder), **(SERVER[long] if name == "server" else {}))
    print(f"{name}: {tally.line()}", flush=True)  # type: ignore[attr-defined]
    return tally.cases, len(tally.failures)  # type: ignore[attr-defined]


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", help=f"parts to run: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--seed", type=int, default=None, help="the first seed (default: drawn, and printed)")
    parser.add_argument("--cases", type=int, default=None, help="cases of each part")
    parser.add_argument("--long", action="store_true", help="the counts of the long form")
    parser.add_argument("--hours", type=float, default=0.0, help="go on with further seeds for that long")
    given = parser.parse_args()
    if unknown := set(given.part) - set(PARTS):
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() and os.access(memory, os.W_OK) else None  # quick to sync
    print(f"seed {seed}", flush=True)
    began, total, broken, rounds = time.monotonic(), 0, 0, 0
    while rounds == 0 or time.monotonic() - began < 3600 * given.hours:
        for name in given.part or PARTS:
            cases, wrong = run_part(name, seed + rounds, given.cases, given.long, place)
            total, broken = total + cases, broken + wrong
        rounds += 1
    minutes = (time.monotonic() - began) / 60
    print(f"{total} cases in {minutes:.1f} minutes, {broken} broken promises, first seed {seed}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
