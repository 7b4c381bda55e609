"""An engine for tests: the processes are real, what they do is a script and takes no time; torch is not imported."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from tpl.bench.engines import base
from tpl.bench.engines.base import Emit, Job
from tpl.bench.engines.local import LocalEngine
from tpl.errors import TplError

SCRIPT = "script.json"  # beside the run directories: for every job, what it does at its first attempt, its second, ...
MADE = "made"  # finished runs to be taken, beside the script
MESSAGES = 50


def write_script(out: Path, script: dict[str, list[str]]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / SCRIPT).write_text(json.dumps(script), encoding="utf-8")


def attempts(place: Path) -> list[dict[str, Any]]:
    """What each process that worked on a job has noted: its number, its parent's and its variables."""
    file = place / "attempts"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def carry_out(job: Job, emit: Emit) -> None:
    place = Path(job.directory)
    script = json.loads((place.parent / SCRIPT).read_text(encoding="utf-8"))
    todo = script[job.name][len(attempts(place))]
    seen = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")}
    with (place / "attempts").open("a") as stream:
        stream.write(json.dumps({"pid": os.getpid()} | seen) + "\n")
    emit("run", {"images": [10, 10], "learned": 0})
    match todo:
        case "learn":
            emit("task", {"task": "task 1", "classes": ["0", "1"], "images": 10})
            emit("stage", {"stage": 0, "so_far": {"last": 0.75}})
            emit("warning", {"text": "hardly any room left"})
            shutil.copytree(place.parent / MADE / job.name, place, dirs_exist_ok=True)
        case "finish":
            shutil.copytree(place.parent / MADE / job.name, place, dirs_exist_ok=True)
        case "talk":  # notes how many jobs are at it at a time
            busy, most = place / "busy", 0
            busy.touch()
            for number in range(MESSAGES):
                emit("epoch", {"epoch": number, "epochs": MESSAGES})
                most = max(most, len(list(place.parent.glob("*/busy"))))
            busy.unlink()
            (place / "most").write_text(str(most))
        case "refuse":
            raise TplError("there is no such data")
        case "stumble":
            print("what went wrong", flush=True)  # noqa: T201
            raise RuntimeError("once")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(7)
        case "interrupt":  # as Ctrl-C would
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(600)  # until it is ended
        case "wait":
            time.sleep(600)  # until it is ended


def stop_after_stage(victim: str, flag: Path, job: Job, emit: Emit) -> None:
    """The real work; but the first process that has finished a task of the victim stops there, to be killed."""

    def emit_and_stop(kind: str, data: dict[str, Any]) -> None:
        stop = kind == "stage" and job.name == victim and not flag.exists()
        if stop:
            flag.touch()  # before the event: whoever gets it may kill this process at once
        emit(kind, data)
        if stop:
            time.sleep(600)

    base.carry_out(job, emit_and_stop)


class LightEngine(LocalEngine):
    """`local`, with light jobs."""

    def __init__(self, device: str = "auto", workers: int | None = None) -> None:
        super().__init__(device, workers)
        self.carry_out = carry_out
