"""A benchmark run, as suites make them, is killed at a file operation and resumed: it must end as if undisturbed."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from torture.operations import Countdown, watching
from torture.small_models import ENCODER, kill
from torture.tally import Tally
from tpl.bench.results import RunResult
from tpl.bench.run import execute
from tpl.bench.spec import RunSpec

KILLED = 77


def _spec(place: Path) -> RunSpec:
    """A run over a few small images, which takes a fraction of a second."""
    for name, pictures in zip(("zero", "one", "two", "three"), kill._digits(), strict=False):
        (place / name).mkdir(parents=True)
        for number, pixels in enumerate(pictures):
            Image.fromarray(pixels).save(place / name / f"{number}.png")
    return RunSpec("folder", "slda", ENCODER, data=place, validation=0.34, device="cpu")


def run(seed: int, cases: int, place: Path) -> Tally:
    """Kill and resume runs until there were that many kills."""
    tally, draw = Tally("killed runs", seed), random.Random(seed)
    seen, spec = Countdown(0, lambda operation: None), _spec(place / "images")
    with watching(seen):
        whole = execute(spec, place / "whole").matrices
    while tally.cases < cases:
        out = place / "killed"
        shutil.rmtree(out, ignore_errors=True)
        number = draw.randint(1, max(2, seen.seen * 3 // 4))

        def killed(out: Path = out, number: int = number) -> None:
            with watching(Countdown(number, lambda operation: os._exit(KILLED))):
                execute(spec, out)

        _, status = os.waitpid(kill.in_child(killed), 0)
        if os.waitstatus_to_exitcode(status) != KILLED:
            continue
        _, status = os.waitpid(kill.in_child(lambda out=out: execute(spec, out, resume=out.exists())), 0)
        found = RunResult.read(out).matrices if status == 0 else {}
        if found.keys() == whole.keys() and all(np.array_equal(found[k], whole[k], equal_nan=True) for k in whole):
            tally.counts["the same run"] += 1
        else:
            tally.fail(f"operation {number}: {'another result' if found else 'it cannot be resumed'}")
    return tally
