"""Model directories changed at random, read without building their models: quick, so that many cases are tried.

Headers of the present model and of older versions, and bytes of tensors and of waiting images; checksums and seals fit.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load, save

from torture.fuzz import Case, run_attempts
from torture.mutations import mutate_json, mutate_tensors, mutated_bytes
from torture.small_models import kill, learned
from torture.tally import Tally
from tpl import Learner
from tpl.files import sha256_of
from tpl.header import SEAL, seal_of
from tpl.store import ModelStore
from tpl.versions import history

METHODS = ("tpl", "slda", "closed-form")


def with_versions(path: Path, method: str) -> None:
    """A model with an older version and images that wait."""
    learned(path, method)
    learner = Learner.load(path, device="cpu").rename("one", "uno")
    learner.save(path)
    learner.observe(kill._digits()[6], ["seven"] * 6)


def run_headers(seed: int, cases: int, place: Path) -> Tally:
    """Read changed headers."""
    texts = {}
    for method in METHODS:
        with_versions(place / method, method)
        for name in ("model.json", "versions/1.json"):
            texts[method, name] = (place / method / name).read_text(encoding="utf-8")

    def attempt(draw: random.Random) -> str:
        method, name = draw.choice(list(texts))
        model, text = place / method, texts[method, name]
        newest = texts[method, "model.json"]
        if draw.random() < 0.8:
            header = json.loads(text)
            Case.text = f"{name} of {method}: {mutate_json(header, draw)}"
            header[SEAL] = seal_of(header)
            text = json.dumps(header)
        else:
            Case.text = f"{name} of {method}: bytes"
            text = mutated_bytes(text.encode(), draw).decode("utf-8", "replace")
        _write(model, name, text.encode("utf-8", "replace"), json.loads(newest))
        try:
            ModelStore(model).header()
            if draw.random() < 0.2:
                history(model)
                ModelStore(model).files()
        finally:
            for each in ("model.json", "versions/1.json"):
                (model / each).write_text(texts[method, each], encoding="utf-8")
        return "read"

    return run_attempts(Tally("headers", seed), cases, attempt)


def _write(model: Path, name: str, content: bytes, newest: dict[str, Any]) -> None:
    """Replace a header; that of an older version gets its checksum into the newest one."""
    (model / name).write_bytes(content)
    if name != "model.json":
        newest["older"]["1"] = hashlib.sha256(content).hexdigest()
        newest[SEAL] = seal_of(newest)
        (model / "model.json").write_text(json.dumps(newest), encoding="utf-8")


def run_tensors(seed: int, cases: int, place: Path) -> Tally:
    """Read changed tensors and waiting images."""
    for method in METHODS:
        with_versions(place / method, method)

    def attempt(draw: random.Random) -> str:
        model = place / draw.choice(METHODS)
        store, header = ModelStore(model), json.loads((model / "model.json").read_text(encoding="utf-8"))
        name = draw.choice(["waiting.bin", *header["files"]])
        Case.text = f"{name} of {model.name}"
        file = model / name
        content, newest = file.read_bytes(), (model / "model.json").read_bytes()
        start = 32 if name == "waiting.bin" else 0
        changed = mutated_bytes(content[start:], draw)
        file.write_bytes((hashlib.sha256(changed).digest() if start else b"") + changed)
        try:
            if start:
                store.read_waiting()
            else:
                header["files"][name] = sha256_of(file)
                header[SEAL] = seal_of(header)
                (model / "model.json").write_text(json.dumps(header), encoding="utf-8")
                store._load(name, header["files"][name])
        finally:
            file.write_bytes(content)
            (model / "model.json").write_bytes(newest)
        return "read"

    return run_attempts(Tally("tensors", seed), cases, attempt)


def run_waiting(seed: int, cases: int, place: Path) -> Tally:
    """Load a model whose waiting images somebody changed who knows the format."""
    with_versions(place / "base", "closed-form")

    def attempt(draw: random.Random) -> str:
        model = place / "model"
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(place / "base", model)
        tensors = load((model / "waiting.bin").read_bytes()[32:])
        Case.text = mutate_tensors(tensors, draw)
        changed = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        (model / "waiting.bin").write_bytes(hashlib.sha256(changed).digest() + changed)
        learner = Learner.load(model, device="cpu")
        learner.predict(kill._digits()[0][:1])
        if draw.random() < 0.3:
            learner.learn_waiting()
        return "loaded"

    return run_attempts(Tally("waiting images", seed), cases, attempt)
