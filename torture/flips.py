"""Bytes of a small model flipped, one at a time: each is noticed, or changes no answer."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from torture.small_models import bare, kill, learned
from torture.tally import Tally
from tpl import TplError
from tpl.store import ModelStore


def run(seed: int, cases: int, place: Path) -> Tally:
    """Flip every byte of a tiny directory and of a small model that learned, and random ones of a larger model."""
    tally, draw = Tally("flipped bytes", seed), random.Random(seed)
    ModelStore(place / "tiny").commit(*bare(1, 2))
    learned(place / "slda", "slda")
    learned(place / "tpl")
    for model, most in ((place / "tiny", cases // 2), (place / "slda", cases * 4 // 5), (place / "tpl", cases)):
        wanted, copy = kill.content(model), place / "copy"
        places = [(file, at) for file in _files(model) for at in range(file.stat().st_size)]
        if len(places) > most - tally.cases:
            places = draw.sample(places, most - tally.cases)
        else:
            tally.notes[f"every byte of {model.name}"] = len(places)
        shutil.copytree(model, copy)
        for file, at in places:
            _flip(tally, copy / file.relative_to(model), at, draw.randint(1, 255), copy, wanted)
        shutil.rmtree(copy)
    return tally


def _files(model: Path) -> list[Path]:
    return sorted(file for file in model.rglob("*") if file.is_file() and not file.name.startswith("."))


def _flip(tally: Tally, file: Path, at: int, bits: int, model: Path, wanted: object) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:at] + bytes([content[at] ^ bits]) + content[at + 1 :])
    try:
        if kill.content(model) == wanted:
            tally.counts["harmless"] += 1
        else:
            tally.fail(f"byte {at} of {file.name} changed by {bits}: another model")
    except TplError:
        tally.counts["noticed"] += 1
    except Exception as error:
        tally.fail(f"byte {at} of {file.name} changed by {bits}: {type(error).__name__}: {error}")
    file.write_bytes(content)
