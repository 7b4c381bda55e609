"""Where the seconds of a `tpl run` go, from the command to the table, the first time and again.

Every round is a process of its own that runs the command as typed, with timers around the parts below. A part's seconds
are without those of the parts inside it; "the rest" is what no timer saw, with the start and the end of Python. A GPU
works while Python goes on: its seconds are counted where Python waits for it. The caches of decoded images and
of compiled code begin empty, and later rounds find what the first one left.

    PYTHONPATH=src python benchmarks/command_to_table.py c100-10t --encoder vit_tiny_patch16_224 --weights FILE \
        --data DIR --epochs 8
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

PARTS = {  # a part's name, and the functions that it consists of
    "check the command": ["tpl.cli.bench:check_settings"],
    "open the data set": ["tpl.bench.benchmarks:load_source"],
    "hash the data set": ["tpl.bench.run:data_hashes"],
    "make encoder and method": ["tpl.bench.spec:RunSpec.learner"],
    "decode and resize": ["tpl.stream.preprocess:Preprocess.batch"],
    "train": ["tpl.methods.bank.method:run_jobs"],
    "learn a task, all else": ["tpl.bench.run:_learn_stage"],
    "save the model": ["tpl.bench.run:OpenRun.keep"],
    "evaluate": ["tpl.bench.run:OpenRun.evaluate"],
    "write results": ["tpl.bench.run:OpenRun.result"],
}
IMPORT, COMPILE, REST = "import torch and the package", "compile", "the rest"


class Timers:
    """Seconds of parts, each without those inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = time.perf_counter()

    def begin(self, part: str) -> None:
        """From now on the time is this part's."""
        self._close()
        self._open.append(part)

    def end(self) -> None:
        """From now on the time is again the outer part's."""
        self._close()
        self._open.pop()

    def _close(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1] if self._open else REST] += now - self._since
        self._since = now

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with a timer."""

        def timed(*arguments: Any, **options: Any) -> Any:
            self.begin(part)
            try:
                return function(*arguments, **options)
            finally:
                self.end()

        return timed


def run_timed(arguments: list[str], report: Path) -> None:
    """`tpl run` with timers, in this process; the parts' seconds go to a file."""
    timers = Timers()
    timers.begin(IMPORT)
    main = importlib.import_module("tpl.cli").main
    for part, places in PARTS.items():
        for place in places:
            module, _, path = place.partition(":")
            *owners, name = path.split(".")
            owner = importlib.import_module(module)
            for each in owners:
                owner = getattr(owner, each)
            setattr(owner, name, timers.around(part, getattr(owner, name)))
    time_compiling(timers)
    timers.end()
    sys.argv = ["tpl", "run", *arguments]
    try:
        main()
    finally:
        timers.begin(REST)
        report.write_text(json.dumps(timers.seconds), encoding="utf-8")


def time_compiling(timers: Timers) -> None:
    """Time the compiler, too, from when it is first needed: to import it earlier would change what is measured."""
    compiling = importlib.import_module("tpl.nets.compiling")
    ready = compiling.import_compiler

    def import_compiler() -> None:
        if threading.current_thread() is not threading.main_thread():  # ahead, beside other parts
            ready()
            return
        timers.begin(IMPORT)
        ready()
        callback = importlib.import_module("torch._dynamo.callback")
        timers.end()
        if not callback.callback_handler.start_callbacks:
            callback.on_compile_start(lambda *_: timers.begin(COMPILE))
            callback.on_compile_end(lambda *_: timers.end())

    vars(compiling)["import_compiler"] = import_compiler


def measure(arguments: list[str], place: Path, number: int) -> dict[str, float]:
    """One round: seconds of the parts, and of all from the start of the process to its end."""
    report = place / f"round-{number}.json"
    caches = {"XDG_CACHE_HOME": str(place / "caches"), "TORCHINDUCTOR_CACHE_DIR": str(place / "caches" / "compiled")}
    command = [sys.executable, __file__, "--timed", str(report), *arguments, "--out", str(place / f"run-{number}")]
    usual = {name: value for name, value in os.environ.items() if name != "TPL_IMAGE_CACHE"}
    started = time.perf_counter()
    subprocess.run(command, env=usual | caches, check=True, stdout=sys.stderr)
    total = time.perf_counter() - started
    parts: dict[str, float] = json.loads(report.read_text(encoding="utf-8"))
    parts[REST] = total - sum(seconds for part, seconds in parts.items() if part != REST)
    return {"all": total} | parts


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--timed", metavar="FILE", help=argparse.SUPPRESS)
    given, arguments = parser.parse_known_args()
    if given.timed:
        run_timed(arguments, Path(given.timed))
        return
    with tempfile.TemporaryDirectory() as place:
        rounds = [measure(arguments, Path(place), number) for number in range(given.rounds)]
    if given.json:
        print(json.dumps({"command": ["tpl", "run", *arguments], "rounds": rounds}, indent=2))
        return
    for part in ("all", IMPORT, *PARTS, COMPILE, REST):
        print(f"{part:32}" + "".join(f"{found.get(part, 0):9.2f} s" for found in rounds))


if __name__ == "__main__":
    main()
