"""The files of a run's directory: what was run, what happened, and the numbers of every stage."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tpl.bench.environment import describe_environment
from tpl.bench.spec import RunSpec
from tpl.engine import Callback, Event
from tpl.errors import TplError
from tpl.files import replace_text
from tpl.learner import Learner
from tpl.stream import Stream, fingerprint


class RunError(TplError):
    """A run cannot start or go on."""


class EventLog:
    """Writes events down, one JSON object a line, and passes them on."""

    def __init__(self, file: Path, callback: Callback) -> None:
        self.file, self.callback = file, callback

    def __enter__(self) -> Callback:
        self.stream = self.file.open("a", encoding="utf-8")
        return self._tell

    def __exit__(self, *problem: object) -> None:
        self.stream.close()

    def _tell(self, event: Event) -> None:
        if event.kind != "prepare":  # too many, and of no interest afterwards
            self.stream.write(json.dumps({"time": time.time(), "kind": event.kind} | event.data) + "\n")
            self.stream.flush()
        self.callback(event)


def write_description(spec: RunSpec, out: Path, stream: Stream, learner: Learner) -> None:
    """Write run.json, or check that the run to be resumed is this one."""
    encoder = learner.method.encoder
    what = {
        "benchmark": spec.benchmark,
        "method": spec.method,
        "options": spec.all_options(),
        "seed": spec.seed,
        "order": spec.order,
        "classes": [list(task.classes) for task in stream],
        "test_images": [len(task.test) if task.test is not None else 0 for task in stream],
        "validation": spec.validation,
        "held_out": spec.held_out,
        "encoder": {"name": encoder.name, "sha256": encoder.sha256},
        "data": data_hashes(stream),
        "precision": "bf16" if learner.method.compute.bf16 else "fp32",
    }
    file = out / "run.json"
    if file.exists():
        before = {"held_out": 0.0} | json.loads(file.read_text(encoding="utf-8"))  # early runs held nothing out
        differing = [k for k in what if before.get(k) != json.loads(json.dumps(what[k]))]
        if differing:
            raise RunError(f"{out} was started with other settings ({', '.join(differing)}); it cannot be resumed so.")
        return
    what["environment"] = describe_environment(learner.method.compute.device)
    replace_text(file, json.dumps(what, indent=2) + "\n")


def data_hashes(stream: Stream) -> dict[str, str]:
    """What tells a run's images from others."""
    return {"train": fingerprint([t.train for t in stream]), "test": fingerprint([t.test for t in stream])}


def stage_file(out: Path, stage: int) -> Path:
    """Where a stage's numbers lie."""
    return out / "stages" / f"{stage:03d}.json"


def write_stage(out: Path, stage: int, content: dict[str, Any]) -> None:
    """Write a stage's numbers down, whole or not at all."""
    replace_text(stage_file(out, stage), json.dumps(content, indent=2) + "\n")
