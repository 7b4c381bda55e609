"""A model whose stored images are programs: nothing is started, connected, imported or opened elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from torture.forged import forge_tensors
from torture.small_models import ROOT, learned
from torture.tally import Tally

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\n(/tmp) (w) file closefile\nshowpage\n%%EOF\n"


def run(seed: int, cases: int, place: Path) -> Tally:
    """Load, ask, serve, learn on and export one hostile model under an audit hook."""
    tally = Tally("a hostile model", seed)
    learned(place / "good")
    shutil.copytree(place / "good", place / "hostile")
    forge_tensors(place / "hostile", "memory", _programs)
    paths = [ROOT / "src", ROOT / "tests", ROOT, *filter(None, sys.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "torture.audited", str(place / "good"), str(place / "hostile"), "--export"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        tally.fail(done.stderr[-500:])
        return tally
    found = json.loads(done.stdout)
    for use in found["uses"]:
        tally.counts["refused" if use in found["refused"] else "went on"] += 1
    for problem in (*found["events"], *found["failed"].values()):
        tally.fail(problem)
    return tally


def _programs(memory: dict[str, Any]) -> None:
    count = len(memory["lengths"])
    memory["bytes"] = torch.frombuffer(bytearray(EPS * count), dtype=torch.uint8)
    memory["lengths"] = torch.full((count,), len(EPS))
