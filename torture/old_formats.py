"""Models of every released schema answer as they did when they were stored."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

from torture.small_models import ROOT, load_module
from torture.tally import Tally
from tpl import Learner, TplError

TOLERANCE = 0.001  # other machines and other batches round differently


def run(seed: int, cases: int, place: Path) -> Tally:
    """Load every stored model, as it is and as schema 1 would have written it."""
    tally = Tally("stored models of earlier versions", seed)
    load_module(ROOT / "tests" / "handwriting.py")
    probe = load_module(ROOT / "tests" / "stored_models.py").PROBE
    for stored in sorted((ROOT / "tests" / "models").iterdir()):
        wanted = json.loads((stored / "answers.json").read_text(encoding="utf-8"))["answers"]
        for schema in (2, 1):
            model = place / f"{stored.name}-{schema}"
            shutil.copytree(stored / "model", model)
            if schema == 1:
                _as_schema_1(model / "model.json")
            try:
                found = [answer.to_dict() for answer in Learner.load(model, device="cpu").answers(probe, top=6)]
            except TplError as error:
                tally.fail(f"{stored.name}, schema {schema}: {error}")
                continue
            for old, new in zip(wanted, found, strict=True):
                if old["class"] == new["class"] and math.isclose(
                    old["probability"], new["probability"], abs_tol=TOLERANCE
                ):
                    tally.counts["as before"] += 1
                else:
                    tally.fail(f"{stored.name}, schema {schema}: {new['class']} instead of {old['class']}")
    return tally


def _as_schema_1(file: Path) -> None:
    """No checksums, and of a task only its classes."""
    header = json.loads(file.read_text(encoding="utf-8"))
    header = {k: v for k, v in header.items() if k not in ("files", "removed_tasks")} | {"schema": 1}
    header["tasks"] = [{"classes": task["classes"], "file": task["file"]} for task in header["tasks"]]
    file.write_text(json.dumps(header), encoding="utf-8")
