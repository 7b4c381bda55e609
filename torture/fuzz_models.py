"""Model directories that somebody changed who knows the format: checksums and seals fit."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from torch import Tensor

from torture.forged import forge_bytes, forge_header, forge_tensors
from torture.fuzz import Case, run_attempts
from torture.mutations import mutate_json, mutate_tensors, mutated_bytes
from torture.small_models import apart, learned, probes
from torture.tally import Tally
from tpl import Learner

PARTS = ("task-0", "task-1", "shared", "memory")
METHODS = ("tpl", "tpl-plus", "slda", "replay", "closed-form", "ranpac")
MERGED = ("tpl", "closed-form")


def run(seed: int, cases: int, place: Path, methods: tuple[str, ...] = METHODS) -> Tally:
    """Load changed models, ask them, and sometimes learn on them, update them or merge them into another."""
    tally = Tally("model directories", seed)
    images = probes()[:2]
    for method in methods:
        learned(place / f"base-{method}", method)
        if method in MERGED:
            apart(place / f"apart-{method}", method)

    def attempt(draw: random.Random) -> str:
        model = place / "model"
        shutil.rmtree(model, ignore_errors=True)
        method = draw.choice(methods)
        shutil.copytree(place / f"base-{method}", model)
        Case.text = change(model, draw)
        learner = Learner.load(model, device="cpu")
        answered = learner.answers(images)
        assert all(0 <= answer.probability <= 1 for answer in answered)
        use = draw.random()
        if use < 0.1:
            learner.rename(learner.classes_[0], "another")
            learner.save(model)
            Learner.load(model, device="cpu")
        elif use < 0.15:
            learner.learn(images * 3, ["new", "newer"] * 3, held_out=0)
            return "learned on"
        elif use < 0.35 and method in MERGED:
            merged = Learner.load(place / f"apart-{method}", device="cpu")
            merged.merge(learner)
            assert all(0 <= answer.probability <= 1 for answer in merged.answers(images))
            return "merged"
        elif use < 0.45 and learner.method.can_update:
            learner.update(images, [learner.classes_[0]] * 2)
            learner.answers(images)
            return "updated"
        return "loaded"

    return run_attempts(tally, cases, attempt)


def change(model: Path, draw: random.Random) -> str:
    """Change one thing in a model directory; returns what."""
    kind = draw.random()
    said: list[str] = []
    if kind < 0.45:
        forge_header(model, lambda header: said.append(mutate_json(header, draw)))
        return said[0]
    if kind < 0.75:
        part = draw.choice(PARTS)
        names = [file for file in model.rglob(f"{part}.safetensors") if file.stat().st_size > 16]
        if names:
            forge_tensors(model, part, lambda tensors: said.extend(_described(part, tensors, draw)))
        return said[0] if said else "nothing"
    file = draw.choice(sorted(model.rglob("*.safetensors")))
    if kind < 0.9:
        forge_bytes(model, str(file.relative_to(model)), mutated_bytes(file.read_bytes(), draw))
        return f"bytes of {file.name}"
    file = draw.choice([file, model / "model.json", file.parent])
    what = draw.choice(("link", "pipe", "folder", "missing", "device", "holes"))
    if what == "holes" and file.is_file():
        os.truncate(file, 1 << 40)
        return f"{file.name}: holes"
    moved = model.parent / "moved"
    shutil.rmtree(moved, ignore_errors=True)
    moved.unlink(missing_ok=True)
    shutil.move(file, moved)
    if what == "link":
        file.symlink_to(moved)
    elif what == "device":
        file.symlink_to("/dev/zero")
    elif what == "pipe":
        os.mkfifo(file)
    elif what == "folder":
        file.mkdir()
    return f"{file.name}: {what}"


def _described(part: str, tensors: dict[str, Tensor], draw: random.Random) -> list[str]:
    return [f"{part}: {mutate_tensors(tensors, draw)}"] if tensors else []
